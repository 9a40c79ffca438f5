"""What results say: ratios with intervals, cost, plots, a report; and whether something got slower.

    python compare.py runs/A runs/B --tokens 1e12
    python compare.py results/ megatron.log --log-seq-len 4096 --output-dir comparison
    python compare.py runs/ --baseline configs/baselines.json --tolerance 5%

Reads our result.json and results.csv, the benchmark JSON of another suite, and logs of Megatron-LM,
Primus, NeMo, torchtitan and llm-foundry; directories are searched. docs/COMPARE.md has the details.
Needs no torch.
"""

import base64
import contextlib
import csv
import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from bench.baselines import (
    baseline_key,
    entry_of,
    judge,
    read_baselines,
    unfit,
    write_baselines,
)
from bench.command_line import parse_dataclass, run_tool
from bench.comparison import Prices, Row, compare, known_hardware
from bench.discover import discover, read_records
from bench.errors import UsageError
from bench.experiment import read_experiment
from bench.hardware import find_hardware
from bench.records import LogFacts, Record
from bench.results import Result, read_result


@dataclasses.dataclass(frozen=True)
class CompareArgs:
    """Compare training runs, whoever ran them; or hold results against baselines."""

    results: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH"), tyro.conf.Positional]
    """result.json, results.csv, another suite's JSON, a log, or directories with any of these."""
    output_dir: str | None = None
    """Write compare.csv, compare.md, compare.png and report.html here."""
    no_plot: bool = False
    """Leave out compare.png (and its picture in the report)."""
    reference: str | None = None
    """Run that the others are held against; by default the first comparable one of each group."""
    methodology: Literal["maximum_performance", "identical_config"] = "maximum_performance"
    """identical_config: runs whose settings differ in anything are not compared."""
    one_model: bool = False
    """Compare all runs with each other, whatever their files call the model."""
    tokens: float | None = None
    """Tokens of a whole training, for the days it takes."""
    experiment: str | None = None
    """Experiment file with prices and TDP by platform."""
    usd_per_hour: tuple[str, ...] = ()
    """Prices as HARDWARE=US$ per GPU-hour, for example "H100 SXM=2.5"."""
    tdp_w: tuple[str, ...] = ()
    """Power limits as HARDWARE=W."""
    log_seq_len: int | None = None
    """Sequence length of logs that do not tell it."""
    log_gpus: int | None = None
    """GPUs of logs that do not tell how many."""
    log_hardware: str | None = None
    """GPU of logs that do not tell which."""
    baseline: str | None = None
    """Hold results against these baselines: one line each, exit code 1 if one got worse."""
    tolerance: str = "5%"
    """How much slower, or larger in memory, is still good."""
    update_baselines: bool = False
    """Make the results the baselines."""


def main(argv: Sequence[str]) -> int:
    """Compare, and return the exit code: 0; 1 if the gate failed; 2 for bad input."""
    try:
        args = parse_dataclass(CompareArgs, argv, "compare.py")
        if not args.results:
            raise UsageError("nothing to compare: give results, logs or directories")
        for name in ("tokens", "log_seq_len", "log_gpus"):
            value = getattr(args, name)
            if value is not None and not value > 0:
                raise UsageError(f"--{name.replace('_', '-')} {value}: must be above 0")
        if args.baseline:
            if args.output_dir:
                raise UsageError("--output-dir: the gate writes no report; leave out --baseline")
            return gate(args)
        if args.update_baselines:
            raise UsageError("--update-baselines needs --baseline FILE")
        facts = LogFacts(args.log_seq_len, args.log_gpus, args.log_hardware)
        records = read_records(args.results, say, facts)
        for record in records:
            for note in record.notes if record.suite != "llm-train-bench" else ():
                say(f"{record.path}: {note}")
        if args.one_model:
            for record in records:
                record.model, record.model_hash = "one model", None
        identical = args.methodology == "identical_config"
        prices = prices_of(args)
        check_prices(prices, records)
        rows = compare(records, prices, args.tokens, args.reference, identical)
        show(rows, args.tokens)
        for line in sweep_remarks(args.results):
            say(line)
        if args.output_dir:
            write(rows, args)
    except UsageError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"compare.py: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def say(text: str) -> None:
    """A remark, apart from the table."""
    print(f"compare.py: {text}", file=sys.stderr)


