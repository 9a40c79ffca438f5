"""What a person sees: a progress bar while it runs, and a table to paste into a report."""

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.formulas.flops import chosen_blocks
from bench.results.result_files import Step
from bench.results.schema import DeviceUse, Profile, Result
from bench.settings.flags import parse_sac_freq
from bench.tables import markdown_table, number, show_breakdown
from bench.trace.breakdown_schema import Gaps


class ProgressDisplay:
    """A bar on a terminal; elsewhere a line every tenth of the run. Both on standard error."""

    def __init__(self, n_steps: int):
        self.n_steps = n_steps
        self.bar = None
        console = Console(stderr=True)
        if console.is_terminal:
            # Drawn only when steps are handed on: a drawing thread of its own would take time from
            # the loop.
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=console,
                auto_refresh=False,
                transient=True,
            )
            self.task = self.bar.add_task("warm-up", total=n_steps, figures="")
            self.bar.start()
        self.tenth = max(1, n_steps // 10)

    def __call__(self, steps: list[Step]) -> None:
        for step in steps if self.bar is None else steps[-1:]:
            self.show(step)

    def show(self, step: Step) -> None:
        """Show where the run is."""
        done = step.step + 1
        figures = f"loss {step.loss:.4f}  {step.tokens / step.step_time_s:,.0f} tok/s"
        name = {"warmup": "warm-up", "measure": "measured", "profile": "profiled"}[step.phase]
        if self.bar is None:
            if done % self.tenth == 0 or done == self.n_steps:
                line = f"step {done}/{self.n_steps}  {name}  {figures}"
                print(line, file=sys.stderr, flush=True)
            return
        self.bar.update(self.task, completed=done, description=name, figures=figures)
        self.bar.refresh()

    def close(self) -> None:
        """Take the bar off the screen."""
        if self.bar is not None:
            self.bar.stop()


def print_header(result: Result) -> None:
    """What is about to run, with the resolved shape: two runs of one name may differ in it."""
    m, b, d = result.model, result.batch, result.device
    s = m.shape
    heads = f"{s['num_attention_heads']}/{s['num_key_value_heads']} heads of {s['head_dim']}"
    args = result.args
    compiled = f"compile {args['compile_mode']}" if args["pt_compile"] else "eager"
    lines = [
        f"{m.name} ({s['model_type']}): {m.n_parameters:,} parameters, {s['num_hidden_layers']} "
        f"layers, d {s['hidden_size']}, {heads}, MLP {s['intermediate_size']}, "
        f"vocabulary {s['vocab_size']}",
        f"batch: {b.micro_batch} x {b.grad_acc_steps} x {b.data_parallel_size} = {b.global_batch} "
        f"samples of {b.seq_len} tokens = {b.tokens_per_step:,} tokens a step",
        f"{d.name}, amp {args['amp']}, {compiled}, attention {args['attention']}, "
        f"{recomputed(result)}{args['pass_type']}, data {args['data']}",
    ]
    if result.fp8 is not None:
        f = result.fp8
        emulated = ", emulated" if f.emulated else ""
        kept = "; ".join(f"{what} ({why})" for what, why in f.high_precision.items())
        lines.append(
            f"FP8: {f.backend} {f.recipe}{emulated}, {f.n_linear_layers} linear layers of "
            f"{f.n_parameters / 1e6:,.1f} M parameters; in higher precision: {kept}"
        )
    print("\n".join(lines), file=sys.stderr, flush=True)


def recomputed(result: Result) -> str:
    """How many blocks --sac-freq chose, and by which policy they recompute."""
    n, args = result.model.shape["num_hidden_layers"], result.args
    chosen = len(chosen_blocks(n, parse_sac_freq(args["sac_freq"])))
    return f"{chosen} of {n} blocks recompute ({args['sac_policy']}), " if chosen else ""


def print_result(result: Result) -> None:
    """The final table, as Markdown, on standard output."""
    table = markdown_table("metric", "value")
    for name, value in table_rows(result):
        table.add_row(name, value)
    Console(width=200, highlight=False).print(table)
    if result.profile:
        print_profile(result.profile)
    for note in result.notes:
        print(f"note: {note}")


def print_profile(p: Profile) -> None:
    """Where the time of the profiled steps went."""
    gaps = None
    if p.host_gaps is not None:
        gaps = Gaps(p.host_gaps, p.host_gaps_s, p.longest_host_gap_s, p.host_gaps_by_part_s)
    title = f"steps {p.first_step} to {p.first_step + p.n_steps - 1}, profiled"
    show_breakdown(
        Console(width=200, highlight=False), title, p.classes_s, p.step_time_s,
        p.communication_overlapped_s, gaps, p.matmul_tflops, p.matmul_roof_fraction, p.costliest,
    )  # fmt: skip


def table_rows(result: Result) -> list[tuple[str, str]]:
    """Name and value of each line of the final table; what is unknown says so."""
    m, s = result.metrics, result.model
    commit = (result.environment["git_sha"] or "no git")[:10]
    dirty = "+changes" if result.environment["git_dirty"] else ""
    rows = [
        ("model", f"{s.name} ({s.n_parameters / 1e6:,.1f} M)"),
        ("device", f"{result.device.count} x {result.device.name}"),
        ("torch, commit", f"{result.environment['libraries']['torch']}, {commit}{dirty}"),
        ("tokens/s", number(m.tokens_per_sec, ",.0f")),
        ("tokens/s per device", number(m.tokens_per_sec_per_gpu, ",.0f")),
        ("step time: median", f"{number(m.step_time_median_s, '.4f')} s"),
        (
            "step time: mean [95 %]",
            f"{number(m.step_time_mean_s, '.4f')} s "
            f"[{number(m.step_time_ci95_low_s, '.4f')}, {number(m.step_time_ci95_high_s, '.4f')}]",
        ),
        (
            "step time: std, CV",
            f"{number(m.step_time_std_s, '.4f')} s, {number(m.step_time_cv, '.1%')}",
        ),
        (
            "data / forward / backward / optimizer",
            " / ".join(
                number(v and 1e3 * v, ".1f")
                for v in (
                    m.data_time_mean_s,
                    m.forward_time_mean_s,
                    m.backward_time_mean_s,
                    m.optimizer_time_mean_s,
                )
            )
            + " ms",
        ),
        ("TFLOP/s per device: palm / causal", _pair(m, "model_tflops_per_gpu", ".2f")),
        ("MFU: palm / causal", _pair(m, "mfu", ".1%")),
        (
            "ideal time of matmuls: datasheet / measured roof",
            f"{number(m.ideal_time_fraction, '.1%')} / {number(m.roof_time_fraction, '.1%')}",
        ),
        ("warm-up", f"{number(m.warmup_s, '.1f')} s"),
    ]  # fmt: skip
    if m.slowest_rank is not None:
        rows.append(
            (
                "latest rank: before backward",
                f"{m.slowest_rank}, {m.rank_imbalance:+.1%} to the mean",
            )
        )
    if m.slowest_device is not None:
        behind = f"{m.slowest_device}, {m.device_imbalance:.1%} behind the mean"
        rows.append(("slowest device by itself: rank", behind))
    if m.compile_s is not None:
        rows.append(("compilation", f"{m.compile_s:.1f} s"))
    if m.peak_allocated_gib is not None:
        rows.append(
            (
                "peak memory: allocated / reserved",
                f"{m.peak_allocated_gib:.2f} / {m.peak_reserved_gib:.2f} GiB",
            )
        )
    else:
        rows.append(("peak memory: resident", f"{number(m.peak_rss_gib, '.2f')} GiB"))
    if result.memory:
        k = result.memory
        rows.append(
            (
                "parameters / gradients / optimizer / activations / rest",
                " / ".join(
                    f"{gib:.2f}"
                    for gib in (
                        k.parameters_gib,
                        k.gradients_gib,
                        k.optimizer_gib,
                        k.activations_gib,
                        k.workspace_gib,
                    )
                )
                + " GiB",
            )
        )
    if m.energy_j:
        rows.append(("energy", f"{m.average_power_w:.0f} W, {m.tokens_per_joule:.2f} tokens/J"))
    for d in result.devices:
        if d.sm_clock_mean_mhz is not None:
            rows.append((f"rank {d.rank}: clock, power, temperature", _device_row(d)))
    rows.append(
        ("loss: first, last", f"{number(m.first_loss, '.4f')}, {number(m.final_loss, '.4f')}")
    )
    if m.val_loss is not None:
        rows.append(
            ("validation loss: before, after", f"{m.val_loss_before:.4f}, {m.val_loss:.4f}")
        )
    return rows


def _device_row(d: DeviceUse) -> str:
    text = f"{d.sm_clock_mean_mhz:,.0f} of {number(d.sm_clock_limit_mhz, ',.0f')} MHz, "
    text += f"{number(d.average_power_w, '.0f')} (peak {number(d.peak_power_w, '.0f')}) of "
    text += f"{number(d.power_limit_w, '.0f')} W, {number(d.temperature_max_c, '.0f')} C"
    held = ", ".join(f"{why} {part:.0%}" for why, part in d.held_down.items())
    text += f", HELD DOWN: {held}" if held else ""
    return f"{text}, SHARED" if d.other_processes else text


def _pair(metrics, name: str, form: str) -> str:
    return " / ".join(number(getattr(metrics, name + end), form) for end in ("", "_causal"))
