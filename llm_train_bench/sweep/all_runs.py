"""A sweep's runs, one after the other: all settings before any repeat. Needs no torch."""

import itertools

from llm_train_bench.settings.plan import Platform
from llm_train_bench.sweep.cell_runs import CellRow, Rows, cell_key, outcome, run_cell
from llm_train_bench.sweep.duration import time_left
from llm_train_bench.sweep.experiment import Experiment
from llm_train_bench.sweep.grid import Cell
from llm_train_bench.sweep.tune import tune


def run_all(
    cells: list[Cell], e: Experiment, rows: Rows, platform: Platform, tuned: bool = False
) -> list[CellRow]:
    """Run what has no row yet; returns all rows, old ones first. `tuned`: only the best settings."""
    runs = [(cell, repeat) for repeat, cell in itertools.product(range(e.repeats), cells)]
    runs = tune(cells, e, rows, platform) if tuned else runs
    # Each key is made once: a file that is edited meanwhile would give another key.
    keyed = [(cell, repeat, cell_key(cell, repeat)) for cell, repeat in runs]
    done = [(cell, rows.rows[key]) for cell, _, key in keyed if key in rows.rows]
    todo = [(cell, repeat) for cell, repeat, key in keyed if key not in rows.rows]
    if done:
        print(f"rows from before: {len(done)}", flush=True)
    for i, (cell, repeat) in enumerate(todo, 1):
        row = run_cell(cell, repeat, rows.path.parent, e.timeout_s)
        rows.add(row)
        done.append((cell, row))
        left = time_left([cell for cell, _ in todo[i:]], done)
        place = f"[{len(done)}/{len(keyed)}]"
        print(f"{place} {outcome(row)}  {cell.label()}  ({left})", flush=True)
    return [row for _, row in done]
