"""Interleaved timing and result files of the benchmarks."""

import contextlib
import datetime
import functools
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from llm_train_bench.files import write_whole
from llm_train_bench.measure.device import device_name, synchronize
from llm_train_bench.parallel.ranks import ALONE
from llm_train_bench.results.result_files import read_result, storable
from llm_train_bench.results.schema import Result
from llm_train_bench.run.launch import train_planned
from llm_train_bench.run.provenance import describe_environment
from llm_train_bench.settings.command_line import parse_args

RESULTS = Path(__file__).parent / "results"
LONGEST_RUN_S = 420  # twice 40 steps of three seconds and their compilation


def device_of_runs() -> torch.device:
    """The device that train.py takes, left alone: our own use would make it shared."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def interleave(
    contestants: dict[str, Callable[[], float]], rounds: int, first: int = 0
) -> dict[str, list[float]]:
    """Call each in turn, round after round, after one round that does not count (`first` 1: none).

    A contestant returns its seconds per step. Because they are interleaved, a machine that changes
    its speed changes it for all. After Ctrl-C there are the rounds that all have done, if any.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    try:
        for number in range(first, rounds + 1):
            for name, run in list(contestants.items()):
                try:
                    seconds = run()
                except ContestantEnded as error:
                    print(f"{name}: left out: {error}", file=sys.stderr)
                    del contestants[name], times[name]
                    continue
                if number:
                    times[name].append(seconds)
                print(f"round {number}  {name}  {1e3 * seconds:.2f} ms", file=sys.stderr)
    except KeyboardInterrupt:
        times = {name: found for name, found in times.items() if found}
        if not times:
            raise
        print("interrupted: the rest is left out", file=sys.stderr)
        whole = min(map(len, times.values()))
        times = {name: found[:whole] for name, found in times.items()}
    return times


class ContestantEnded(Exception):
    """A contestant's process is gone; its own words are on the screen."""


@contextlib.contextmanager
def processes(
    script: str, names: dict[str, str], flags: Sequence[str] = (), alone: bool = False
) -> Iterator[dict[str, Callable[[], float]]]:
    """One process per contestant, started as `script --contestant WHAT FLAGS`; see `serve`.

    They are apart, so that no contestant's process settings (allocator, threads) favour another. With
    `alone` one lives only while it is asked: the device's memory is too small for all.
    """

    def start(name: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, script, "--contestant", names[name], *flags],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def end(process: subprocess.Popen) -> None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()

    def ask_once(name: str) -> float:
        process = start(name)
        try:
            return ask(process)
        finally:
            end(process)

    started = {} if alone else {name: start(name) for name in names}

    def ask(process: subprocess.Popen) -> float:
        try:
            print("run", file=process.stdin, flush=True)
        except BrokenPipeError:
            raise ContestantEnded("its process ended") from None
        if not (line := process.stdout.readline()):
            raise ContestantEnded(f"its process ended with {process.wait()}")
        return float(line)

    try:
        if alone:
            yield {name: functools.partial(ask_once, name) for name in names}
        else:
            yield {name: functools.partial(ask, process) for name, process in started.items()}
    finally:
        for process in started.values():
            end(process)


def serve(run: Callable[[], float]) -> None:
    """Be a contestant: for every line that comes in, run and answer with the seconds per step."""
    for _ in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            seconds = run()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the others need room as well
        print(seconds, flush=True)


