"""Our train.py and train_ddp.py against other trainers: one model, weights, data, precision, in turn.

    python benchmarks/peers.py [--shapes gpt2 llama ...] [--amps off bf16] [--ranks 1|2] [--rounds N]

transformers in the barest loop and by its Trainer (which needs accelerate), nanoGPT (GPT-2), litgpt and
torchtitan (Llama; all three written anew in peer_models.py), each as its users run it: eager, and
compiled (torchtitan by block). Before anything is timed, each must give the loss and the gradient norm
of ours for one batch; who does not is out. nanoGPT does so with GPT-2's GELU, and is timed with its own,
the exact one. Each round of each has a process of its own; all are tuned alike (freed memory is kept, no
garbage collection within steps). On a CPU 6 layers, 6 heads, 384 wide, T 256, B 8, vocabulary 256, in
fp32 and in bf16 by autocast; on a GPU GPT-2 124M and 1.5B, and an 8B Llama's shape of 16 layers, bf16.
"""

import argparse
import functools
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
import transformers

from benchmarks import common
from benchmarks.peer_models import Peer, PeerBlock
from llm_train_bench.apply.precision import autocast
from llm_train_bench.measure.device import keep_freed_memory, synchronize
from llm_train_bench.measure.rates import time_steps
from llm_train_bench.model.hf import save_pretrained
from llm_train_bench.run.loop import uncollected

