"""Output for people: progress during the run, and a table to paste into a report."""

import contextlib
import datetime
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from llm_train_bench.base.errors import printable
from llm_train_bench.base.tables import markdown_table, number
from llm_train_bench.formulas.parameters import count_active_parameters
from llm_train_bench.formulas.work import Work
from llm_train_bench.results.metrics import metric_rows
from llm_train_bench.results.result_files import Step, commit_of, step_figures
from llm_train_bench.results.schema import DeviceUse, Result
from llm_train_bench.trace.breakdown_table import breakdown_tables

# Empties the line of a terminal, where the progress may stand.
CLEAR = "\r\x1b[K"


def _rewritten(descriptor: int) -> bool:
    """Whether this is a terminal whose lines can be written anew."""
    return os.isatty(descriptor) and os.environ.get("TERM") != "dumb"


def say(text: str, stream: TextIO | None = None) -> bool:
    """Print a line, by default on standard error; whether it was written.

    Neither a closed or full output ends the run, nor a name that the terminal cannot show.
    """
    out: Any = stream or sys.stderr
    try:
        encoding = getattr(out, "encoding", None) or "utf-8"
        text = printable(text, kept="\n").encode(encoding, "backslashreplace").decode(encoding)
        print(CLEAR * (stream is None and _rewritten(2)) + text, file=out, flush=True)
    except (OSError, ValueError, AttributeError):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # Python flushes at its end
        return False
    return True


PHASES = {"warmup": "warm-up", "resume": "resumed", "measure": "measured", "profile": "profiled"}


class ProgressDisplay:
    """Where the run is, on standard error: on a terminal one line, which each step writes anew.

    Elsewhere a line for the first step, then every 30 s.
    """

    LINE_S = 30.0

    def __init__(
        self,
        n_steps: int,
        flops_per_token: float | None,
        peak_tflops: float | None,
        rewrite: bool = True,
    ):
        """`flops_per_token` (palm) is per device; with its dense `peak_tflops` steps show MFU.

        Without `rewrite` a terminal has lines too: another program may draw there.
        """
        self.n_steps, self.flops_per_token, self.peak_tflops = n_steps, flops_per_token, peak_tflops
        self.rewrites = rewrite and _rewritten(2)
        self.line_at = -math.inf

    def __call__(self, steps: list[Step]) -> None:
        """Show the last of these steps."""
        step = steps[-1]
        done, now = step.step + 1, time.perf_counter()
        known = step_figures(step, self.flops_per_token, self.peak_tflops)
        figures = f"{known['speed/tokens_per_sec']:,.0f} tok/s"
        if step.loss is not None:
            figures = f"loss {step.loss:.4f}  {figures}"
        if (mfu := known["speed/mfu"]) is not None:
            figures += f"  {known['speed/model_tflops_per_gpu']:,.4g} TFLOP/s  MFU {mfu:.1%}"
        seconds = round((self.n_steps - done) * statistics.fmean(s.step_time_s for s in steps))
        steady = 2 < step.step < self.n_steps - 1  # the first steps compile
        left = f"  {datetime.timedelta(seconds=seconds)} left" if steady else ""
        line = f"step {done}/{self.n_steps}  {PHASES[step.phase]}  {figures}{left}"
        if self.rewrites:
            self._rewrite(line[: shutil.get_terminal_size().columns - 1])
        elif now >= self.line_at + self.LINE_S or done == self.n_steps:
            say(line)
            self.line_at = now

    def close(self) -> None:
        """Take the line off a terminal."""
        if self.rewrites:
            self._rewrite("")

    def _rewrite(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"{CLEAR}{line}", end="", file=sys.stderr, flush=True)


