"""--tune: the fastest of many settings, few of them run. Needs no torch.

The estimate leaves a fifth of the settings, and short runs halve these again and again. The two best run
in full, in turn, for an interval.
"""

import dataclasses
import itertools

from llm_train_bench.base.errors import DoesNotFit, UsageError
from llm_train_bench.base.tables import grouped
from llm_train_bench.formulas.memory_model import estimate_memory
from llm_train_bench.formulas.speed_model import estimate_speed
from llm_train_bench.settings.plan import Platform
from llm_train_bench.sweep.cell_runs import Rows, cell_key, outcome, run_cell
from llm_train_bench.sweep.experiment import Experiment
from llm_train_bench.sweep.grid import Cell, work_on

# Part of the settings that is run at all; measured steps of the first short runs.
FIELD, FIRST_STEPS = 5, 3
REPEATS = 5


def tune(
    cells: list[Cell], e: Experiment, rows: Rows, platform: Platform
) -> list[tuple[Cell, int]]:
    """The runs that confirm the winner of each model and length: the two best, in turn, REPEATS times.

    Each short run is a row, so a sweep that was killed goes on.
    """
    runs: list[tuple[Cell, int]] = []
    for members in grouped(cells, lambda c: (c.config, dict(c.flags).get("seq_len"))).values():
        field = by_estimate(members, e, platform)
        print(f"{len(members)} settings; these are the estimated fastest that fit:")
        for rate, cell in field:
            print(f"  {rate:,.0f} tokens/s  {cell.label()}", flush=True)
        best = halved([cell for _, cell in field], e, rows)
        runs += [(cell, i) for i, cell in itertools.product(range(max(REPEATS, e.repeats)), best)]
    return runs


def by_estimate(cells: list[Cell], e: Experiment, platform: Platform) -> list[tuple[float, Cell]]:
    """A fifth of the settings, at least two: those estimated to fit and be fastest, with tokens/s."""
    rated = []
    for cell in cells:
        try:
            work, gpu = work_on(cell, e, platform)
        except DoesNotFit:  # bsz auto, and not even 1 fits
            continue
        needed = estimate_memory(work).on_device(work.world)
        if gpu.platform != "cpu" and needed > gpu.memory_gib * 2**30:
            continue
        rate = work.batch.tokens_per_step / estimate_speed(work, gpu).step_s
        rated.append((rate, cell))
    if not rated:
        raise UsageError("--tune: no setting is estimated to fit; use more GPUs or a smaller bsz")
    rated.sort(key=lambda pair: -pair[0])
    return rated[: max(2, len(cells) // FIELD)]


def halved(field: list[Cell], e: Experiment, rows: Rows) -> list[Cell]:
    """The two settings that are left after short runs, each round of half as many and twice as long."""
    steps = FIRST_STEPS
    while len(field) > 2:
        rates = [(_short(cell, steps, e, rows), cell) for cell in field]
        rates.sort(key=lambda pair: -pair[0])  # equal ones stay in their order
        # If none runs, one of them does in full: its row says why.
        ranked = [cell for rate, cell in rates if rate] or field[:1]
        field, steps = ranked[: max(2, len(field) // 2)], 2 * steps
    return field


def _short(cell: Cell, steps: int, e: Experiment, rows: Rows) -> float:
    """Tokens/s of a short run, which runs now unless it did; 0 where it failed."""
    steps = min(steps, cell.args.n_steps)
    warmup = 3 if cell.args.pt_compile else 2  # its first steps compile
    short_run = {"n_steps": steps, "warmup_steps": warmup, "no_tensorboard": True}
    flags = dict(cell.flags) | short_run
    short = dataclasses.replace(cell, flags=tuple(sorted(flags.items())))
    key = cell_key(short, "probe")
    if key not in rows.rows:
        rows.add(run_cell(short, "probe", rows.path.parent, e.timeout_s))
    row = rows.rows[key]
    print(f"  {steps} steps: {outcome(row)}  {cell.label()}", flush=True)
    return row["tokens_per_sec"] if row["status"] == "ok" and not row.get("invalid") else 0.0
