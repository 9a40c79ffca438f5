"""Whether a file of runs is consistent: figures, known losses, what is impossible. Needs no torch.

This finds mistakes and wrong computations, and no careful forgery: `NOT_CHECKED` is only the file's word.
"""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llm_train_bench.base.errors import printable
from llm_train_bench.base.hardware import device_called, find_peaks
from llm_train_bench.check.references import plan_of_result
from llm_train_bench.check.workloads import format_of, workload_of
from llm_train_bench.compare.run_files import SavedRun, read_runs_file
from llm_train_bench.formulas.flops import flops_per_token
from llm_train_bench.formulas.parameters import count_parameters, linear_parameters
from llm_train_bench.model.config import parse_config
from llm_train_bench.results import figures
from llm_train_bench.results.remarks import memory_remark
from llm_train_bench.results.result_files import Step
from llm_train_bench.results.schema import Result
from llm_train_bench.settings.flags import Args, defaults
from llm_train_bench.settings.run_file import unknown_settings

NOT_CHECKED = ["readings of sensors and of memory, versions, dates", "that this machine ran it"]
EXACT = 1e-6
# The host's clock is read when a step has been issued. It agrees with the device's times within this
# part of a step, this part of a window, or these seconds. On an H200 it was within 0.2 of a step.
STEP_LAG, CLOCKS_AGREE, CLOCK_S = 0.6, 0.03, 0.02
# A device's energy, and its average power over the window, agree within this part.
ENERGY_AGREES = 0.05


def verify_file(path: Path, as_json: bool = False) -> int:
    """Print what a check of a file of runs found; 0, or 1 if something is wrong."""
    rows, seen = [], set()
    for entry in read_runs_file(path).settings:
        for run in entry.runs:
            row: dict[str, Any] = {"setting": entry.setting} | verify_run(run)
            steps = json.dumps([vars(step) for step in run.steps])
            row["wrong"] += ["the file has these steps twice"] if steps in seen else []
            seen.add(steps)
            rows.append(row)
    if as_json:
        print(json.dumps(rows, indent=1))
    for row in rows if not as_json else ():
        print(printable(f"{'wrong' if row['wrong'] else 'consistent'}: {row['setting']}"))
        for name in ("wrong", "checked", "not checked"):
            if row[name]:
                print(printable(f"  {name}: {'; '.join(row[name])}"))
    return int(any(row["wrong"] for row in rows))


def verify_run(run: SavedRun) -> dict[str, Any]:
    """What is `wrong` with a run, what was `checked` and what was `not checked`, in words."""
    r = run.result
    wrong = [*r.invalid, *_wrong_facts(r), *_wrong_steps(run)]
    checked, left = [f"times, tokens and clock of {len(run.steps)} steps; limits of the device"], []
    lacking = unknown_settings(r.args) if r.ours else {}
    odd = {k: v for k, v in lacking.items() if k in defaults(Args) and not isinstance(v, str)}
    wrong += [f"args.{name} is {str(value)[:60]}" for name, value in odd.items()]
    if lacking:
        names = ", ".join(f"{name} {value}" for name, value in lacking.items())
        left.append(f"figures: this version lacks {names}")
    elif r.first_step:
        left.append("figures: the run was resumed")
    elif not wrong:
        try:
            wrong += _wrong_figures(run)
            checked.append("metrics, computed again from the steps")
            kind = checked if r.model.config else left
            kind.append("parameters, FLOPs and MFU, from the model's config")
        except Exception as error:  # anything may be in a stranger's file
            wrong.append(f"its figures cannot be computed again: {error}")
    workload, n, number_format = workload_of(r), 0, format_of(r)
    if workload and number_format in workload.bands:
        why = workload.wrong_steps(number_format, [vars(step) for step in run.steps])
        wrong += [why] if why else []
        n = len(workload.losses)
        checked.append(f"losses and gradient norms of steps 0 to {n - 1} of {workload.shape}")
    left.append(f"losses from step {n} on")
    return {"wrong": wrong, "checked": checked, "not checked": left + NOT_CHECKED}


def _wrong_figures(run: SavedRun) -> Iterator[str]:
    """Figures that differ from what the run's steps, config and readings give."""
    r, fresh = run.result, run.result.model_copy(deep=True)
    plan, config = None, parse_config(r.model.config, "config.json") if r.model.config else None
    if r.ours:
        plan = plan_of_result(r, "cpu" if r.device.type == "cpu" else "nvidia", r.device.memory_gib)
        config = plan.work.config
        for name in ("micro_batch", "grad_acc_steps", "global_batch", "seq_len", "tokens_per_step"):
            setattr(fresh.batch, name, getattr(plan.work.batch, name))
    computed = ["tokens_per_sec", "tokens_per_joule"]
    if config:
        fresh.model.hash = config.hash
        fresh.model.n_parameters = count_parameters(config)
        fresh.model.n_matmul_parameters = sum(linear_parameters(config).values())
        computed += ["mfu", "hfu", "model_tflops", "ideal_time"]
    if r.device.type == "cuda":
        peaks = find_peaks(r.device.hardware, r.args.get("peak_tflops"))
        fresh.device.peak_bf16_tflops = peaks.bf16_tflops
    for name in r.metrics.model_fields_set:
        if name.startswith(tuple(computed)):
            setattr(fresh.metrics, name, None)
    if r.device.count == 1:  # of several ranks they are the slowest's
        fresh.step_times_s = []
    phases = {name: [s for s in run.steps if s.phase == name] for name in ("warmup", "measure")}
    figures.fill_device_metrics(fresh, fresh.devices)
    figures.fill_step_metrics(fresh, phases["warmup"], phases["measure"])
    if plan:
        figures.fill_flop_metrics(fresh, plan.work)
    elif config and r.batch.seq_len:
        palm = flops_per_token(config, r.batch.seq_len, False)
        figures.fill_flop_rates(fresh, palm, flops_per_token(config, r.batch.seq_len, True))
    yield from _unlike("step_times_s", r.step_times_s, fresh.step_times_s)
    for part in ("batch", "model", "device", "metrics"):
        told, right = getattr(r, part), getattr(fresh, part)
        for name in told.model_fields_set:  # an older file lacks what was added since
            yield from _unlike(f"{part}.{name}", getattr(told, name), getattr(right, name))