def time_steps(step: Callable[[], object], n: int, device: torch.device) -> float:
    """Mean seconds of n calls, the device idle before and after."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(n):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / n


def run_train(*argv: object) -> Result:
    """The result of `train.py ARGV...`, run in this process; ARGV gives the --output-dir."""
    import train

    # Dynamo refuses to compile one function for more than eight models, as it should in one run.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    words = [*map(str, argv)]
    train_planned(train.train, words, "train.py", ALONE)
    (path,) = Path(parse_args(words, "train.py").output_dir).glob("*/result.json")
    return read_result(path)


def run_train_apart(*argv: object) -> Result:
    """The same in a separate process, which nothing of earlier runs can reach.

    Raises RuntimeError with its last line if it fails (out of memory too) or does not end.
    """
    command = [sys.executable, str(RESULTS.parents[1] / "train.py"), *map(str, argv)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_RUN_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end after {LONGEST_RUN_S} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
    (path,) = Path(str(argv[argv.index("--output-dir") + 1])).glob("*/result.json")
    return read_result(path)


def time_train(*argv: object) -> float:
    """Mean seconds per measured step of `train.py ARGV...`."""
    with tempfile.TemporaryDirectory() as out:  # contestants take turns on a warm device
        result = run_train(*argv, "--warmup-seconds", 0, "--output-dir", out)
        return result.metrics.step_time_mean_s


def report(
    name: str, times: dict[str, list[float]], ratios: dict[str, tuple[str, str]], about: str
) -> dict[str, float]:
    """Print minimum and median of each contestant and of the ratios, and keep all of it as JSON.

    Returns the median of each ratio.

    A ratio "a over b" is b's time over a's, round by round: above 1, a is faster.
    """
    device = device_of_runs()
    rows = {
        n: {"min_s": min(t), "median_s": statistics.median(t), "all_s": t} for n, t in times.items()
    }
    compared = {}
    for label, (a, b) in ratios.items():
        pairs = [tb / ta for ta, tb in zip(times[a], times[b], strict=True)]
        compared[label] = {
            "median": statistics.median(pairs),
            "min": min(pairs),
            "max": max(pairs),
            "of_minima": min(times[b]) / min(times[a]),
        }
    print(f"\n{name}: {about}\n\n| what | min [ms] | median [ms] |\n|---|---:|---:|")
    for n, row in rows.items():
        print(f"| {n} | {1e3 * row['min_s']:.2f} | {1e3 * row['median_s']:.2f} |")
    print("\n| speed ratio | median | of minima | range |\n|---|---:|---:|---|")
    for label, r in compared.items():
        print(
            f"| {label} | {r['median']:.3f} | {r['of_minima']:.3f} | {r['min']:.3f}-{r['max']:.3f} |"
        )
    save(name, {"about": about, "times": rows, "ratios": compared}, device)
    return {label: r["median"] for label, r in compared.items()}


def run_record(result: Result) -> dict:
    """The kept part of a run: its figures, and all that tells whether to trust them."""
    kept = result.model_dump(mode="json", include={
        "args", "batch", "fp8", "attention_kernel", "metrics", "memory", "devices", "notes",
        "step_times_s", "warmup_step_times_s", "started_at",
    })  # fmt: skip
    kept["model"] = {"name": result.model.name, "n_parameters": result.model.n_parameters}
    memory_gib, memory_kind = result.peak_memory
    kept |= {"memory_gib": memory_gib, "memory_kind": memory_kind, "unfit": result.unfit}
    return storable(kept)


def save(
    name: str,
    content: dict,
    device: torch.device,
    directory: Path = RESULTS,
    replaces: Path | None = None,
) -> Path:
    """Write a result file that says where and when it was measured; returns its path.

    With `replaces` it takes the place of an earlier file, and has all that was in that one.
    """
    now = datetime.datetime.now(datetime.UTC)
    environment = describe_environment(device)
    environment.pop("hostname")  # of no use to a reader, and private
    content = {"benchmark": name, "date": f"{now:%Y-%m-%d}", "device": device_name(device),
               "environment": environment, **content}  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    slug = "".join(c if c.isalnum() else "-" for c in device_name(device).lower())
    path = replaces or directory / f"{name}-{slug}-{now:%Y%m%d-%H%M}.json"
    write_whole(path, json.dumps(content, indent=1) + "\n")
    print(f"\nwrote {path.name}", flush=True)
    return path
