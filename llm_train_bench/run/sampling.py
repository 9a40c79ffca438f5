"""--sample: text that the trained model writes, a check for the eye that it learnt something."""

from collections.abc import Callable
from pathlib import Path

import torch

from llm_train_bench.apply.precision import autocast
from llm_train_bench.base.errors import UsageError
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.settings.flags import DataFlags

TEMPERATURE = 0.8


def text_decoder(files: DataFlags, vocab_size: int) -> Callable[[list[int]], str]:
    """Token ids to text, by the tokenizer.json beside weights or data, or as bytes; else UsageError."""
    places = [Path(files.init_from)] if files.init_from else []
    if files.data != "synthetic":
        places += [Path(files.data).parent]
    for place in places:
        if (path := place / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            try:
                return Tokenizer.from_file(str(path)).decode
            except BaseException as error:  # the library's panics are no Exceptions
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                raise UsageError(f"--sample: {path} is no tokenizer.json: {error}") from None
    if vocab_size == 256:
        return lambda ids: bytes(ids).decode("utf-8", errors="replace")
    raise UsageError(
        f"--sample: the vocabulary has {vocab_size} tokens and no tokenizer.json lies beside --data or "
        "in --init-from; put one there"
    )


def text_writer(
    n: int, files: DataFlags, work: Work
) -> Callable[[Transformer, torch.device], str] | None:
    """A function that has a model write `n` tokens; None for none. UsageError if nothing decodes them."""
    if not n:
        return None
    decode = text_decoder(files, work.config.vocab_size)
    length = work.batch.seq_len

    @torch.no_grad()
    def write(model: Transformer, device: torch.device) -> str:
        generator = torch.Generator().manual_seed(files.seed)
        ids = [0]
        model.eval()
        for _ in range(n):
            context = ids[-length:]
            # Of one length, or compiled blocks would be compiled anew; later positions change nothing.
            tokens = torch.tensor([context + [0] * (length - len(context))], device=device)
            with autocast(work.amp, device):
                logits = model(tokens)[0, len(context) - 1].float().cpu()
            if not logits.isfinite().all():
                return "(nothing: the model's logits are not finite)"
            chances = (logits / TEMPERATURE).softmax(dim=-1)
            ids.append(int(torch.multinomial(chances, 1, generator=generator)))
        model.train()
        mark = "\N{REPLACEMENT CHARACTER}"
        return "".join(c if c.isprintable() or c in "\n\t" else mark for c in decode(ids[1:]))

    return write
