"""Compare results: ratios with intervals, cost, plots, a report; and whether something got slower.

    python compare.py runs/A runs/B --tokens 1e12
    python compare.py results/ megatron.log --log-seq-len 4096 --output-dir comparison
    python compare.py runs/ --baseline baselines.json --tolerance 5%

Reads our result.json and results.csv, the benchmark JSON of another suite, and logs of 17 others, from
Megatron-LM to nanoGPT; directories are searched. docs/COMPARE.md has the details.
Needs no torch.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import llm_train_bench.start  # noqa: F401

from llm_train_bench.compare.find_results import read_records
from llm_train_bench.compare.gate import gate
from llm_train_bench.compare.ratios import Compared, check_prices, compare, prices_of
from llm_train_bench.compare.records import LogFacts, facts_by_log
from llm_train_bench.compare.report import show_comparison, sweep_remarks, write
from llm_train_bench.errors import UsageError, printable
from llm_train_bench.files import shown_path
from llm_train_bench.settings.command_line import parse_dataclass
from llm_train_bench.settings.flags import check_bounds, flag, positional
from llm_train_bench.settings.tool_main import run_tool, tool
from llm_train_bench.sweep.experiment import machines_of


@dataclasses.dataclass(frozen=True)
class RunsFlags:
    """The runs to compare."""

    results: tuple[str, ...] = positional(
        "PATH",
        "result.json, results.csv, another suite's JSON, a log, or directories with any of these.",
    )
    reference: str | None = flag(
        None, "Run that the others are compared with; by default the first comparable one of each group.",
        metavar="RUN",
    )  # fmt: skip
    methodology: Literal["maximum_performance", "identical_config"] = flag(
        "maximum_performance", "identical_config: runs are not compared if any setting differs."
    )
    one_model: bool = flag(
        False,
        "Compare all runs of one length with each other, whatever their files call the model.",
    )


@dataclasses.dataclass(frozen=True)
class ReportFlags:
    """The report."""

    output_dir: str | None = flag(
        None,
        "Write compare.csv, compare.json, runs.csv, compare.md and report.html here.",
        metavar="DIR",
    )
    tokens: float | None = flag(None, "Tokens of a whole training, for the days it takes.", above=0)


@dataclasses.dataclass(frozen=True)
class PriceFlags:
    """Prices and power."""

    experiment: str | None = flag(
        None, "Experiment file with prices and TDP by platform.", metavar="FILE.yaml"
    )
    usd_per_hour: tuple[str, ...] = flag(
        (),
        'Prices as HARDWARE=US$ per GPU-hour, for example "H100 SXM=2.5".',
        metavar="HARDWARE=US$",
    )
    tdp_w: tuple[str, ...] = flag((), "Power limits as HARDWARE=W.", metavar="HARDWARE=W")


@dataclasses.dataclass(frozen=True)
class LogFlags:
    """Facts that logs of other suites do not tell: of all, or of one as LOG=VALUE."""

    log_seq_len: tuple[str, ...] = flag(
        (), "Sequence length of logs that do not tell it.", metavar="[LOG=]N"
    )
    log_gpus: tuple[str, ...] = flag(
        (), "GPUs of the log that does not tell how many.", metavar="[LOG=]N"
    )
    log_hardware: tuple[str, ...] = flag(
        (), "GPU of the log that does not tell which.", metavar="[LOG=]HARDWARE"
    )
    log_global_batch: tuple[str, ...] = flag(
        (), "Samples of a step over all GPUs, of logs that do not tell it.", metavar="[LOG=]N"
    )
    log_model: tuple[str, ...] = flag(
        (), "Model of a log that does not tell it; otherwise its file's name.", metavar="[LOG=]NAME"
    )
    log_parameters: tuple[str, ...] = flag(
        (), "Parameters of the model, for TFLOP/s and MFU of a log without them.", metavar="[LOG=]N"
    )


@dataclasses.dataclass(frozen=True)
class GateFlags:
    """The gate against baselines."""

    baseline: str | None = flag(
        None, "Check results against these baselines: one line each, exit code 1 if one got worse.",
        metavar="FILE",
    )  # fmt: skip
    tolerance: str = flag(
        "5%", "Allowed loss of speed, and growth of memory.", metavar="PERCENT",
        needs="baseline",
    )  # fmt: skip
    update_baselines: bool = flag(False, "Make the results the baselines.", needs="baseline")
    allow_new: bool = flag(
        False, "Results without a baseline are named, and do not fail.", needs="baseline"
    )
    allow_missing: bool = flag(
        False, "Baselines of this machine without a result are named, and do not fail.",
        needs="baseline",
    )  # fmt: skip
    markdown: str | None = flag(
        None, "Write the gate's verdicts here, as a comment for a pull request.", metavar="FILE",
        needs="baseline",
    )  # fmt: skip
    benchmark_json: str | None = flag(
        None, "Write the gate's figures here, for github-action-benchmark (customBiggerIsBetter).",
        metavar="FILE", needs="baseline",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CompareArgs(GateFlags, LogFlags, PriceFlags, ReportFlags, RunsFlags):
    """Compare training runs of any suite, or check results against baselines."""


@tool("compare.py")
def main(argv: Sequence[str]) -> int:
    """Compare, and return the exit code: 0; 1 if the gate failed; 2 for bad input."""
    args = parse_dataclass(CompareArgs, argv, "compare.py")
    try:
        if not args.results:
            raise UsageError("nothing to compare: give results, logs or directories")
        check_bounds(args)
        if args.baseline:
            if args.output_dir:
                raise UsageError("--output-dir: the gate writes no report; leave out --baseline")
            allowed = ["NO BASELINE"] * args.allow_new + ["NOT MEASURED"] * args.allow_missing
            files = [file and Path(file) for file in (args.markdown, args.benchmark_json)]
            path, update = Path(args.baseline), args.update_baselines
            return gate(args.results, path, args.tolerance, update, allowed, *files)
        facts = LogFacts(
            facts_by_log("log-seq-len", args.log_seq_len, int),
            facts_by_log("log-gpus", args.log_gpus, int),
            facts_by_log("log-hardware", args.log_hardware, str),
            facts_by_log("log-global-batch", args.log_global_batch, int),
            facts_by_log("log-model", args.log_model, str),
            facts_by_log("log-parameters", args.log_parameters, float),
        )
        records = read_records(args.results, say, facts)
        facts.refuse_unused()
        for record in records:
            for note in record.notes if record.suite != "llm-train-bench" else ():
                say(f"{record.path}: {note}")
        if args.one_model:
            if len(names := sorted({record.model or "unknown" for record in records})) > 1:
                say(f"--one-model takes for one: {', '.join(names)}")
            for record in records:
                record.model, record.model_hash = "one model", None
        identical = args.methodology == "identical_config"
        machines = machines_of(args.experiment) if args.experiment else {}
        prices = prices_of(machines, args.usd_per_hour, args.tdp_w)
        check_prices(prices, records)
        rows = compare(records, prices, args.tokens, args.reference, identical)
        remarks = sweep_remarks(args.results) + list(not_told(rows))
        written = ""
        if args.output_dir:  # before anything is printed: nobody may read that to its end
            priced = bool(args.usd_per_hour or args.experiment)
            written = write(rows, Path(args.output_dir), args.tokens, remarks, priced)
        show_comparison(rows, args.tokens)
        for line in remarks:
            say(line)
        print(written, end="")
    except OSError as error:
        where = error.filename or args.output_dir or args.baseline
        print(f"compare.py: {where}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def not_told(rows: Sequence[Compared]) -> Iterator[str]:
    """Logs that are compared with nothing because they do not tell their model."""
    alone = [row.record for row in rows if not row.record.model_told]
    if len(alone) > 1 or (alone and len({row.group for row in rows}) > 1):
        names = ", ".join(shown_path(record.path) for record in alone)
        yield f"not compared with others, since a log does not tell its model: {names}; use --log-model"


def say(text: str) -> None:
    """A remark, apart from the table."""
    print(f"compare.py: {printable(text)}", file=sys.stderr)


if __name__ == "__main__":
    run_tool(main)