def print_header(result: Result, work: Work) -> None:
    """The coming run with its resolved shape: two runs of one name may differ in it."""
    m, b, d = result.model, result.batch, result.device
    s = m.shape
    heads = f"{s['num_attention_heads']}/{s['num_key_value_heads']} heads of {s['head_dim']}"
    mlp = f"MLP {s['intermediate_size']}"
    if e := s.get("experts"):
        active = count_active_parameters(work.config)
        mlp = f"{e['number']} experts of {e['size']}, {e['per_token']} a token ({active:,} active)"
    compiled = f"compile {work.compile_mode}" if work.compiled else "eager"
    chosen, n = len(work.recompute.blocks), work.config.num_hidden_layers
    recomputed = f"{chosen} of {n} blocks recompute ({work.recompute.policy}), " if chosen else ""
    lines = [
        f"{m.name} ({s['model_type']}): {m.n_parameters:,} parameters, {s['num_hidden_layers']} "
        f"layers, d {s['hidden_size']}, {heads}, {mlp}, "
        f"vocabulary {s['vocab_size']}",
        f"batch: {b.micro_batch} x {b.grad_acc_steps} x {b.data_parallel_size} = {b.global_batch} "
        f"samples of {b.seq_len} tokens = {b.tokens_per_step:,} tokens a step",
        f"{d.name}, amp {work.amp}, {compiled}, attention {work.attention.causal}, "
        f"{recomputed}{work.pass_type}, data {result.args['data']}",
    ]
    if result.fp8 is not None:
        f = result.fp8
        emulated = ", emulated" if f.emulated else ""
        higher = "; ".join(f"{what} ({why})" for what, why in f.high_precision.items())
        lines.append(
            f"FP8: {f.backend} {f.recipe}{emulated}, {f.n_linear_layers} linear layers of "
            f"{f.n_parameters / 1e6:,.1f} M parameters; in higher precision: {higher}"
        )
    if work.compiled:
        lines.append("the first step compiles each kind of block, which may take a minute or more")
    say("\n".join(lines))


def print_result(result: Result) -> None:
    """The final table, as Markdown, on standard output; on standard error if that is closed."""
    text = markdown_table(("metric", "value"), table_rows(result))
    if p := result.profile:
        last = p.first_step + p.n_steps - 1
        text += breakdown_tables(f"steps {p.first_step} to {last}, profiled", p)
    lines = text + "\n".join(f"note: {line}" for line in remark_lines(result))
    if not say(lines.rstrip("\n"), sys.stdout):
        say(lines.rstrip("\n"))


def remark_lines(result: Result) -> Iterator[str]:
    """A line on each remark, what makes the run invalid first."""
    for kind, what in (("invalid", "invalid: "), ("disturbed", ""), ("information", "")):
        for remark in (x for x in result.remarks if x.kind == kind):
            yield f"{what}{remark.text}" + (f": {remark.advice}" if remark.advice else "")


def table_rows(result: Result) -> list[tuple[str, str]]:
    """Name and value of each line of the final table: the run, its metrics, memory and devices."""
    s, k = result.model, result.memory
    rows = [
        ("model", f"{s.name} ({s.n_parameters / 1e6:,.1f} M)" if s.n_parameters else s.name),
        ("device", f"{result.device.count} x {result.device.name}"),
        (
            "torch, commit",
            f"{result.environment['libraries']['torch']}, {commit_of(result.environment)}",
        ),
        *[("invalid", why + "; ..." * (len(result.invalid) > 1)) for why in result.invalid[:1]],
        *metric_rows(result.metrics),
    ]
    if result.observed:
        o = result.observed
        if any(o.attention.values()):
            text = " / ".join(", ".join(names) or "unknown" for names in o.attention.values())
            rows.append(("attention kernels: forward / backward", text))
        if o.matmuls:
            rows.append(("matmul kernels", ", ".join(o.matmuls)))
        for kind, use in o.collectives.items():
            text = f"{use.calls:g}, {use.time_s:.4f} s, {number(use.bus_gb_per_s, '.3g')} GB/s"
            rows.append((f"{kind}: calls, time, bus", text))
    if k:
        kinds = ("parameters", "gradients", "optimizer", "activations", "workspace")
        text = " / ".join(f"{getattr(k, f'{kind}_gib'):.2f}" for kind in kinds)
        rows.append(("parameters / gradients / optimizer / activations / rest", f"{text} GiB"))
    for d in result.devices:
        if d.sm_clock_mean_mhz is not None:
            rows.append((f"rank {d.rank}: clock, power, temperature", _device_row(d)))
    return rows


def _device_row(d: DeviceUse) -> str:
    text = f"{d.sm_clock_mean_mhz:,.0f} of {number(d.sm_clock_limit_mhz, ',.0f')} MHz, "
    text += f"{number(d.average_power_w, '.0f')} (peak {number(d.peak_power_w, '.0f')}) of "
    return text + f"{number(d.power_limit_w, '.0f')} W, {number(d.temperature_max_c, '.0f')} C"