def _unlike(name: str, found: Any, right: Any) -> Iterator[str]:
    """A line if a figure is not what it should be, but for a library's rounding of sums."""
    same = found == right
    if isinstance(found, int | float) and isinstance(right, int | float):
        same = math.isclose(found, right, rel_tol=EXACT, abs_tol=1e-12)
    if not same:
        yield f"{name} is {str(found)[:60]}; what the file holds gives {str(right)[:60]}"


def _wrong_steps(run: SavedRun) -> Iterator[str]:
    """Where steps are missing, or contradict the flags, the result or the host's clock."""
    r, steps = run.result, run.steps
    phases = [s.phase for s in steps]
    n, first = phases.count("measure"), r.first_step
    if not n or "measure" in phases[:-n] or {*phases} - {"warmup", "resume", "measure"}:
        yield "it has no measured step, or one before the end of the warm-up"
        return
    counts, flags = (len(steps) - n, n), (r.args.get("warmup_steps"), r.args.get("n_steps"))
    if [s.step for s in steps] != [*range(first, first + len(steps))]:
        yield "steps are missing or out of order"
    if counts != flags and not r.first_step:
        yield f"it has {counts[0]} + {counts[1]} steps; its flags say {flags[0]} + {flags[1]}"
    for s in steps:
        yield from (f"step {s.step} {why}" for why in _wrong_step(s, r))
    window = steps[-n:]
    times = [s.step_time_s for s in window]
    due = itertools.accumulate([0.0, *times[1:]])
    late = max(abs(s.at - window[0].at - after) for s, after in zip(window, due, strict=True))
    if late > STEP_LAG * max(times) + CLOCKS_AGREE * sum(times) + CLOCK_S:
        yield f"the measured steps are up to {late:.3g} s off the host's clock"
    if r.device.count > 1 and not 1 - EXACT <= sum(r.step_times_s) / (sum(times) or 1.0) <= 1.1:
        yield "the slowest rank's times are not near those of the steps"


def _wrong_step(s: Step, r: Result) -> Iterator[str]:
    parts = [s.data_time_s, s.forward_time_s, s.backward_time_s, s.optimizer_time_s, s.idle_time_s]
    known = [part for part in (*parts, s.compile_s, *s.micro_batch_times_s) if part is not None]
    longest = max(sum(part or 0.0 for part in parts), *s.micro_batch_times_s, 0.0)
    highest = r.args["lr"] if r.ours and isinstance(r.args.get("lr"), float) else math.inf
    if s.step_time_s <= 0 or min(known, default=0.0) < 0:
        yield "has a time that is not above 0"
    if longest > 1.02 * s.step_time_s + 1e-3:
        yield "is shorter than its parts or micro batches"
    if r.ours and s.tokens != r.batch.tokens_per_step:
        yield f"has {s.tokens} tokens, not {r.batch.tokens_per_step}"
    if not 0 <= (s.lr or 0.0) <= highest * (1 + EXACT):
        yield f"has a learning rate of {s.lr:g}; the highest is {highest:g}"
    if not 0 <= (s.loss or 0.0) < 100 or (s.grad_norm or 0.0) < 0:
        yield f"has a loss of {s.loss} and a gradient norm of {s.grad_norm}, which no run has"


def _wrong_facts(r: Result) -> Iterator[str]:
    """Readings beyond the listed peak, power and memory, and facts that exclude each other."""
    d, m, hardware = r.device, r.metrics, device_called(r.device.hardware)
    if r.environment.get("cuda") and r.environment.get("hip"):
        yield "its PyTorch is for CUDA and for HIP"
    ran = r.observed.kernels if r.observed else set()
    said = {
        str(r.args.get("attention", "auto") if r.ours else "auto"),
        r.attention_kernel or "auto",
    }
    said -= {"auto"}
    if ran and said - ran - {"blocks", "flex"}:
        yield f"it says {', '.join(sorted(said))} attention, and {', '.join(sorted(ran))} ran"
    for use in r.devices:
        watts, joules, window = use.average_power_w, use.energy_j, m.window_s or 0.0
        if watts and joules and abs(joules / (watts * window or 1.0) - 1) > ENERGY_AGREES:
            yield f"rank {use.rank}: {joules:.4g} J in {window:.4g} s are not {watts:.4g} W"
        if min([v for v in use.model_dump().values() if isinstance(v, float)], default=0.0) < 0:
            yield f"rank {use.rank} has a reading below 0"
    if hardware and d.type == "cuda":
        gib = max(d.memory_gib or 0.0, m.peak_allocated_gib or 0.0, m.peak_reserved_gib or 0.0)
        for _, why in memory_remark(gib, hardware.memory_gib):
            yield why
