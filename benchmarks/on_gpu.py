"""A quarter of an hour of a GPU: the questions that matter most, in one command that ends in time.

    python benchmarks/on_gpu.py [PART ...] [--minutes N] [--output-dir DIR] [--nanogpt CHECKOUT]

    mission   the README's commands: CUDA graphs, DDP with FP8, FSDP; Transformer Engine, torchao, bf16
    peers     other trainers beside ours (benchmarks/peer_models.py), compiled, in bf16
    moe       experts in bf16 and FP8, with traces
    ranks     layouts of several ranks against one, over NCCL on this GPU (docs/MODELS.md)
    kernels   matmul rates (benchmarks/gemm.py), and single kernels
    fp8       bf16 and FP8 of one shape, three times in turn, then traced
    exact     initial values, and the known losses of the workloads, in fp32
    check     check.py with three workloads
    tests     the tests that need a GPU

Parts run in this order, one process each, until N minutes are over (9). One that needs more than is left
is left out. The runs of a part take turns, in rounds. Each shows its first losses, and is wrong if they
or its first gradient norm differ from those of its model's first run. DIR/PART.json has the results as
they come, DIR/PART.log what was printed, DIR/PART/ the runs. On a CPU the models are tiny. Exit codes: 1
if anything failed or was wrong, else 5 if there was no time for something.
"""

import argparse
import dataclasses
import functools
import gc
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))


import numpy as np
import torch
import torch._functorch.config as functorch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import common
from llm_train_bench.base.children import child
from llm_train_bench.base.files import ROOT, write_whole
from llm_train_bench.check.workloads import Workload, workloads
from llm_train_bench.measure.device import time_steps
from llm_train_bench.model.init import fill_normal
from llm_train_bench.model.layout import Permute, inverse
from llm_train_bench.model.loss import LinearCrossEntropy
from llm_train_bench.results.result_files import read_steps
from llm_train_bench.run.failures import classify

DEVICE = common.device_of_runs()
GPU = DEVICE.type == "cuda"
LAYERS, NO_TIME = "num_hidden_layers", "no time"
DIFFERS = {"losses": 3e-3, "norm": 0.05}  # relative: more than by any format

# Config, its changes, micro batch and tokens, with 120 GiB of memory and with less; the config on a CPU.
MODELS: dict[str, tuple[Any, ...]] = {
    "125m": ("gpt2-125m", {}, (128, 1024), {}, (64, 1024), "gpt2-tiny"),
    "1.5b": ("gpt2-1.5b", {}, (32, 1024), {}, (12, 1024), "gpt2-tiny"),
    "8b": ("llama-3.1-8b", {LAYERS: 16}, (5, 4096), {LAYERS: 8}, (3, 4096), "llama-tiny"),
    "70b": ("llama-70b-proxy", {}, (2, 4096), {"vocab_size": 32000}, (1, 4096), "llama-tiny"),
    "moe": ("moe-0.7b", {}, (32, 1024), {}, (32, 1024), "moe-tiny"),
}
STEPS = "--n-steps " + ("15 --warmup-steps 8 --warmup-seconds 5" if GPU else "2 --warmup-steps 3")
COMPILED = "--pt-compile" * GPU  # it takes a CPU longer than all the rest
GRAPHS = COMPILED and f"{COMPILED} --compile-mode reduce-overhead"
EMULATED = "" if GPU else "--fp8-backend torchao --fp8-emulate"
TORCHAO = f"--use-fp8 --fp8-backend torchao {EMULATED}"
MISSION = {
    "125m, CUDA graphs": f"train.py 125m {GRAPHS}",
    "1.5b, DDP, FP8": f"train_ddp.py 1.5b --use-fp8 {EMULATED}",
    "70b, FSDP": "train_fsdp.py 70b --sac-freq 1/4",
    "8b, bf16": "train.py 8b --amp bf16",
    "8b, bf16, compiled": f"train.py 8b --amp bf16 {COMPILED}",
    "8b, bf16, Transformer Engine": "train.py 8b --amp bf16 --linear te",
    "8b, FP8, Transformer Engine": "train.py 8b --use-fp8 --fp8-backend te",
    "8b, FP8, torchao, compiled": f"train.py 8b {COMPILED} {TORCHAO}",
}
MOE = {
    "moe, bf16": "train.py moe --amp bf16 --profile",
    "moe, bf16, compiled": f"train.py moe --amp bf16 --profile {COMPILED}",
    "moe, FP8": f"train.py moe --profile --fp8-recipe rowwise {TORCHAO}",
}
FP8 = {"8b, bf16": f"train.py 8b {COMPILED}", "8b, FP8": f"train.py 8b {COMPILED} {TORCHAO}"}
TRACED = {
    f"{model}, {kind}, traced": f"{FP8[f'8b, {kind}']} --profile".replace("8b", model)
    for model in ("8b", "1.5b")
    for kind in ("bf16", "FP8")
}


