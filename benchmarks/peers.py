"""Our train.py and train_ddp.py against other trainers: one model, weights, data, precision, in turn.

    python benchmarks/peers.py [--shapes gpt2 llama ...] [--ranks 1|2] [--rounds N] [--defaults] [--alone]

transformers in the barest loop and by its Trainer, nanoGPT (GPT-2), litgpt and torchtitan (Llama; all
three written anew in peer_models.py), each as its users run it: eager, and compiled (torchtitan by
block). Before anything is timed, each must give the loss and the gradient norm of ours for one batch;
who does not is out. All processes are tuned alike (freed memory is kept, no garbage collection within
steps); with --defaults the peers keep Python's and PyTorch's own settings. On a CPU 6 layers, 6 heads,
384 wide, T 256, B 8, vocabulary 256, fp32; on a GPU GPT-2 124M and 1.5B, and an 8B Llama's shape of 16
layers, bf16.
"""

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from benchmarks.common import interleave, processes, report, serve, time_steps, time_train
from benchmarks.peer_models import Peer
from llm_train_bench.apply.precision import autocast
from llm_train_bench.measure.device import keep_freed_memory, synchronize
from llm_train_bench.model.config import load_config
from llm_train_bench.model.hf import save_pretrained
from llm_train_bench.model.init import materialize
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.results.result_files import read_result
from llm_train_bench.run.loop import uncollected

# Not by pick_device, which tunes the process for our own runs.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = DEVICE.type == "cuda"
AMP = "bf16" if GPU else "off"
ROOT = Path(__file__).parent.parent
SMALL = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"model_type": "gpt2", "n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 256}
LLAMA = {
    "model_type": "llama", "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 256,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
# By name: the config's content or file, what of it differs, micro batch, tokens a sample, measured steps.
CPU_SHAPES = {
    "gpt2": (GPT2 | SMALL | NO_DROPOUT, {}, 8, 256, 4),
    "llama": (LLAMA | SMALL, {}, 8, 256, 4),
}
GPU_SHAPES = {
    "gpt2-125m": ("configs/gpt2-125m.json", NO_DROPOUT, 32, 1024, 30),
    "gpt2-1.5b": ("configs/gpt2-1.5b.json", NO_DROPOUT, 16, 1024, 15),
    "llama-8b-16": ("configs/llama-3.1-8b.json", {"num_hidden_layers": 16, "rope_scaling": None},
                    2, 4096, 15),
}  # fmt: skip
SHAPES = GPU_SHAPES if GPU else CPU_SHAPES
WARMUP = 10 if GPU else 3
PEERS = {"gpt2": ("transformers", "trainer", "nanogpt"),
         "llama": ("transformers", "trainer", "litgpt", "torchtitan")}  # fmt: skip
LR, BETAS, CLIP = 6e-4, (0.9, 0.95), 1.0
TOLERANCE = 2e-2 if GPU else 1e-4  # of loss and norm, relative


def shape_of(name: str) -> tuple[dict[str, Any], int, int, int]:
    """A shape's config, micro batch, tokens a sample and measured steps."""
    raw, changes, B, T, steps = SHAPES[name]
    if isinstance(raw, str):
        raw = json.loads((ROOT / raw).read_text())
    # The same padding of the vocabulary for all: rows beyond it take part in the matmul.
    return raw | changes, B, T, steps


def written(name: str, directory: Path) -> Path:
    """The shape's config, and our own freshly made weights, as a Hugging Face checkpoint."""
    raw, _, T, _ = shape_of(name)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    model = our_model(directory, T)
    save_pretrained(model, directory)
    (directory / "plain.json").write_text(json.dumps(raw))
    return directory


def our_model(directory: Path, T: int) -> Transformer:
    """Ours with the weights of seed 0."""
    config = load_config(directory / "config.json")
    with torch.device("meta"):
        model = Transformer(config, T)
    materialize(model, DEVICE, seed=0)
    return model


def peer_model(peer: str, directory: Path, T: int) -> torch.nn.Module:
    """A peer's module with the weights of the checkpoint, called as `module(ids, labels)` to the loss."""
    if peer in ("transformers", "trainer"):
        return transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        ).to(DEVICE)
    model = Peer(load_config(directory / "config.json"), peer, T)
    model.load(load_file(directory / "model.safetensors"))
    return model.to(DEVICE)


