"""Which setting is best: run many, one process each, and rank them.

    python sweep.py configs/sweeps/gpt2-context.yaml
    python sweep.py --models configs/gpt2-tiny.json --set bsz=4,8 pt-compile=true,false --repeats 3
    python sweep.py --models configs/gpt2-125m.json --set pt-compile=true --auto-bsz

A run that fails is a row, not the end. Started again with the same --output-dir after being killed at any
point, it goes on where it was. docs/SWEEPS.md explains the experiment file. Needs no torch itself.
"""

import contextlib
import csv
import dataclasses
import json
import math
import statistics
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.auto_batch import search_batch
from bench.cells import METRICS, Row, Rows, cell_key, run_cell
from bench.command_line import parse_args, parse_dataclass, run_tool
from bench.errors import UsageError
from bench.experiment import (
    Cell,
    Experiment,
    Platform,
    differences,
    from_command_line,
    make_cells,
    read_experiment,
)
from bench.hardware import find_hardware
from bench.memory_model import estimate_memory, largest_batch
from bench.sizes import resolve_batch, resolve_seq_len, resolve_shards
from bench.statistics import bootstrap_mean
from bench.vendor import detect_platform
from model.config import ConfigError, load_config


@dataclasses.dataclass(frozen=True)
class SweepArgs:
    """Run many settings, one process each, and rank them."""

    experiment: Annotated[str, tyro.conf.arg(metavar="[FILE.yaml]"), tyro.conf.Positional] = ""
    """An experiment file; without one, --models and --set say what to run."""
    models: tuple[str, ...] = ()
    """Model configs."""
    script: Literal["train.py", "train_ddp.py", "train_fsdp.py"] = "train.py"
    """Script that runs them."""
    set: tuple[str, ...] = ()
    """flag=value for all, or flag=value,value,... for an axis of the grid."""
    repeats: int = 1
    """How often each setting runs; interleaved, so that a drifting machine drifts for all."""
    timeout_s: float = 3600.0
    """Seconds after which a run is ended."""
    auto_bsz: bool = False
    """Find the largest --bsz that runs, for each setting, and use it."""
    platform: Literal["auto", "nvidia", "amd", "cpu"] = "auto"
    """Which platform's part of the experiment file holds; auto looks at the drivers."""
    output_dir: str | None = None
    """Where rows, results and tables go; by default sweeps/ and the experiment's name."""
    retry: bool = False
    """Run again what failed or timed out before in the same --output-dir."""
    dry_run: bool = False
    """Print the settings and stop."""


def main(argv: Sequence[str]) -> int:
    """Sweep, and return the exit code: 0; 2 for bad input; 1 if no run was ok, or on Ctrl-C."""
    try:
        args = parse_dataclass(SweepArgs, argv, "sweep.py")
        experiment, where = read(args)
        platform = detect_platform() if args.platform == "auto" else args.platform
        cells = make_cells(experiment, platform, where)
        if args.auto_bsz:
            check_auto_batch(experiment)
        unlike = differences(experiment)
    except (UsageError, ConfigError) as error:
        print(f"sweep.py: {error}", file=sys.stderr)
        return 2
    directory = Path(args.output_dir or f"sweeps/{experiment.experiment}")
    if not (args.output_dir or args.experiment):
        # One directory for each such command, to which the same command comes back.
        text = json.dumps([[cell.script, *cell.argv()] for cell in cells])
        directory = directory.with_name(f"{directory.name}-{zlib.crc32(text.encode()):08x}")
    if experiment.methodology == "identical_config":
        for line in unlike or ["the platforms' hyperparameters are the same"]:
            print(f"identical_config: {line}")
    if args.dry_run:
        for cell in cells:
            print(f"{cell.script} {' '.join(cell.argv())}")
        return 0
    try:
        directory.mkdir(parents=True, exist_ok=True)
        described = {
            "experiment": experiment.model_dump(),
            "platform": platform,
            "differences": unlike,
            "settings": [[cell.script, *cell.argv()] for cell in cells],
        }
        rows = Rows(directory / "rows.jsonl")
        if args.retry:
            rows.forget("failed", "timeout")
        (directory / "sweep.json").write_text(json.dumps(described, indent=1) + "\n")
    except UsageError as error:
        print(f"sweep.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"sweep.py: --output-dir {directory}: {error.strerror}", file=sys.stderr)
        return 2
    again = "the same command goes on from there"
    try:
        cells = run_all(cells, experiment, rows, directory, args, platform)
        # The directory may hold rows of other settings, from an earlier form of the experiment.
        keys = [cell_key(cell, i) for i in range(experiment.repeats) for cell in cells]
        measured = [rows.rows[key] for key in keys]
        write_csv(measured, directory / "results.csv")
        show(rank(measured), directory)
    except KeyboardInterrupt:
        print(f"\nsweep.py: interrupted; rows kept: {len(rows.rows)}; {again}", file=sys.stderr)
        return 1
    except OSError as error:
        what = f"{error.filename or directory}: {error.strerror}"
        print(f"sweep.py: {what}; rows kept: {len(rows.rows)}; {again}", file=sys.stderr)
        return 1
    return 0 if any(row["status"] == "ok" for row in measured) else 1


def check_auto_batch(e: Experiment) -> None:
    """UsageError where a searched micro batch would change what the experiment fixes."""
    if e.methodology == "identical_config":
        raise UsageError("--auto-bsz: batches would differ, and methodology is identical_config")
    flags = [e.training, e.grid, *e.cells, *e.platforms.values()]
    if any("global_bsz" in given for given in flags):
        raise UsageError("--auto-bsz chooses --bsz, which global_bsz would bind; leave one out")


def read(args: SweepArgs) -> tuple[Experiment, str]:
    """The experiment that the arguments name or describe, and its name for messages."""
    if args.experiment:
        defaults = {f.name: f.default for f in dataclasses.fields(SweepArgs)}
        for name in ("models", "set", "script", "repeats", "timeout_s"):
            if getattr(args, name) != defaults[name]:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"{flag} and an experiment file, which says that itself: leave one out"
                )
        return read_experiment(args.experiment), args.experiment
    if not args.models:
        raise UsageError("nothing to run: give an experiment file, or --models")
    try:
        return from_command_line(
            "command-line", args.script, args.models, args.set, args.repeats, args.timeout_s
        ), "--set"
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"--{first['loc'][0]}: {first['msg']}") from None


