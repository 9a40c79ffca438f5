"""What results say: ratios with intervals, cost, plots, a report; and whether something got slower.

    python compare.py runs/A runs/B --tokens 1e12
    python compare.py results/ megatron.log --log-seq-len 4096 --output-dir comparison
    python compare.py runs/ --baseline baselines.json --tolerance 5%

Reads our result.json and results.csv, the benchmark JSON of another suite, and logs of Megatron-LM,
Primus, NeMo, torchtitan and llm-foundry; directories are searched. docs/COMPARE.md has the details.
Needs no torch.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bench.compare.find_results import read_records
from bench.compare.gate import gate
from bench.compare.ratios import check_prices, compare, prices_of
from bench.compare.records import LogFacts
from bench.compare.report import show, sweep_remarks, write
from bench.errors import UsageError
from bench.settings.checks import above_zero
from bench.settings.command_line import parse_dataclass, tool
from bench.settings.tool_main import run_tool


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
    """Compare all runs of one length with each other, whatever their files call the model."""
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


@tool("compare.py")
def main(argv: Sequence[str]) -> int:
    """Compare, and return the exit code: 0; 1 if the gate failed; 2 for bad input."""
    args = parse_dataclass(CompareArgs, argv, "compare.py")
    try:
        if not args.results:
            raise UsageError("nothing to compare: give results, logs or directories")
        above_zero(args, "tokens", "log_seq_len", "log_gpus")
        if args.baseline:
            if args.output_dir:
                raise UsageError("--output-dir: the gate writes no report; leave out --baseline")
            return gate(args.results, Path(args.baseline), args.tolerance, args.update_baselines)
        if args.update_baselines or args.tolerance != CompareArgs.tolerance:
            flag = "--update-baselines" if args.update_baselines else "--tolerance"
            raise UsageError(f"{flag} needs --baseline FILE")
        facts = LogFacts(args.log_seq_len, args.log_gpus, args.log_hardware)
        records = read_records(args.results, say, facts)
        for record in records:
            for note in record.notes if record.suite != "llm-train-bench" else ():
                say(f"{record.path}: {note}")
        if args.one_model:
            for record in records:
                record.model, record.model_hash = "one model", None
        identical = args.methodology == "identical_config"
        machines = machines_of(args.experiment) if args.experiment else {}
        prices = prices_of(machines, args.usd_per_hour, args.tdp_w)
        check_prices(prices, records)
        rows = compare(records, prices, args.tokens, args.reference, identical)
        show(rows, args.tokens)
        remarks = sweep_remarks(args.results)
        for line in remarks:
            say(line)
        if args.output_dir:
            priced = bool(args.usd_per_hour or args.experiment)
            write(rows, Path(args.output_dir), args.tokens, not args.no_plot, remarks, priced)
    except OSError as error:
        where = error.filename or args.output_dir or args.baseline
        print(f"compare.py: {where}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def say(text: str) -> None:
    """A remark, apart from the table."""
    print(f"compare.py: {text}", file=sys.stderr)


if __name__ == "__main__":
    run_tool(main)
