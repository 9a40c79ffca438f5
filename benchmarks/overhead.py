"""Cost of the machinery: train.py, and a Meter, against a bare loop over the same model, interleaved.

    python benchmarks/overhead.py [--rounds N]

The limit is 0.99 of the bare loop's tokens per second. The exit code is 1 if a median of train.py's
is below it.
"""

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks import common
from llm_train_bench.measure.device import pick_device, time_steps
from llm_train_bench.run.loop import build_step, uncollected
from llm_train_bench.run.meter import Meter

LIMIT = 0.99
Case = tuple[str, int, int, str]  # config, micro batch, length, --amp
# By case the steps of a round.
CPU_CASES: dict[Case, int] = {
    ("configs/gpt2-tiny.json", 8, 256, "off"): 300,
    ("configs/llama-tiny.json", 8, 256, "off"): 100,
}
GPU_CASES: dict[Case, int] = {
    ("configs/gpt2-125m.json", 32, 1024, "bf16"): 30,
    ("configs/gpt2-125m.json", 2, 1024, "bf16"): 60,
}
WARMUP = 5


def time_train(*argv: object) -> float:
    """Mean seconds per measured step of `train.py ARGV...`; contestants take turns on a warm device."""
    return common.run_train(*argv, "--warmup-seconds", 0).metrics.step_time_mean_s or math.nan


def step_of(case: Case, device: torch.device) -> Callable[[], None]:
    """The same step without train.py, over a separate model."""
    path, bsz, T, amp = case
    model = common.fresh_model(path, T, device)
    draw = partial(torch.randint, model.config.vocab_size, (bsz, T + 1), device=device)
    return common.bare_step(model, lambda ids: model(ids[:, :-1], ids[:, 1:]), draw, amp)


def bare_loop(n: int, device: torch.device, case: Case) -> float:
    """Seconds per step of n bare steps, the model built anew."""
    step = step_of(case, device)
    with uncollected():  # as in train.py: its other costs are measured here
        time_steps(step, WARMUP, device)
        return time_steps(step, n, device)


def metered_loop(n: int, device: torch.device, case: Case, costs: list[float]) -> float:
    """The mean step time [s] that a Meter gives of such a loop; adds its own host times [s]."""
    path, bsz, T, _ = case
    step, sizes = step_of(case, device), {"tokens_per_step": bsz * T, "seq_len": T}
    loss, own = torch.zeros((), device=device), []
    with tempfile.TemporaryDirectory() as out, uncollected():
        options = {"output_dir": out, "quiet": True, "warmup_steps": WARMUP}
        with Meter(path, n_steps=n, **sizes, **options) as meter:
            for _ in range(WARMUP + n):
                begin = time.perf_counter()
                with meter.step() as metered:
                    before = time.perf_counter()
                    step()
                    metered.loss, after = loss, time.perf_counter()
                own.append(time.perf_counter() - begin - (after - before))
        costs += own[WARMUP:-1]  # the last one ends the window
        return common.result_below(out).metrics.step_time_mean_s or math.nan


def step_by_step(argv: list, n: int, device: torch.device, case: Case) -> list[list[float]]:
    """Times [s] of train.py's measured steps, and of a bare step after each of them.

    These are closer together than whole runs: between runs a shared machine changes its speed by
    more than this cost. Not for a GPU: waiting between steps would keep its queue empty.
    """
    bare = step_of(case, device)
    bare_times: list[float] = []

    def with_bare_steps(*args):
        step_fn = build_step(*args)

        def both(step: int, phase: str) -> None:
            step_fn(step, phase)
            bare_times.append(time_steps(bare, 1, device))

        return both

    with mock.patch("train.loop.build_step", with_bare_steps):
        result = common.run_train(*argv)
    # train.py's time of a step includes the bare step before it, except for the window's first.
    bare_times = bare_times[WARMUP : WARMUP + n]  # one more step observes the kernels
    ours = [t - b for t, b in zip(result.step_times_s, [0.0, *bare_times[:-1]], strict=True)]
    return [ours, bare_times]


def main() -> int:
    rounds = common.parser_of(__doc__, 11).parse_args().rounds  # of whole runs, on a GPU
    device = pick_device("auto")
    times, ratios = {}, {}
    cases = GPU_CASES if device.type == "cuda" else CPU_CASES
    for case, n in cases.items():
        path, bsz, T, amp = case
        name = f"{Path(path).stem} B{bsz}"
        # As in the bare loop.
        kernels = ["--linear", "plain", "--attention", "flash" if device.type == "cpu" else "auto"]
        argv = [path, *kernels, "--bsz", bsz, "--seq-len", T, "--amp", amp]
        argv += ["--n-steps", n, "--warmup-steps", WARMUP]
        ours, bare = f"train.py {name}", f"bare loop {name}"
        if device.type == "cuda":
            train, loop = partial(time_train, *argv), partial(bare_loop, n, device, case)
            times |= common.interleave({ours: train, bare: loop}, rounds)
        else:
            times[ours], times[bare] = step_by_step(argv, n, device, case)
        ratios[f"train.py / bare, {name}"] = (ours, bare)
        again, meter, costs = f"{bare}, again", f"Meter {name}", f"Meter's own part, {name}"
        times[costs] = []
        metered = partial(metered_loop, n // 4, device, case, times[costs])
        loop = partial(bare_loop, n // 4, device, case)
        times |= common.interleave({again: loop, meter: metered}, rounds)
        ratios[f"Meter / bare, {name}"] = (meter, again)
        print(f"{costs}: {1e3 * statistics.mean(times[costs]):.3f} ms in the mean")
    about = "train.py, and a Meter, against a bare loop over the same model"
    medians = common.report("overhead", times, ratios, about)
    return int(min(m for name, m in medians.items() if name.startswith("train.py")) < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