def run_all(
    cells: list[Cell],
    experiment: Experiment,
    rows: Rows,
    directory: Path,
    args: SweepArgs,
    platform: Platform,
) -> list[Cell]:
    """Run what has no row yet: all settings once, then all of them again, and so on.

    Returns the settings that ran: with --auto-bsz, those with the micro batch that was found.
    """
    if args.auto_bsz:
        machine = experiment.hardware.get(platform)
        gpu = machine.gpu if machine else None
        cells = [with_largest_batch(c, rows, directory, experiment.timeout_s, gpu) for c in cells]
    todo = [
        (cell, repeat)
        for repeat in range(experiment.repeats)
        for cell in cells
        if cell_key(cell, repeat) not in rows.rows
    ]
    done = len(cells) * experiment.repeats - len(todo)
    if done:
        print(f"rows from before: {done}", flush=True)
    start = time.monotonic()
    for i, (cell, repeat) in enumerate(todo):
        row = run_cell(cell, repeat, directory, experiment.timeout_s)
        rows.add(row)
        left = (time.monotonic() - start) / (i + 1) * (len(todo) - i - 1)
        number = f"[{done + i + 1}/{done + len(todo)}]"
        print(f"{number} {outcome(row)}  {cell.label()}  ({_duration(left)} left)", flush=True)
    return cells


def outcome(row: Row) -> str:
    """A row's status, and its rate or what went wrong."""
    if row["status"] == "ok":
        return f"ok {row['tokens_per_sec']:,.0f} tokens/s"
    return f"{row['status']}: {(row.get('error') or '')[:160]}"


def with_largest_batch(
    cell: Cell, rows: Rows, directory: Path, timeout_s: float, gpu: str | None
) -> Cell:
    """The setting with the largest micro batch that runs; every attempt is a row (`probe`)."""

    def sized(bsz: int) -> Cell:
        flags = dict(cell.flags) | {"bsz": bsz}
        axes = tuple(dict.fromkeys([*cell.axes, "bsz"]))
        return dataclasses.replace(cell, flags=tuple(sorted(flags.items())), axes=axes)

    def runs(bsz: int) -> bool:
        short = dict(sized(bsz).flags) | {"n_steps": 2, "warmup_steps": 3, "no_tensorboard": True}
        probe = dataclasses.replace(sized(bsz), flags=tuple(sorted(short.items())))
        key = cell_key(probe, "probe")
        if bsz > most:
            return False
        if key not in rows.rows:
            rows.add(run_cell(probe, "probe", directory, timeout_s))
        row = rows.rows[key]
        print(f"  --bsz {bsz}: {outcome(row)}  {cell.label()}", flush=True)
        return row["status"] == "ok"

    first, most = guess_batch(cell, gpu)
    best = search_batch(runs, first)
    if not best:
        print(f"  not even --bsz 1 runs: {cell.label()}", flush=True)
    return sized(max(1, best))  # which then is a row that says why