def prices_of(args: CompareArgs) -> Prices:
    """Prices and power from the experiment file and the flags, which go before it."""
    usd, watts = {}, {}
    from_file: set[str] = set()
    if args.experiment:
        for machine in read_experiment(args.experiment).hardware.values():
            if machine.gpu is None:
                continue
            name = find_hardware(machine.gpu).name
            from_file.add(name)
            if machine.usd_per_hour:
                usd[name] = machine.usd_per_hour
            if machine.tdp_w:
                watts[name] = machine.tdp_w
    for flag, given, into in (
        ("usd-per-hour", args.usd_per_hour, usd),
        ("tdp-w", args.tdp_w, watts),
    ):
        for text in given:
            name, equals, value = text.rpartition("=")
            try:
                number = float(value)
            except ValueError:
                number = 0.0
            if not equals or number <= 0:
                raise UsageError(f"--{flag} {text}: must be HARDWARE=NUMBER above 0")
            with contextlib.suppress(
                UsageError
            ):  # else a machine of one's own, by its name in results
                name = find_hardware(name).name
            into[name] = number
    return Prices(usd, watts, from_file)


DEFAULT_PRICES = ", by default the rough ones of configs/hardware.json"


def check_prices(prices: Prices, records: list[Record]) -> None:
    """A price for hardware that no run has is a slip of the pen."""
    names = {r.hardware for r in records if r.hardware}
    names |= {h.name for r in records if (h := known_hardware(r.hardware))}
    for name in (*prices.usd_per_hour, *prices.tdp_w):
        if name not in names and name not in prices.from_file:
            have = ", ".join(sorted(names)) or "none that is known"
            raise UsageError(f"a price or power for {name!r}, but the runs' hardware is {have}")


COLUMNS = (
    "run", "hardware", "GPUs", "settings", "tokens/s per GPU", "ratio [95 %]", "verdict", "MFU",
    "memory GiB", "US$/T tokens", "tokens/J",
)  # fmt: skip


def cells(row: Row, tokens: float | None) -> list[str]:
    """A row of the table as text."""
    r = row.record
    ratio = "1" if row.is_reference else number(row.ratio, ".3f")
    if row.ratio_low is not None:
        ratio += f" [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"
    verdict = row.verdict + (f": {'; '.join(row.marks)}" if row.marks else "")
    star = "*" if r.mfu and r.flop_convention != "palm" else ""
    estimated = "" if row.energy_measured or row.tokens_per_joule is None else " (TDP)"
    texts = [
        r.label, r.hardware or "unknown", str(r.n_gpus or "?"), r.settings or r.suite,
        number(r.tokens_per_sec_per_gpu, ",.0f"), ratio, verdict, number(r.mfu, ".1%") + star,
        memory(r), number(row.usd_per_trillion, ",.0f"),
        number(row.tokens_per_joule, ".2f") + estimated,
    ]  # fmt: skip
    return [*texts, number(row.days, ",.1f")] if tokens else texts


def memory(r: Record) -> str:
    """Peak memory [GiB], and of what kind where it is not what tensors took."""
    kind = f" {r.memory_kind}" if r.memory_gib and r.memory_kind not in (None, "allocated") else ""
    return number(r.memory_gib, ".1f") + kind


def number(value: float | None, form: str) -> str:
    """A formatted number, or that it is unknown."""
    return "unknown" if value is None else format(value, form)


def tables(rows: list[Row], tokens: float | None) -> list[Table]:
    """One table a group."""
    made = []
    for group in dict.fromkeys(row.group for row in rows):
        table = Table(box=box.MARKDOWN, title=group, title_justify="left")
        for i, name in enumerate((*COLUMNS, "days") if tokens else COLUMNS):
            table.add_column(name, justify="left" if i in (0, 1, 3, 6) else "right")
        for row in (row for row in rows if row.group == group):
            table.add_row(*cells(row, tokens))
        made.append(table)
    return made


