"""Compare results: ratios with intervals, cost, plots, a report; and whether something got slower.

    python compare.py runs/A runs/B --tokens 1e12
    python compare.py results/ megatron.log --log seq-len=4096 --output-dir comparison
    python compare.py runs/ --baseline baselines.json --tolerance 5%

Reads our result.json and results.csv, the JSON of a comparison suite, and logs of other trainers, from
Megatron-LM to nanoGPT; directories are searched. docs/COMPARE.md has the details. Needs no torch.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import llm_train_bench.base.start  # noqa: F401

from llm_train_bench.base.errors import UsageError, printable
from llm_train_bench.base.tool_main import run_tool, tool
from llm_train_bench.check.public_site import write_site
from llm_train_bench.check.share import Refused, share
from llm_train_bench.check.verify import verify_file
from llm_train_bench.compare import report
from llm_train_bench.compare.find_results import read_records
from llm_train_bench.compare.gate import gate
from llm_train_bench.compare.ratios import compare, prices_of
from llm_train_bench.compare.read_logs import log_facts
from llm_train_bench.settings.command_line import parse_dataclass
from llm_train_bench.settings.flags import flag
from llm_train_bench.sweep.experiment import machines_of


@dataclasses.dataclass(frozen=True)
class RunsFlags:
    """The runs to compare.

    results: result.json, results.csv, another suite's JSON, a log, or directories with any of
        these.
    reference: Run to compare with. By default, per group, the one with the fewest non-default flags.
    methodology: identical_config: runs are not compared if any setting differs.
    one_model: Treat all runs of one sequence length as runs of the same model.
    log: Facts that logs of other suites lack: seq-len, gpus, hardware, global-batch, model or
        parameters. Applies to all logs, or to one as LOG:KEY=VALUE.
    log_pattern: Read any other log by a regular expression with named groups, such as
        (?P<time_ms>[0-9.]+).
    """

    results: tuple[str, ...] = flag((), metavar="PATH ...", positional=True)
    reference: str | None = flag(None, metavar="RUN")
    methodology: Literal["maximum_performance", "identical_config"] = flag("maximum_performance")
    one_model: bool = flag(False)
    log: tuple[str, ...] = flag((), metavar="[LOG:]KEY=VALUE ...")
    log_pattern: str | None = flag(None, metavar="REGEX")


@dataclasses.dataclass(frozen=True)
class ReportFlags:
    """The report.

    output_dir: Write compare.csv, compare.json, runs.csv, compare.md and report.html here. With
        --baseline: gate.md, a comment for a pull request, and benchmark.json for
        github-action-benchmark.
    tokens: Tokens of a training run; also prints its days.
    experiment: Experiment file with prices and power limits by platform.
    usd_per_hour: Prices per GPU-hour, for example "H100 SXM=2.5".
    usd_per_kwh: Price of electricity, added to the price of the GPUs. Without measured energy, the power
        limit is used.
    """

    output_dir: str | None = flag(None, metavar="DIR")
    tokens: float | None = flag(None, above=0)
    experiment: str | None = flag(None, metavar="FILE.yaml")
    usd_per_hour: tuple[str, ...] = flag((), metavar="HARDWARE=US$ ...")
    usd_per_kwh: float | None = flag(None, above=0)


@dataclasses.dataclass(frozen=True)
class GateFlags:
    """The gate against baselines.

    baseline: Compare the results with these baselines. The exit code is 1 if a result got worse, 5 if
        not all could be judged.
    tolerance: Allowed loss of speed, and growth of memory.
    update_baselines: Store the results as baselines.
    allow: Accept results without a baseline (new), or baselines of this machine without a result
        (missing).
    """

    baseline: str | None = flag(None, metavar="FILE")
    tolerance: float = flag(0.05, at_least=0, below=1, metavar="PERCENT", needs="baseline")
    update_baselines: bool = flag(False, needs="baseline")
    allow: tuple[Literal["new", "missing"], ...] = flag((), needs="baseline")


@dataclasses.dataclass(frozen=True)
class SharedFlags:
    """Results for others.

    share: Write the runs, which must be repeats of one, into this file. It has no paths, no names of
        hosts and users, and no secrets. check.py --verify checks it.
    site: Write a page of all shared results in this folder into --output-dir.
    """

    share: str | None = flag(None, metavar="FILE.json")
    site: str | None = flag(None, metavar="FOLDER")


@dataclasses.dataclass(frozen=True)
class CompareArgs(SharedFlags, GateFlags, ReportFlags, RunsFlags):
    """Compare training runs of any suite, or check results against baselines."""


@tool("compare.py")
def main(argv: Sequence[str]) -> int:
    """Compare, and return the exit code: 0; 1 if the gate failed; 2 for bad input."""
    args = parse_dataclass(CompareArgs, argv, "compare.py")
    try:
        if args.site:
            if not args.output_dir:
                raise UsageError("--site: give --output-dir a place for the page")
            return write_site(Path(args.site), Path(args.output_dir), say)
        if not args.results:
            raise UsageError("nothing to compare: give results, logs or directories")
        directory = Path(args.output_dir) if args.output_dir else None
        if args.baseline:
            statuses = {"new": "NO BASELINE", "missing": "NOT MEASURED"}
            allowed = [statuses[kind] for kind in args.allow]
            path, update = Path(args.baseline), args.update_baselines
            return gate(args.results, path, args.tolerance, update, allowed, directory)
        if args.share:
            gone = share(map(Path, args.results), Path(args.share))
            try:
                verify_file(Path(args.share))
            except Refused as refusal:
                Path(args.share).unlink()
                raise UsageError(f"--share: {args.share} would be refused: {refusal}") from None
            print(f"wrote {args.share}, without: {', '.join(gone)}")
            return 0
        facts = log_facts(args.log, args.log_pattern)
        records = read_records(args.results, say, facts)
        facts.refuse_unused()
        for record in records:
            for note in record.notes if record.suite != "llm-train-bench" else ():
                say(f"{record.path}: {note}")
        if args.one_model:
            if len(names := sorted({record.model or "unknown" for record in records})) > 1:
                say(f"--one-model treats as one: {', '.join(names)}")
            for record in records:
                record.model, record.model_hash = "one model", None
        machines = machines_of(args.experiment) if args.experiment else {}
        prices = prices_of(machines, args.usd_per_hour, records, args.usd_per_kwh)
        identical = args.methodology == "identical_config"
        rows = compare(records, prices, args.tokens, args.reference, identical)
        remarks = [*report.sweep_remarks(args.results), *report.unknown_models(rows)]
        written = ""
        if directory:  # before anything is printed: nobody may read that to its end
            priced = bool(args.usd_per_hour or args.experiment)
            written = report.write(rows, directory, args.tokens, remarks, priced)
        report.show_comparison(rows, args.tokens)
        for line in remarks:
            say(line)
        print(written, end="")
    except OSError as error:
        where = error.filename or args.output_dir or args.baseline
        print(f"compare.py: {where}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def say(text: str) -> None:
    """A remark, apart from the table."""
    print(f"compare.py: {printable(text)}", file=sys.stderr)


if __name__ == "__main__":
    run_tool(main)