def guess_batch(cell: Cell, gpu: str | None) -> tuple[int, float]:
    """Where to start, and what not to try: what estimate.py says fits the named GPU, and no bound.

    Without a GPU the setting's own size, and what fits the memory this machine has free: a CPU that runs
    out of it may take other processes down.
    """
    args = parse_args(cell.argv(), cell.script)
    config = load_config(args.config, args.pad_vocab)
    seq_len = resolve_seq_len(args.seq_len, config)
    world = args.nproc or 1
    shards = resolve_shards(args, world, "cuda") if cell.script == "train_fsdp.py" else None

    def memory(bsz: int) -> float:
        this = dataclasses.replace(args, bsz=bsz)
        micro = resolve_batch(this, seq_len, world).grad_acc_steps
        found = estimate_memory(config, this, seq_len, micro, shards, fused_norm=gpu is not None)
        return found.peak

    if gpu is not None:
        return max(1, largest_batch(memory, 0.92 * find_hardware(gpu).memory_gib * 2**30)), math.inf
    if detect_platform() != "cpu":
        return args.bsz, math.inf
    free = 2.0**40
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = 1024.0 * next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable:"))
    return args.bsz, largest_batch(memory, 0.8 * free)


def write_csv(rows: list[Row], path: Path) -> None:
    """All rows, without the lists; a column for each axis."""
    rows = [{"key": row["key"]} | row["axes"] | row for row in rows]
    names = list(
        dict.fromkeys(name for row in rows for name in row if name not in ("step_times_s", "axes"))
    )
    last = [n for n in (*METRICS, "error", "result", "command") if n in names]
    names = [n for n in names if n not in last] + last
    with path.open("w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


@dataclasses.dataclass(frozen=True)
class Ranked:
    """A setting over its repeats; rates in tokens/s."""

    label: str
    status: str
    tokens_per_sec: float | None
    low: float | None
    high: float | None
    cv: float | None
    mfu: float | None
    memory_gib: float | None


def rank(rows: list[Row]) -> list[Ranked]:
    """Settings by tokens/s, best first, with 95 % intervals; those that never ran last.

    Over the repeats' own rates where there are three or more, else over the steps of the runs.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["key"].rsplit("-", 1)[0], []).append(row)
    ranked = []
    for members in groups.values():
        ok = [row for row in members if row["status"] == "ok"]
        label = _label(members[0])
        if not ok:
            ranked.append(Ranked(label, members[0]["status"], *[None] * 6))
            continue
        rates = [row["tokens_per_sec"] for row in ok]
        if len(rates) >= 3:
            low, high = bootstrap_mean(rates)
            cv = statistics.stdev(rates) / statistics.fmean(rates)
        else:
            times = [t for row in ok for t in row["step_times_s"]]
            slow, fast = bootstrap_mean(times)
            mean = statistics.fmean(times)
            tokens = statistics.fmean(rates) * mean
            low, high = tokens / fast, tokens / slow
            cv = statistics.stdev(times) / mean if len(times) > 1 else 0.0
        memory = [row["peak_allocated_gib"] or row["peak_rss_gib"] for row in ok]
        status = "ok" if len(ok) == len(members) else f"ok {len(ok)} of {len(members)}"
        ranked.append(
            Ranked(label, status, statistics.fmean(rates), low, high, cv, ok[0]["mfu"], max(memory))
        )
    return sorted(ranked, key=lambda r: -(r.tokens_per_sec or 0.0))


def _label(row: Row) -> str:
    return " ".join([row["model"], *(f"{name}={value}" for name, value in row["axes"].items())])


def show(ranked: list[Ranked], directory: Path) -> None:
    """The ranked table on the screen and as Markdown in the sweep's directory."""
    table = Table(box=box.MARKDOWN)
    for i, name in enumerate(
        ("setting", "status", "tokens/s", "95 %", "CV", "of the best", "MFU", "memory GiB")
    ):
        table.add_column(name, justify="left" if i < 2 else "right")
    best = ranked[0].tokens_per_sec if ranked else None
    for r in ranked:
        if r.tokens_per_sec is None:
            table.add_row(escape(r.label), r.status, *[""] * 6)
            continue
        tied = r.high is not None and ranked[0].low is not None and r.high >= ranked[0].low
        share = f"{r.tokens_per_sec / best:.1%}" + (" ~" if tied and r is not ranked[0] else "")
        table.add_row(
            escape(r.label), r.status, f"{r.tokens_per_sec:,.0f}", f"{r.low:,.0f} - {r.high:,.0f}",
            f"{r.cv:.1%}", share, "unknown" if r.mfu is None else f"{r.mfu:.1%}",
            f"{r.memory_gib:.2f}",
        )  # fmt: skip
    Console(width=200, highlight=False).print(table)
    with (directory / "ranked.md").open("w", encoding="utf-8") as f:
        Console(width=200, highlight=False, file=f).print(table)
    print("~: the interval overlaps that of the best")
    print(f"rows, CSV, table: {directory}/rows.jsonl, results.csv, ranked.md")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


if __name__ == "__main__":
    run_tool(main)
