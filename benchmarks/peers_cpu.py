"""One GPT shape in our train.py and in transformers' GPT-2, eager and compiled, interleaved on a CPU.

    python benchmarks/peers_cpu.py [--rounds N]

6 layers, 6 heads, 384 wide, T 256, B 8, vocabulary 65, fp32, AdamW fused, gradients clipped; no
dropout. transformers runs in the barest loop, ours with all its measuring; each in a process of its own.
"""

import argparse
import functools
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers

from benchmarks.common import interleave, processes, report, serve, time_steps, time_train

SHAPE = dict(
    model_type="gpt2", vocab_size=65, n_positions=256, n_embd=384, n_layer=6, n_head=6,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
B, T, STEPS = 8, 256, 4
CPU = torch.device("cpu")


def peer(compiled: bool):
    """The function of one training step of transformers' model."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if compiled else model

    def step():
        ids = torch.randint(SHAPE["vocab_size"], (B, T))
        forward(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(*flags: str) -> float:
    """Seconds per step of train.py, model and all built anew."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(SHAPE))
        return time_train(path, "--bsz", B, "--seq-len", T, "--amp", "off", "--device", "cpu",
                          "--n-steps", STEPS, "--warmup-steps", 4, *flags)  # fmt: skip


CONTESTANTS = {
    "ours eager": lambda: ours,
    "transformers eager": lambda: functools.partial(time_steps, peer(False), STEPS, CPU),
    "ours compiled": lambda: functools.partial(ours, "--pt-compile"),
    "transformers compiled": lambda: functools.partial(time_steps, peer(True), STEPS, CPU),
}


def main() -> None:
    """Time all four and report the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        serve(CONTESTANTS[args.contestant]())
        return
    with processes(__file__, list(CONTESTANTS)) as contestants:
        times = interleave(contestants, args.rounds)
    report(
        "peers_cpu",
        times,
        {
            "ours / transformers, eager": ("ours eager", "transformers eager"),
            "ours / transformers, compiled": ("ours compiled", "transformers compiled"),
        },
        "one training step of GPT-2 6 layers, 6 heads, 384 wide, T 256, B 8, V 65, fp32",
    )


if __name__ == "__main__":
    main()
