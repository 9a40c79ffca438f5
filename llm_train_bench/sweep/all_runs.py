"""A sweep's runs, one after the other, all settings before any repeat; their time. Needs no torch."""

import datetime
import itertools
import statistics
from collections.abc import Sequence

from llm_train_bench.base.errors import DoesNotFit, UsageError
from llm_train_bench.formulas.speed_model import estimate_speed
from llm_train_bench.settings.plan import Platform
from llm_train_bench.sweep.cell_runs import CellRow, Rows, cell_key, outcome, run_cell
from llm_train_bench.sweep.experiment import Experiment
from llm_train_bench.sweep.grid import Cell, work_on
from llm_train_bench.sweep.tune import tune

# Seconds from the start of a process to its first step (6 to 9 on two CPU cores); compilation is extra.
START_S = 8.0


def run_all(
    cells: list[Cell], e: Experiment, rows: Rows, platform: Platform, tuned: bool = False
) -> list[CellRow]:
    """Run what has no row yet; returns all rows, old ones first. `tuned`: only the best settings."""
    runs = [(cell, repeat) for repeat, cell in itertools.product(range(e.repeats), cells)]
    runs = tune(cells, e, rows, platform) if tuned else runs
    # Each key is made once: a file that is edited meanwhile would give another key.
    keyed = {cell_key(cell, repeat): (cell, repeat) for cell, repeat in runs}
    done = [rows.rows[key] for key in keyed if key in rows.rows]
    todo = [run for key, run in keyed.items() if key not in rows.rows]
    if done:
        print(f"rows from before: {len(done)}", flush=True)
    for i, (cell, repeat) in enumerate(todo, 1):
        row = run_cell(cell, repeat, rows.path.parent, e.timeout_s)
        rows.add(row)
        done.append(row)
        walls = [row["wall_s"] for row in done if "wall_s" in row]
        left = hours(statistics.fmean(walls) * (len(todo) - i)) if walls else "unknown time"
        place = f"[{len(done)}/{len(keyed)}]"
        print(f"{place} {outcome(row)}  {cell.label()}  ({left} left)", flush=True)
    return done


def estimated_seconds(cells: Sequence[Cell], e: Experiment, platform: Platform) -> float | None:
    """Seconds of a run of each setting, one after the other; None where a device is not known."""
    seconds = 0.0
    for cell in cells:
        try:
            work, device = work_on(cell, e, platform)
            step_s = estimate_speed(work, device).step_s
        except DoesNotFit:
            step_s = 0.0
        except UsageError:
            return None
        seconds += min(START_S + step_s * (cell.args.warmup_steps + cell.args.n_steps), e.timeout_s)
    return seconds


def hours(seconds: float) -> str:
    """Seconds as hours:minutes:seconds."""
    return str(datetime.timedelta(seconds=round(seconds)))
