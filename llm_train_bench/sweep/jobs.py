"""A sweep's runs, on this machine or as jobs of SLURM through submitit. Needs no torch."""

import contextlib
import io
import itertools
import json
import math
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llm_train_bench.base.errors import UsageError, one_line
from llm_train_bench.base.files import ROOT, how_to_install, write_whole
from llm_train_bench.settings.plan import Platform
from llm_train_bench.sweep import cell_runs
from llm_train_bench.sweep.auto_batch import with_largest_batch
from llm_train_bench.sweep.cell_runs import CellRow, Rows, cell_key, outcome, run_cell
from llm_train_bench.sweep.duration import Durations, duration_text
from llm_train_bench.sweep.experiment import Experiment, Machine
from llm_train_bench.sweep.grid import Cell
from llm_train_bench.sweep.sweep_flags import SweepArgs
from llm_train_bench.sweep.tune import tune

POLL_S, ASK_S = 1.0, 10.0
# Names that submitit has for every cluster; all others are sbatch's own.
GENERAL = {"nodes", "gpus_per_node", "cpus_per_task", "tasks_per_node", "mem_gb", "timeout_min"}


def options_of(texts: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` of --slurm; UsageError for what is none."""
    options, words = {}, {"true": True, "false": False}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (equals and key.isidentifier() and value):
            raise UsageError(f"--slurm {text}: must be KEY=VALUE, for example partition=gpu")
        options[key] = int(value) if value.isdecimal() else words.get(value, value)
    return options


def run_as_jobs(
    todo: Sequence[tuple[Cell, int]], directory: Path, timeout_s: float, options: dict[str, Any]
) -> Iterator[CellRow]:
    """Rows of the runs, in the order in which their jobs end. Interrupted, it cancels what is left.

    The option `cluster=local` runs the jobs as processes of this machine, all at once.
    Jobs of a sweep that was killed are waited for, not submitted again.
    """
    try:
        import submitit
        from submitit.core.utils import FailedJobError
    except ImportError:
        get = how_to_install("pip install -e '.[slurm]'")
        raise UsageError(f"--slurm needs submitit: {get}") from None
    cluster, folder = options.pop("cluster", "slurm"), directory / "jobs"
    submitted = folder / "submitted.json"
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for name in ("nodes", "tasks_per_node"):
        if options.get(name, 1) != 1:
            why = "each run is one task on one node, and starts its own ranks; leave it out"
            raise UsageError(f"--slurm {name}={options[name]}: {why}")
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        general = {"name": "llm-train-bench", "timeout_min": math.ceil(timeout_s / 60) + 10}
        sbatch: dict[str, Any] = general | {k: v for k, v in options.items() if k in GENERAL}
        others = {k: v for k, v in options.items() if k not in GENERAL}
        if cluster == "slurm":
            # submitit refuses the options of sbatch that it does not know. A preempted run is a failed
            # row: SLURM must not run it again meanwhile.
            known = submitit.SlurmExecutor._valid_parameters()
            more = {k.replace("_", "-"): others.pop(k) for k in others.keys() - known}
            sbatch["slurm_additional_parameters"] = {"no-requeue": True} | more
        executor.update_parameters(**sbatch | {f"slurm_{k}": v for k, v in others.items()})
    except (NameError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"--slurm: {one_line(error)}") from None
    ids: dict[str, str] = {}
    if cluster == "slurm":
        with contextlib.suppress(OSError, ValueError):
            ids = json.loads(submitted.read_text(encoding="utf-8"))
    jobs, asked = {}, {}
    try:
        for cell, repeat in todo:
            key = cell_key(cell, repeat)
            if key in ids:
                job = submitit.SlurmJob(folder=folder, job_id=ids[key])
            else:
                try:
                    with contextlib.redirect_stderr(io.StringIO()):  # it repeats what sbatch said
                        job = executor.submit(
                            run_cell, cell, repeat, directory.resolve(), timeout_s
                        )
                except FailedJobError as error:  # sbatch refused it
                    raise UsageError(f"--slurm: {one_line(error)}") from None
            jobs[key], ids[key] = (cell, repeat, job), job.job_id
            write_whole(submitted, json.dumps(ids) + "\n")
        while jobs:
            for key, (cell, repeat, job) in list(jobs.items()):
                done = job.done()
                if not done and not (cluster == "slurm" and _is_gone(job.job_id, asked)):
                    continue
                del jobs[key], ids[key]
                try:
                    if not done and not job.done():  # result() would wait without end
                        raise RuntimeError(f"it left no result; its log is in {folder}")
                    row = job.result()
                except Exception as error:  # cancelled, out of time, or its node was lost
                    said = [line for line in str(error).splitlines() if line.strip("- ")]
                    lines = [s for s in said if "Error" in s and not s.endswith(":")] or said
                    text = lines[-1] if lines else type(error).__name__
                    row = cell_runs.first_of_row(cell, repeat)
                    row |= {"status": "failed", "error": f"job {job.job_id}: {one_line(text)}"}
                yield row
            write_whole(submitted, json.dumps(ids) + "\n")
            time.sleep(POLL_S)
    finally:
        for _, _, job in jobs.values():
            with contextlib.suppress(Exception):
                job.cancel()
        if jobs:
            write_whole(submitted, "{}\n")


def _is_gone(job_id: str, asked: dict[str, tuple[float, bool]]) -> bool:
    """Whether SLURM has no such job; without accounting, submitit cannot tell that one ended.

    `asked` holds when each job was last asked for, since the scheduler is not to be asked too often, and
    whether it was gone: only a second time counts, because a result may take a while to appear.
    """
    now, (last, before) = time.monotonic(), asked.get(job_id, (-math.inf, False))
    if now < last + ASK_S:
        return False
    done = subprocess.run(["squeue", "-h", "-j", job_id], capture_output=True, text=True)
    gone = not done.stdout.strip() and (not done.returncode or "Invalid job id" in done.stderr)
    asked[job_id] = now, gone
    return gone and before


def run_all(
    cells: list[Cell], experiment: Experiment, rows: Rows, args: SweepArgs, platform: Platform
) -> list[CellRow]:
    """Run what has no row yet, all settings before any repeat; returns all rows, old ones first."""
    directory, timeout_s = rows.path.parent, experiment.timeout_s
    if args.auto_bsz:
        gpu = experiment.hardware.get(platform, Machine()).gpu
        cells = [with_largest_batch(cell, rows, timeout_s, gpu) for cell in cells]
    # Each key is made once: a file that is edited meanwhile would give another key.
    measured, todo, cell_of = [], [], {}
    durations = Durations(cells, experiment, platform)
    runs = [(cell, i) for i, cell in itertools.product(range(experiment.repeats), cells)]
    for cell, repeat in tune(cells, experiment, rows, platform) if args.tune else runs:
        key = cell_key(cell, repeat)
        cell_of[key] = cell
        if row := rows.rows.get(key):
            cell_runs.refuse_foreign_row(row, rows.path)
            measured.append(row)
            durations.add(cell, row)
        else:
            todo.append((cell, repeat))
    if done := len(measured):
        print(f"rows from before: {done}", flush=True)
    start, ended = time.monotonic(), []
    waiting = [cell for cell, _ in todo]
    if args.slurm:
        fresh = run_as_jobs(todo, directory, timeout_s, options_of(args.slurm))
    else:
        fresh = run_here(todo, directory, timeout_s, args.cooldown)
    for i, row in enumerate(fresh, 1):
        rows.add(row)
        measured.append(row)
        cell = cell_of[row["key"]]
        durations.add(cell, row)
        waiting.remove(cell)
        ended.append(cell)
        left, past = durations.of(waiting), durations.of(ended)
        # Jobs run side by side, and between runs there may be a rest.
        pace = (time.monotonic() - start) / past if past else 1.0
        text = f"{duration_text(pace * left)} left" if left is not None else "time left unknown"
        place = f"[{done + i}/{done + len(todo)}]"
        print(f"{place} {outcome(row)}  {cell.label()}  ({text})", flush=True)
    return measured


def run_here(
    todo: Sequence[tuple[Cell, int]], directory: Path, timeout_s: float, cooldown_s: float
) -> Iterator[CellRow]:
    """Rows of the runs on this machine, one after the other, with a rest between them."""
    for i, (cell, repeat) in enumerate(todo):
        if i:
            time.sleep(cooldown_s)
        yield run_cell(cell, repeat, directory, timeout_s)
