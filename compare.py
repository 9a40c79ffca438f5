"""Compare results: ratios with intervals, cost, plots, a report; and whether something got slower.

    python compare.py runs/A runs/B --tokens 1e12
    python compare.py results/ megatron.log --log seq-len=4096 --output-dir comparison
    python compare.py runs/ --save baselines.json
    python compare.py runs/ --baseline baselines.json --tolerance 5%

Reads our result.json and files of runs, the JSON of a comparison suite, and logs of other trainers, from
Megatron-LM to nanoGPT; directories are searched. docs/COMPARE.md has the details. Needs no torch.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import llm_train_bench.base.start  # noqa: F401

from llm_train_bench.base.errors import UsageError, printable
from llm_train_bench.base.tool_main import print_apart, run_tool, tool
from llm_train_bench.compare import report
from llm_train_bench.compare.find_results import read_records
from llm_train_bench.compare.gate import gate_code, judge_all, own_runs
from llm_train_bench.compare.page import html_page
from llm_train_bench.compare.ratios import compare, prices_of
from llm_train_bench.compare.read_logs import log_facts
from llm_train_bench.compare.save_runs import save_runs
from llm_train_bench.compare.scaling import scaling, show_scaling
from llm_train_bench.settings.command_line import parse_dataclass
from llm_train_bench.settings.flags import flag
from llm_train_bench.sweep.experiment import machines_of, read_experiment, swept


@dataclasses.dataclass(frozen=True)
class RunsFlags:
    """The runs to compare.

    results: result.json, files of runs, another suite's JSON, logs, or directories with any of
        these.
    reference: Run to compare with. By default, per group, the one with the fewest non-default flags.
    methodology: identical_config: runs are not compared if any setting differs.
    log: Facts that logs of other suites lack: seq-len, gpus, hardware, global-batch, model or
        parameters. Applies to all logs, or to one as LOG:KEY=VALUE.
    log_pattern: Read any other log by a regular expression with named groups, such as
        (?P<time_ms>[0-9.]+).
    """

    results: tuple[str, ...] = flag((), metavar="PATH ...", positional=True)
    reference: str | None = flag(None, metavar="RUN")
    methodology: Literal["maximum_performance", "identical_config"] = flag("maximum_performance")
    log: tuple[str, ...] = flag((), metavar="[LOG:]KEY=VALUE ...")
    log_pattern: str | None = flag(None, metavar="REGEX")


@dataclasses.dataclass(frozen=True)
class ReportFlags:
    """The report.

    output_dir: Write compare.csv, compare.json, runs.csv and report.html here.
    tokens: Tokens of a training run; also prints its days.
    experiment: Experiment file with prices and power limits by platform.
    usd_per_hour: Prices per GPU-hour, for example "H100 SXM=2.5".
    """

    output_dir: str | None = flag(None, metavar="DIR")
    tokens: float | None = flag(None, above=0)
    experiment: str | None = flag(None, metavar="FILE.yaml")
    usd_per_hour: tuple[str, ...] = flag((), metavar="HARDWARE=US$ ...")


@dataclasses.dataclass(frozen=True)
class GateFlags:
    """Files of runs, and the gate.

    save: Save the runs with their steps in this file, for the gate or to share. A setting that the file
        already has is replaced. The file has no paths, host names, user names or secrets.
    baseline: Compare the runs with those in this file. The exit code is 1 if a setting got worse, 5 if
        not all could be judged.
    tolerance: Allowed loss of speed, and growth of memory.
    allow: Accept settings that the file lacks (new), or settings of this machine without a run
        (missing).
    """

    save: str | None = flag(None, metavar="FILE")
    baseline: str | None = flag(None, metavar="FILE")
    tolerance: float = flag(0.05, at_least=0, at_most=0.99, metavar="PERCENT", needs="baseline")
    allow: tuple[Literal["new", "missing"], ...] = flag((), needs="baseline")


@dataclasses.dataclass(frozen=True)
class CompareArgs(GateFlags, ReportFlags, RunsFlags):
    """Compare training runs of any suite, or check them against earlier ones."""


@tool("compare.py", file_error=2)  # 1 is the gate's
def main(argv: Sequence[str]) -> int:
    """Compare, and return the exit code: 0; 1 if the gate failed; 2 for bad input."""
    args = parse_dataclass(CompareArgs, argv, "compare.py")
    say = functools.partial(print_apart, "compare.py")
    if not args.results:
        raise UsageError("nothing to compare: give results, logs or directories")
    directory = Path(args.output_dir) if args.output_dir else None
    files = {"--save": args.save, "--baseline": args.baseline, "--output-dir": directory}
    chosen = [name for name, file in files.items() if file]
    if len(chosen) > 1:
        raise UsageError(f"{chosen[0]} with {chosen[1]}: run compare.py twice, once with each")
    if args.save:
        path = Path(args.save)
        lines, code = save_runs(own_runs(args.results, path), path)
        for line in lines:
            print(printable(line))
        return code
    if args.baseline:
        statuses = {"new": "NO BASELINE", "missing": "NOT MEASURED"}
        allowed = [statuses[kind] for kind in args.allow]
        verdicts = judge_all(args.results, args.baseline, args.tolerance)
        for verdict in verdicts:
            print(printable(verdict.line))
        if not any(verdict.judged for verdict in verdicts):
            print(f"NOTHING JUDGED: {args.baseline} gives no certain answer on any of these runs")
        return gate_code(verdicts, allowed)
    facts = log_facts(args.log, args.log_pattern)
    records = read_records(args.results, say, facts)
    facts.refuse_unused()
    for record in records:
        for remark in record.remarks if not record.result else ():
            say(": ".join(filter(None, (record.path, remark.text, remark.advice))))
    sweeps = swept(args.results)
    experiments = [e for e, _ in sweeps.values()]
    if args.experiment:
        experiments.append(read_experiment(args.experiment))
    prices = prices_of(machines_of(experiments), args.usd_per_hour, records)
    same = args.methodology == "identical_config"
    rows = compare(records, prices, args.tokens, args.reference, identical=same)
    remarks = report.unknown_models(rows)
    for path, (e, unlike) in sweeps.items():
        if e.methodology == "identical_config":
            remarks += [f"{Path(path).name} is not identical: {line}" for line in unlike]
    written = ""
    if directory:  # before anything is printed: nobody may read that to its end
        written = report.write(rows, directory, remarks, html_page(rows, remarks))
    report.show_comparison(rows)
    show_scaling(scaling(rows))
    for line in remarks:
        say(line)
    print(written, end="")
    return 0


if __name__ == "__main__":
    run_tool(main)