# Not by pick_device, which tunes the process for our own runs.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = DEVICE.type == "cuda"
AMPS = ["bf16"] if GPU else ["off", "bf16"]
SMALL = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"model_type": "gpt2", "n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 256}
LLAMA = {"model_type": "llama", "hidden_size": 384, "intermediate_size": 1024, "rms_norm_eps": 1e-5}
LLAMA |= {"num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 6}
LLAMA |= {"max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": False}
SHORT = {"num_hidden_layers": 16, "rope_scaling": None}
# By name: the config's content or file, its changes, micro batch, tokens a sample, measured steps.
CPU_SHAPES = {
    "gpt2": (GPT2 | SMALL | NO_DROPOUT, {}, 8, 256, 4),
    "llama": (LLAMA | SMALL, {}, 8, 256, 4),
}
GPU_SHAPES = {
    "gpt2-125m": ("configs/gpt2-125m.json", NO_DROPOUT, 32, 1024, 30),
    "gpt2-1.5b": ("configs/gpt2-1.5b.json", NO_DROPOUT, 16, 1024, 15),
    "llama-8b-16": ("configs/llama-3.1-8b.json", SHORT, 2, 4096, 15),
}
SHAPES = GPU_SHAPES if GPU else CPU_SHAPES
WARMUP = 10 if GPU else 3
PEERS = {"gpt2": ("nanogpt",), "llama": ("litgpt", "torchtitan")}
MODES = ["eager", "compiled"]
HUGGING_FACE = ("transformers", "trainer")
TOLERANCES = {"off": 1e-4, "bf16": 2e-2}  # of loss and norm, relative


def shape_of(name: str) -> tuple[dict[str, Any], int, int, int]:
    raw, changes, B, T, steps = SHAPES[name]
    if isinstance(raw, str):
        raw = json.loads((common.ROOT / raw).read_text())
    # The same padding of the vocabulary for all: rows beyond it take part in the matmul.
    return raw | changes, B, T, steps


def write_checkpoint(shape: str, directory: Path) -> None:
    """Our own fresh weights as a Hugging Face checkpoint; our loss and norm of the first batch."""
    raw, B, T, _ = shape_of(shape)
    for name in ("config.json", "plain.json"):  # the first becomes the checkpoint's
        (directory / name).write_text(json.dumps(raw))
    model, ids = common.fresh_model(directory / "config.json", T, DEVICE), first_batch(raw, B, T)
    save_pretrained(model, directory)
    ours = {}
    for amp in AMPS:
        with autocast(amp, DEVICE):
            loss = model(ids[:, :-1], ids[:, 1:])
        ours[amp] = agreement(loss, model)
    (directory / "ours.json").write_text(json.dumps(ours))


def peer_model(peer: str, directory: Path, T: int) -> torch.nn.Module:
    """A peer's module with the weights of the checkpoint, called as `module(ids, labels)` to the loss."""
    if peer in HUGGING_FACE:
        options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
        return transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
    ours = common.fresh_model(directory / "config.json", T, DEVICE)
    model = Peer(ours.config, peer, T)
    model.load(ours.state_dict())
    return model


def loss_of(peer: str, module: Callable[..., Any], ids: torch.Tensor) -> torch.Tensor:
    """The mean loss of (B, T + 1) ids; inputs and labels apart, as data loaders give them."""
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if peer in HUGGING_FACE:
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


def time_peer(peer: str, compiled: bool, amp: str, shape: str, directory: Path) -> float:
    """Seconds of a peer's step after its warm-up; its loss and norm are held against ours first."""
    raw, B, T, steps = shape_of(shape)
    module = peer_model(peer, directory, T).to(DEVICE)
    ids = first_batch(raw, B, T)
    with autocast(amp, DEVICE):
        loss = loss_of(peer, module, ids)
    theirs = agreement(loss, module)
    ours = json.loads((directory / "ours.json").read_text())[amp]
    if any(abs(a / b - 1) > TOLERANCES[amp] for a, b in zip(theirs, ours, strict=True)):
        raise SystemExit(f"{peer}: loss and gradient norm are {theirs}, ours {ours}; not timed")
    print(f"{peer}, {amp}: loss and gradient norm {theirs}, ours {ours}", file=sys.stderr)
    if peer == "nanogpt":
        for block in module.get_submodule("blocks").children():
            cast(PeerBlock, block).gelu = "none"
        with autocast(amp, DEVICE):
            loss = loss_of(peer, module, ids)
        print(f"{peer}, timed with the exact GELU: {agreement(loss, module)}", file=sys.stderr)
    if peer == "trainer":
        return trainer_steps(module, raw, B, T, steps, compiled, amp)
    called = module
    if compiled and peer == "torchtitan":
        for block in module.get_submodule("blocks").children():
            block.compile(fullgraph=True)
    elif compiled:
        called = torch.compile(module)
    if dist.is_initialized():
        called = torch.nn.parallel.DistributedDataParallel(called)
    draw = functools.partial(torch.randint, raw["vocab_size"], (B, T + 1), device=DEVICE)
    step = common.bare_step(module, functools.partial(loss_of, peer, called), draw, amp)
    time_steps(step, WARMUP, DEVICE)
    if dist.is_initialized():
        dist.barrier()
    return time_steps(step, steps, DEVICE)


def trainer_steps(module, raw, B: int, T: int, steps: int, compiled: bool, amp: str) -> float:
    """transformers.Trainer over random ids: seconds of a step after its warm-up."""
    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            synchronize(DEVICE)
            times.append(time.perf_counter())

    n = WARMUP + steps
    size = n * B * (dist.get_world_size() if dist.is_initialized() else 1), T
    data = [{"input_ids": x, "labels": x} for x in torch.randint(raw["vocab_size"], size)]
    options: dict[str, Any] = {"learning_rate": common.LR, "adam_beta2": common.BETAS[1]}
    options |= {"optim": "adamw_torch_fused", "max_grad_norm": common.CLIP, "max_steps": n}
    options |= {"bf16": amp == "bf16", "use_cpu": not GPU, "ddp_find_unused_parameters": False}
    options |= {"report_to": [], "save_strategy": "no", "logging_strategy": "no"}
    options |= {"per_device_train_batch_size": B, "torch_compile": compiled, "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as out:
        args = transformers.TrainingArguments(out, **options)
        transformers.Trainer(module, args, train_dataset=data, callbacks=[Clock()]).train()
    return (times[-1] - times[WARMUP - 1]) / steps


def time_ours(compiled: bool, amp: str, shape: str, directory: Path, ranks: int) -> float:
    """The same of our own scripts."""
    _, B, T, steps = shape_of(shape)
    argv = [directory / "plain.json", "--bsz", B, "--seq-len", T, "--amp", amp, "--lr", common.LR]
    argv += ["--n-steps", steps, "--warmup-steps", WARMUP, "--warmup-seconds", 0]
    argv += ["--pt-compile"] * compiled + ["--nproc", ranks] * (ranks > 1)
    script = "train.py" if ranks == 1 else "train_ddp.py"
    return common.run_train_apart(*argv, script=script).metrics.step_time_mean_s or math.nan


def contestant(name: str) -> None:
    """Be a rank of a peer, `shape/peer/eager|compiled/off|bf16/directory`; rank 0 prints the seconds."""
    shape, peer, mode, amp, directory = name.split("/", 4)
    rank = int(os.environ.get("RANK", 0))
    if GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        keep_freed_memory()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if GPU else "gloo")
    with uncollected():
        seconds = time_peer(peer, mode == "compiled", amp, shape, Path(directory))
    if rank == 0:
        print(seconds)
    if "RANK" in os.environ:
        dist.destroy_process_group()


def contestants(args: argparse.Namespace, shape: str, peers: Sequence[str], top: Path) -> dict:
    """By name, functions that run ours and the peers, each in a process or ranks of its own."""
    launcher = []
    if args.ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", args.ranks]
        threads = max(1, torch.get_num_threads() // args.ranks)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    functions, partial = {}, functools.partial
    for mode, amp in itertools.product(args.modes, args.amps):
        ours = partial(time_ours, mode == "compiled", amp, shape, top, args.ranks)
        functions[f"ours {mode} {amp}"] = ours
        for peer in peers:
            command = (*launcher, __file__, "--contestant", f"{shape}/{peer}/{mode}/{amp}/{top}")
            functions[f"{peer} {mode} {amp}"] = partial(common.number_apart, *command)
    return functions


def main() -> None:
    parser = common.parser_of(__doc__, 5)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--modes", nargs="*", default=MODES, choices=MODES)
    parser.add_argument("--amps", nargs="*", default=AMPS, choices=AMPS)
    parser.add_argument("--peers", nargs="*", help="default: all of the shape's family")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        contestant(args.contestant)
        return
    for shape in args.shapes:
        peers = args.peers or (*HUGGING_FACE, *PEERS["gpt2" if "gpt2" in shape else "llama"])
        raw, B, T, _ = shape_of(shape)
        with tempfile.TemporaryDirectory() as top:
            write_checkpoint(shape, Path(top))
            if GPU:
                torch.cuda.empty_cache()  # the contestants need it
            functions = contestants(args, shape, peers, Path(top))
            times = common.interleave(functions, args.rounds, first=1)
        pairs = {}
        for cell in itertools.product(args.modes, args.amps, peers):
            mode, amp, peer = cell
            if {ours := f"ours {mode} {amp}", theirs := f"{peer} {mode} {amp}"} <= times.keys():
                pairs[f"ours / {peer}, {mode}, {amp}"] = ours, theirs
        about = (
            f"a training step of {shape}: T {T}, B {B} a rank, V {raw['vocab_size']}, "
            f"{args.ranks} rank(s), tuned alike; nanogpt with its exact GELU; transformers "
            f"{transformers.__version__}"
        )
        common.report(f"peers-{shape}-{args.ranks}", times, pairs, about)


if __name__ == "__main__":
    main()