class LeftOut(Exception):
    """A run cannot be had here."""


@dataclasses.dataclass
class Part:
    """A part in its process: until when it may run, and the rows of its table, written as they come."""

    name: str
    out: Path
    until: float
    nanogpt: str | None
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    took: dict[str, float] = dataclasses.field(default_factory=dict)

    def note(self, began: float, **row: Any) -> None:
        row["took_s"] = round(time.monotonic() - began, 1)
        self.rows.append(row)
        write_whole(self.out / f"{self.name}.json", json.dumps(self.rows, indent=1) + "\n")
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)

    def take_turns(self, runs: dict[str, Callable[[int], dict[str, Any]]], rounds: int) -> None:
        """Call each with the number of the round, round after round, while there is time for it.

        What fails is left out of later rounds. A name begins with that of a model.
        """
        first: dict[str, dict[str, Any]] = {}
        for number in range(rounds):
            for name, run in list(runs.items()):
                began = time.monotonic()
                usual = statistics.median(self.took.values()) if self.took else 0
                if self.until - began < 1.2 * self.took.get(name, usual):
                    self.note(began, round=number, run=name, left_out=NO_TIME)
                    continue
                row: dict[str, Any]
                try:
                    row = run(number)
                except (Exception, SystemExit) as error:
                    del runs[name]
                    kind = {LeftOut: "left_out", common.ContestantEnded: "wrong"}.get(type(error))
                    row = {kind: str(error)} if kind else {"failed": classify(error).text}
                    forget(error)
                right = first.setdefault(name.split(",")[0], row) if "losses" in row else row
                wrong = [key for key in DIFFERS if key in row and differs(key, row, right)]
                row |= {"wrong": f"other {' and '.join(wrong)}"} if wrong else {}
                self.note(began, round=number, run=name, **row)
                self.took[name] = time.monotonic() - began
                gc.collect()
                if GPU:
                    torch.cuda.empty_cache()