def loss_of(peer: str, module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss of (B, T + 1) ids; inputs and labels apart, as data loaders give them."""
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if peer in ("transformers", "trainer"):
        return module(input_ids=inputs, labels=inputs, shift_labels=labels, use_cache=False).loss
    return module(inputs, labels)


def agreement(loss: torch.Tensor, module: torch.nn.Module) -> tuple[float, float]:
    """Loss and gradient norm, gradients freed again."""
    loss.backward()
    norm = torch.nn.utils.get_total_norm(p.grad for p in module.parameters() if p.grad is not None)
    module.zero_grad(set_to_none=True)
    return float(loss.detach()), float(norm)


def first_batch(raw: dict[str, Any], B: int, T: int) -> torch.Tensor:
    """The ids that all are compared on."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(raw["vocab_size"], (B, T + 1), generator=generator).to(DEVICE)


def build_peer(
    peer: str, compiled: bool, shape: str, directory: Path, ranks: int
) -> Callable[[], float]:
    """A function that runs a peer's steps, warmed up: seconds per step. Checks its loss first."""
    raw, B, T, steps = shape_of(shape)
    module = peer_model(peer, directory, T)
    ids = first_batch(raw, B, T)
    with autocast(AMP, DEVICE):
        loss = loss_of(peer, module, ids)
    found = agreement(loss, module)
    expected = json.loads((directory / "ours.json").read_text())
    if any(abs(a / b - 1) > TOLERANCE for a, b in zip(found, expected, strict=True)):
        raise SystemExit(f"{peer}: loss and gradient norm are {found}, ours {expected}; not timed")
    if peer == "trainer":
        return functools.partial(trainer_steps, module, raw, B, T, steps, compiled)
    called = module
    if compiled and peer == "torchtitan":
        for block in module.blocks:
            block.compile(fullgraph=True)
    elif compiled:
        called = torch.compile(module)
    if ranks > 1:
        called = torch.nn.parallel.DistributedDataParallel(called)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, betas=BETAS, fused=True)

    def step() -> None:
        ids = torch.randint(raw["vocab_size"], (B, T + 1), device=DEVICE)
        with autocast(AMP, DEVICE):
            loss = loss_of(peer, called, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    def run() -> float:
        time_steps(step, WARMUP, DEVICE)
        if ranks > 1:
            dist.barrier()
        return time_steps(step, steps, DEVICE)

    return run


def trainer_steps(module, raw, B: int, T: int, steps: int, compiled: bool) -> float:
    """transformers.Trainer over random ids: seconds of a step after its warm-up."""
    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            synchronize(DEVICE)
            times.append(__import__("time").perf_counter())

    n = WARMUP + steps
    data = [{"input_ids": x, "labels": x} for x in torch.randint(raw["vocab_size"], (n * B, T))]
    with tempfile.TemporaryDirectory() as out:
        args = transformers.TrainingArguments(
            out, per_device_train_batch_size=B, max_steps=n, learning_rate=LR, adam_beta2=BETAS[1],
            max_grad_norm=CLIP, optim="adamw_torch_fused", bf16=GPU, use_cpu=not GPU,
            torch_compile=compiled, report_to=[], save_strategy="no", disable_tqdm=True,
            logging_strategy="no",
        )  # fmt: skip
        transformers.Trainer(module, args, train_dataset=data, callbacks=[Clock()]).train()
    return (times[-1] - times[WARMUP - 1]) / steps


def build_ours(compiled: bool, shape: str, directory: Path, ranks: int) -> Callable[[], float]:
    """The same of our own scripts, model and all built anew."""
    _, B, T, steps = shape_of(shape)
    argv = [directory / "plain.json", "--bsz", B, "--seq-len", T, "--amp", AMP, "--lr", LR,
            "--n-steps", steps, "--warmup-steps", WARMUP]  # fmt: skip
    argv += ["--pt-compile"] * compiled
    if ranks == 1:
        return functools.partial(time_train, *argv)

    def run() -> float:
        with tempfile.TemporaryDirectory() as out:
            argv_ = [*argv, "--nproc", ranks, "--warmup-seconds", 0, "--output-dir", out]
            command = [sys.executable, str(ROOT / "train_ddp.py"), *map(str, argv_)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
            (path,) = Path(out).glob("*/result.json")
            return read_result(path).metrics.step_time_mean_s

    return run


def contestant(name: str, ranks: int, defaults: bool) -> None:
    """Be one: `shape/peer/eager|compiled/directory`. With several ranks the others are started here."""
    shape, peer, mode, directory = name.split("/", 3)
    compiled, folder = mode == "compiled", Path(directory)
    rank = int(os.environ.get("RANK", 0))
    if peer == "ours":
        serve(build_ours(compiled, shape, folder, ranks))
        return
    others = []
    if ranks > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
        if rank == 0:
            with contextlib.closing(__import__("socket").create_server(("127.0.0.1", 0))) as s:
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
            os.environ |= {"WORLD_SIZE": str(ranks), "RANK": "0"}
            for i in range(1, ranks):
                others.append(subprocess.Popen(
                    [sys.executable, *sys.argv], env=os.environ | {"RANK": str(i)},
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                ))  # fmt: skip
        dist.init_process_group("nccl" if GPU else "gloo")
    tuned = contextlib.nullcontext()
    if not defaults:
        tuned = uncollected()
        if not GPU:
            keep_freed_memory()
    with tuned:
        run = build_peer(peer, compiled, shape, folder, ranks)
        if ranks == 1:
            serve(run)
        elif rank == 0:
            serve(functools.partial(_together, run, 1))
            _together(lambda: 0.0, 0)
        else:
            while _told():
                run()
    for process in others:
        process.wait()


def _together(run: Callable[[], float], go_on: int) -> float:
    """Tell the other ranks to run too, or to end."""
    dist.broadcast(torch.tensor([go_on]), 0)
    return run()


def _told() -> bool:
    word = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(word, 0)
    return bool(word)


@contextlib.contextmanager
def prepared(shape: str) -> Iterator[Path]:
    """A directory with the checkpoint, and our loss and gradient norm of the first batch."""
    with tempfile.TemporaryDirectory() as top:
        folder = written(shape, Path(top))
        (folder / "ours.json").write_text(json.dumps(our_agreement(shape, folder)))
        if GPU:
            torch.cuda.empty_cache()  # the contestants need it
        yield folder


def our_agreement(shape: str, folder: Path) -> tuple[float, float]:
    """Our loss and gradient norm of the first batch."""
    raw, B, T, _ = shape_of(shape)
    model, ids = our_model(folder, T), first_batch(raw, B, T)
    with autocast(AMP, DEVICE):
        loss = model(ids[:, :-1], ids[:, 1:])
    return agreement(loss, model)


def main() -> None:
    """Time all contestants of each shape, and report the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--defaults", action="store_true", help="peers without our process tuning")
    parser.add_argument(
        "--modes", nargs="*", default=["eager", "compiled"], choices=["eager", "compiled"]
    )
    parser.add_argument(
        "--alone", action="store_true", help="a process a run: all do not fit at once"
    )
    parser.add_argument("--peers", nargs="*", help="these alone")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        contestant(args.contestant, args.ranks, args.defaults)
        return
    given = ["--ranks", str(args.ranks)] + ["--defaults"] * args.defaults
    for shape in args.shapes:
        wanted = args.peers or PEERS["gpt2" if shape.startswith("gpt2") else "llama"]
        if args.ranks > 1:
            wanted = [peer for peer in wanted if peer != "trainer"]
        raw, B, T, _ = shape_of(shape)
        with prepared(shape) as folder:
            modes = args.modes
            names = {f"{peer} {mode}": f"{shape}/{peer}/{mode}/{folder}"
                     for mode in modes for peer in ("ours", *wanted)}  # fmt: skip
            with processes(__file__, names, given, args.alone) as contestants:
                times = interleave(contestants, args.rounds, first=int(args.alone))
        pairs = {f"ours / {peer}, {mode}": (f"ours {mode}", f"{peer} {mode}")
                 for mode in modes for peer in wanted
                 if f"{peer} {mode}" in times and f"ours {mode}" in times}  # fmt: skip
        about = (
            f"a training step of {shape}: T {T}, B {B} a rank, V {raw['vocab_size']}, "
            f"{'bf16' if GPU else 'fp32'}, {args.ranks} rank(s), peers "
            f"{'with default settings' if args.defaults else 'tuned alike'}; transformers "
            f"{transformers.__version__}"
        )
        report(f"peers-{shape}-{args.ranks}{'-defaults' * args.defaults}", times, pairs, about)


if __name__ == "__main__":
    main()