def show(rows: list[Row], tokens: float | None) -> None:
    """The tables on the screen."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 220)
    for table in tables(rows, tokens):
        console.print(table)
    if any(row.record.mfu and row.record.flop_convention != "palm" for row in rows):
        print("* counted by another suite in its own way")


def write(rows: list[Row], args: CompareArgs) -> None:
    """All files of a comparison."""
    directory = Path(args.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    names = (*COLUMNS, "days") if args.tokens else COLUMNS
    with (directory / "compare.csv").open("w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f)
        writer.writerow(["group", *names, "path"])
        writer.writerows([r.group, *cells(r, args.tokens), r.record.path] for r in rows)
    with (directory / "compare.md").open("w", encoding="utf-8") as f:
        console = Console(highlight=False, width=400, file=f)
        for table in tables(rows, args.tokens):
            console.print(table)
    image = None
    if not args.no_plot:
        from bench.plots import draw

        draw(rows, directory / "compare.png", args.tokens)
        image = base64.b64encode((directory / "compare.png").read_bytes()).decode()
    (directory / "report.html").write_text(html(rows, args, image), encoding="utf-8")
    print(f"wrote {', '.join(sorted(p.name for p in directory.iterdir()))} in {directory}")


def html(rows: list[Row], args: CompareArgs, image: str | None) -> str:
    """The report: one file that needs no other."""
    import jinja2

    source = (Path(__file__).parent / "bench" / "report.html.j2").read_text(encoding="utf-8")
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)

    def bar(row: Row, members: list[Row]) -> int:
        highest = max((m.record.tokens_per_sec_per_gpu or 0.0 for m in members), default=0.0)
        return round(90 * (row.record.tokens_per_sec_per_gpu or 0.0) / highest) if highest else 0

    lines = [summary(members) for members in groups.values()] + sweep_remarks(args.results)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(source).render(
        title=f"Training speed: {', '.join(list(groups)[:3])}",
        rows=rows, groups=groups, tokens=args.tokens, image=image, bar=bar, number=number, memory=memory,
        lines=[line for line in lines if line],
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        price_note=" as given" if args.usd_per_hour or args.experiment else DEFAULT_PRICES,
    )  # fmt: skip


def sweep_remarks(paths: Sequence[str]) -> list[str]:
    """What sweeps under identical_config found to differ between their platforms."""
    lines = []
    for path in (Path(p) / "sweep.json" for p in paths):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["experiment"]["methodology"] == "identical_config":
                lines += [
                    f"{path.parent.name} is not identical: {d}" for d in content["differences"]
                ]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return lines


def summary(members: list[Row]) -> str | None:
    """One sentence on a group: the fastest, and how far ahead of the reference it certainly is."""
    ahead = [m for m in members if m.verdict == "faster"]
    if not ahead:
        return None
    best = max(ahead, key=lambda m: m.ratio)
    (reference,) = (m for m in members if m.is_reference)
    return (
        f"{members[0].group}: {best.record.label} is {best.ratio:.2f} times as fast per GPU as "
        f"{reference.record.label} (95 %: {best.ratio_low:.2f} to {best.ratio_high:.2f})."
    )


def gate(args: CompareArgs) -> int:
    """Results against baselines; with --update-baselines they become the baselines."""
    text = args.tolerance
    try:
        tolerance = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance < 1:
        raise UsageError(f"--tolerance {text}: must be from 0 to below 100%, for example 5%")
    path = Path(args.baseline)
    stored = read_baselines(path, must_exist=not args.update_baselines)
    results = own_results(args.results)
    if args.update_baselines:
        code = 0
        for file, result in one_each(results):
            if why := unfit(result):
                print(f"UNFIT {result.run_name}: {why}; its baseline stays as it was")
                code = 1
                continue
            stored[baseline_key(result)] = entry_of(result, file)
            print(f"baseline {baseline_key(result)}: {result.metrics.tokens_per_sec_per_gpu:,.0f}")
        write_baselines(path, stored)
        return code
    verdicts = [judge(result, stored, tolerance) for _, result in results]
    for verdict in verdicts:
        print(verdict.line)
    return 1 if any(verdict.bad for verdict in verdicts) else 0


def one_each(results: list[tuple[Path, Result]]) -> list[tuple[Path, Result]]:
    """Of several runs of one setting (a sweep's repeats) the one with the median rate."""
    groups: dict[str, list[tuple[Path, Result]]] = {}
    for file, result in results:
        groups.setdefault(baseline_key(result), []).append((file, result))
    kept = []
    for members in groups.values():
        fit = [m for m in members if not unfit(m[1])] or members
        fit.sort(key=lambda m: m[1].metrics.tokens_per_sec_per_gpu or 0.0)
        kept.append(fit[(len(fit) - 1) // 2])
    return kept


def own_results(paths: Sequence[str]) -> list[tuple[Path, Result]]:
    """Our result.json files in files and directories, checked."""
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        found = discover(path) if path.is_dir() else [path]
        files += [p for p in found if p.name == "result.json" or p == path]
    results = []
    for file in files:
        try:
            results.append((file, read_result(file)))
        except OSError as error:
            raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
        except ValueError:
            raise UsageError(f"{file}: is no result.json of this version") from None
    if not results:
        raise UsageError(f"{', '.join(paths)}: no result.json in there")
    return results


if __name__ == "__main__":
    run_tool(main)