def differs(key: str, row: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether a run's losses, or its norm, are not those of another, or not finite."""
    pairs = zip(np.ravel(row[key]), np.ravel(right[key]), strict=True)
    return not all(abs(a / b - 1) < DIFFERS[key] for a, b in pairs)


def forget(error: BaseException | None) -> None:
    """Print an error's traceback, and let go of the model that its frames hold."""
    traceback.print_exception(error)
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def sized(model: str) -> tuple[dict[str, Any], int, int]:
    """The config of a model of MODELS, its micro batch and its tokens a sample, for this device."""
    config, changes, batch, fewer, smaller, tiny = MODELS[model]
    if not GPU:
        return json.loads((ROOT / f"configs/{tiny}.json").read_text()), 2, 64
    if torch.cuda.get_device_properties(0).total_memory < 120 * 2**30:
        changes, batch = fewer, smaller
    return json.loads((ROOT / f"configs/{config}.json").read_text()) | changes, *batch


def run_here(script: str, argv: list[str], out: Path) -> dict[str, Any]:
    """The figures of a training script's run in this process; its directory is in `out`."""
    r = common.run_train(*argv, "--no-tensorboard", script=script, out=out)
    torch._dynamo.reset()  # it holds CUDA graphs
    m, steps = r.metrics, read_steps(out / r.run_name / "steps.jsonl")
    losses, ms = [step["loss"] for step in steps[:3]], 1e3 * (m.step_time_mean_s or 0)
    figures = {"tokens_per_s": m.tokens_per_sec, "tflops_causal": m.model_tflops_per_gpu_causal}
    figures |= {"gib": m.peak_allocated_gib, "invalid": r.invalid}
    return {"losses": losses, "norm": steps[0]["grad_norm"], "ms": ms} | figures


def run_commands(part: Part, commands: dict[str, str], rounds: int) -> None:
    """Commands of ours, whose second word is a model of MODELS, in turn."""

    def run(command: str, name: str, number: int) -> dict[str, Any]:
        if "Transformer Engine" in name and not importlib.util.find_spec("transformer_engine"):
            raise LeftOut("Transformer Engine is not installed")
        script, model, *flags = f"{command} {STEPS}".split()
        (config, B, T), path = sized(model), part.out / part.name / f"{model}.json"
        write_whole(path, json.dumps(config))
        argv = [str(path), "--bsz", str(B), "--seq-len", str(T), *flags]
        return run_here(script, argv, path.parent / f"{name.replace(', ', '-')}-{number}")

    part.take_turns({n: functools.partial(run, c, n) for n, c in commands.items()}, rounds)


def run_program(part: Part, name: str, words: str, *more: object, **environment: str) -> None:
    """Another program of this project, for the time that is left; its figures are in its log."""
    began, command = time.monotonic(), [sys.executable, *words.split(), *map(str, more)]
    with (part.out / f"{part.name}-{name}.log").open("w+") as log:
        code = limited(command, part.until, log, **environment)
        log.seek(0)
        last = [line.strip("= \n") for line in log if line.strip()][-1:]
    failed = {"failed": f"exit code {code}"} if code else {}
    part.note(began, run=name, last="".join(last), **failed)


def limited(command: list[str], until: float, log: Any, **environment: str) -> int:
    """A command's exit code, 124 if it had to be ended; all that it started ends with it, or with us."""
    options = {"stdout": log, "stderr": log, "cwd": ROOT, "env": os.environ | environment}
    with child(command, **options) as process:
        try:
            return process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return 124


def mission(part: Part) -> None:
    run_commands(part, MISSION, rounds=2 if GPU else 1)


def moe(part: Part) -> None:
    run_commands(part, MOE, rounds=2 if GPU else 1)


def fp8(part: Part) -> None:
    run_commands(part, FP8, rounds=3)
    run_program(part, "compare", "compare.py", *(part.out / part.name).glob("8b*/*/result.json"))
    run_commands(part, TRACED, rounds=1)


def shapes_of_peers(bench: Any) -> dict[str, Any]:
    """Models of a GPU's size with fewer layers, so that they compile in time; tiny ones on a CPU."""
    shapes = {}
    for name, B, steps, changes in (
        ("gpt2, 125m", 32, 30, bench.NO_DROPOUT),
        ("llama, 8b", 2, 12, {LAYERS: 4, "rope_scaling": None}),
        ("gpt2, 1.5b", 12, 12, bench.NO_DROPOUT | {"n_layer": 12}),
    ):
        config, _, T = sized(name.split(", ")[1])
        sizes = (B, T, 8, steps) if GPU else (1, 32, 1, 1)
        shapes[name] = bench.Shape(config | changes, *sizes)
    return shapes


def peers(part: Part) -> None:
    """Other trainers beside ours; on a CPU that has ten minutes, whole comparisons of small models."""
    from benchmarks import peers as bench

    until = part.until
    thorough = GPU or until - time.monotonic() > 600
    shapes = bench.SHAPES if thorough and not GPU else shapes_of_peers(bench)
    amps = bench.AMPS if thorough and not GPU else ["bf16"]
    for index, ((name, shape), amp) in enumerate(itertools.product(shapes.items(), amps)):
        share = (until - time.monotonic()) / (len(shapes) * len(amps) - index)
        part.until = time.monotonic() + share
        family, model = name.split(", ")
        name = f"{name}, {amp}"
        with tempfile.TemporaryDirectory() as top:
            save = functools.partial(bench.write_checkpoint, shape, Path(top))
            part.take_turns({f"{name}, our weights": lambda _, save=save: save() or {}}, rounds=1)
            if {"failed", "left_out"} & part.rows[-1].keys():
                continue
            flags = bench.our_flags(shape, Path(top), thorough, amp)

            def time_ours(
                number: int, flags=flags, out=f"{family}-{model}-{amp}"
            ) -> dict[str, Any]:
                return run_here("train.py", flags, part.out / part.name / f"{out}-{number}")

            def time_peer(peer: str, _: int, shape=shape, amp=amp, top=top) -> dict[str, Any]:
                torch._dynamo.reset()
                return {"ms": 1e3 * bench.time_peer(peer, thorough, amp, shape, Path(top))}

            turns: dict[str, Callable[[int], dict[str, Any]]] = {f"{name}, ours": time_ours}
            for peer in bench.peers_of(family, part.nanogpt, GPU):
                turns[f"{name}, {peer.partition('=')[0]}"] = functools.partial(time_peer, peer)
            part.take_turns(turns, rounds=3 if thorough else 1)


def ranks(part: Part) -> None:
    names = "on-gpu" if GPU else "tp2"
    run_program(part, "layouts", f"-m tests.layouts {names}", DEVICE=DEVICE.type)


def kernels(part: Part) -> None:
    """GB/s or TFLOP/s of single kernels, of what they must move or compute."""
    more = "1.5b.json --heat 10 --seconds 0.1" if GPU else "tiny.json --seconds 0.002 --tokens 9"
    run_program(part, "gemm", f"benchmarks/gemm.py --no-keep configs/gpt2-{more}")
    N, d, V, k = (32768, 1600, 50304, 4) if GPU else (64, 64, 512, 2)
    dtype = torch.bfloat16 if GPU else torch.float32
    size = 1e-9 * N * dtype.itemsize  # GB of a column
    turns: dict[str, Callable[[int], dict[str, Any]]] = {}
    functorch.donated_buffer = False  # backwards run again and again

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=True)

    def fused(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
        return torch.compile(function, options={**options}, dynamic=False) if GPU else function

    def add(name: str, function, inputs, forward: float, backward: float, unit="GB/s") -> None:
        """Both passes of a function, and the amounts that they move or compute; no backward: 0."""
        try:
            out = function(*inputs)
        except Exception as error:
            part.note(time.monotonic(), run=name, failed=classify(error).text)
            return
        gradient = torch.randn_like(out)

        def back() -> object:
            return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

        def run(work: Callable[[], object], amount: float, _: int) -> dict[str, Any]:
            work()  # compiles
            seconds = time_steps(work, 20 if GPU else 1, DEVICE)
            return {"ms": 1e3 * seconds, unit: amount / seconds}

        turns[f"{name}, forward"] = functools.partial(run, lambda: function(*inputs), forward)
        if backward:
            turns[f"{name}, backward"] = functools.partial(run, back, backward)

    for width in (768, d):
        norm = fused(lambda x, w: F.layer_norm(x, w.shape, w, w))
        inputs = random(N, width), random(width)
        add(f"LayerNorm {width}", norm, inputs, 2 * size * width, 3 * size * width)
    swiglu = fused(lambda x: F.silu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1])
    add("SwiGLU", swiglu, (random(N, 8 * d),), 12 * size * d, 20 * size * d)
    labels, logits = torch.randint(V, (N // 4,), device=DEVICE), random(N // 4, V)
    for reads in (3, 2):  # of the logits, the backward's among them
        loss = fused(lambda x: F.cross_entropy(x.float(), labels), online_softmax=reads == 2)
        add(f"loss, {reads} reads", loss, (logits,), (reads - 1) * size / 4 * V, size / 2 * V)
    head, inputs = LinearCrossEntropy(V), (random(N // 4, d), random(V, d))
    flops = 1.5e-12 * N * d * V  # the gradients are made in the forward
    add("head and loss", lambda x, w: head(x, w, labels), inputs, flops, 0, "TFLOP/s")
    order = torch.randint(16, (N * k,), device=DEVICE).argsort(stable=True)
    places, tokens, moved = inverse(order), (random(N, d),), (k + 1) * size * d
    add("permutation, index_put", lambda x: x[order // k], tokens, moved, moved)
    add("permutation, gather", lambda x: Permute.apply(x, order, places, k), tokens, moved, moved)
    attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    for heads, D in ((25, 64), (32, 128)):
        inputs = tuple(random(N // 1024 or 1, heads, 1024 if GPU else 16, D) for _ in range(3))
        flops = 2e-12 * inputs[0].numel() * inputs[0].shape[2]
        add(f"attention, {heads} heads of {D}", attend, inputs, flops, 2.5 * flops, "TFLOP/s")
    part.take_turns(turns, rounds=3)


def exact(part: Part) -> None:
    """On any device initial values are bit for bit those of a CPU, and losses within a band."""
    here, cpu = torch.empty(2**20 + 3, device=DEVICE), torch.empty(2**20 + 3)
    for values in (here, cpu):
        fill_normal(values, 0.02, "0/equal")
    wrong = {} if torch.equal(here.cpu(), cpu) else {"wrong": "not those of a CPU"}
    part.note(time.monotonic(), run="initial values", **wrong)

    def run(w: Workload, _: int) -> dict[str, Any]:
        more = f"--global-bsz {w.args.global_bsz} --seq-len {w.args.seq_len} --bsz auto --amp off"
        more += f" --n-steps {len(w.losses)} --warmup-steps 0 --warmup-seconds 0"
        more += f" --layers {w.args.layers}" if w.args.layers else ""
        row = run_here("train.py", [w.args.config, *more.split()], part.out / part.name / w.shape)
        (steps,) = map(read_steps, (part.out / part.name / w.shape).glob("*/steps.jsonl"))
        wrong = w.wrong_steps("fp32", steps)
        return row | ({"wrong": wrong} if wrong else {})

    shapes = {w.shape: w for w in workloads().values() if w.args.device == DEVICE.type}
    part.take_turns({name: functools.partial(run, w) for name, w in shapes.items()}, rounds=1)


def check(part: Part) -> None:
    names = "gpt2-125m-bf16 moe-0.7b-bf16 llama-8b-proxy-bf16" if GPU else "gpt2-tiny-fp32"
    run_program(part, "check", f"check.py --only {names} --output-dir", part.out / "check/runs")


def tests(part: Part) -> None:
    files = "tests/test_gpu.py" if GPU else "tests/test_init.py"
    for name, marks in {"shared": "not alone", "alone": "alone"}.items() if GPU else [("cpu", "")]:
        run_program(part, name, f"-m pytest -q -o addopts= {files} -m", marks)


# Seconds that each needs on a GPU.
PARTS = {
    mission: 220, peers: 270, moe: 150, ranks: 180, kernels: 70, fp8: 200, exact: 150, check: 340,
    tests: 480,
}  # fmt: skip
NAMES = {part.__name__: part for part in PARTS}


def cell(value: Any) -> str:
    """A figure or several as text, with four digits."""
    if isinstance(value, list):
        return " ".join(map(cell, value))
    return f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)


def show(name: str, out: Path) -> int:
    """Print the table of a part, with the values of all rounds; returns the exit code of what it has."""
    path = out / f"{name}.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "round"))
    runs: dict[str, dict[str, dict[str, None]]] = {}
    for row in rows:
        for key, value in row.items():
            runs.setdefault(row["run"], {}).setdefault(key, {})[cell(value)] = None
    cells = [[", ".join(run.get(key, ())) for key in columns] for run in runs.values()]
    common.show(columns, cells, left=columns)
    if not rows or {"failed", "wrong"} & set(columns):
        return 1
    return 5 if any(row.get("left_out") == NO_TIME for row in rows) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(NAMES)}")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    parser.add_argument("--output-dir", type=Path, default=Path("gpu-results"))
    parser.add_argument("--nanogpt", type=os.path.abspath, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--until", type=float, help="of this one part, in its own process")
    args = parser.parse_args()
    names, out = list(dict.fromkeys(args.parts)) or list(NAMES), args.output_dir.resolve()
    if unknown := set(names) - set(NAMES):
        parser.error(f"{unknown.pop()}: no such part; there are {', '.join(NAMES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end what was started
    if args.until:
        (out / names[0]).mkdir(exist_ok=True)
        os.chdir(ROOT)
        NAMES[names[0]](Part(names[0], out, args.until, args.nanogpt))
        return 0
    if args.nanogpt and not (Path(args.nanogpt) / "model.py").exists():
        parser.error(
            f"--nanogpt {args.nanogpt}: has no model.py; give a checkout of karpathy/nanoGPT"
        )
    if not args.minutes > 0.2:
        parser.error(f"--minutes {args.minutes:g}: is too short for anything")
    if any((out / name).exists() for name in names):
        parser.error(f"{out}: has results already; choose another --output-dir")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output-dir {out}: cannot be made: {error.strerror}")
    until, codes = time.monotonic() + 60 * args.minutes - 5, []
    for index, name in enumerate(names):
        need, left = PARTS[NAMES[name]], until - time.monotonic()
        if left < (need / 2 if GPU else 3):
            print(f"\n{name}: left out, it needs {need} s and there are {left:.0f}")
            codes.append(5)
            continue
        # More, if all that follow have enough.
        share = left * need / sum(PARTS[NAMES[other]] for other in names[index:])
        ends = time.monotonic() + min(left, max(need, share) if GPU else share)
        command = [sys.executable, __file__, name, "--until", str(ends), "--output-dir", str(out)]
        command += ["--nanogpt", args.nanogpt] if args.nanogpt else []
        print(f"\n{name}\n", flush=True)
        with (out / f"{name}.log").open("w") as log:
            code = limited(command, ends + 3, log, PYTHONUNBUFFERED="1", BENCHMARK_RESULTS=str(out))
        codes += [show(name, out), int(code != 0)]
        print(f"{name}: exit code {code}, {until - time.monotonic():.0f} s left", flush=True)
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
