"""Which toggles go together, as data, for the refusals, docs/COMBINATIONS.md and the tests.

Needs no torch. A combination is supported unless a rule refuses it; every rule gives a reason and
what to use instead.
"""

import collections
import dataclasses

from llm_train_bench.settings.flags import GRAPH_MODES, SHARDED, Args, Script

AXES = {
    "entrypoint": tuple(Script),
    "amp": ("off", "bf16", "fp16"),
    "fp8": ("off", "te", "torchao"),
    "compile": ("off", "on", "graphs"),
    "sac": ("off", "block", "op"),
    "layout": ("data", "tokens", "experts"),
}


# One cell of the table. `graphs` are the compile modes that record CUDA graphs; the layout is of `tokens`
# under --tp or --cp, of `experts` under --ep (with or without them).
Combination = collections.namedtuple("Combination", AXES, defaults=["data"])


@dataclasses.dataclass(frozen=True)
class Rule:
    """A combination is refused where each axis named in `when` has one of the values given."""

    when: dict[str, tuple[str, ...]]
    reason: str
    instead: str

    def refuses(self, combination: Combination) -> bool:
        """Whether this rule speaks against the combination."""
        return all(getattr(combination, axis) in values for axis, values in self.when.items())


# fmt: off
RULES = (
    Rule({"fp8": ("te", "torchao"), "amp": ("off", "fp16")},
         "FP8 matmuls take and give bf16", "--amp bf16"),
    Rule({"fp8": ("te",), "compile": ("on", "graphs")},
         "Transformer Engine's modules cannot be traced by torch.compile",
         "--fp8-backend torchao, or leave out --pt-compile"),
    Rule({"fp8": ("te",), "sac": ("op",)},
         "Transformer Engine's matmuls are hidden from the policy that would keep them",
         "--sac-policy block, or --fp8-backend torchao"),
    Rule({"compile": ("graphs",), "entrypoint": SHARDED},
         "CUDA graphs need parameters at fixed addresses, and FSDP gathers them anew",
         "--compile-mode default or max-autotune-no-cudagraphs"),
    Rule({"layout": ("tokens", "experts"), "entrypoint": ("train.py", "train_ddp.py")},
         "parts of layers and of samples need a sharded model", "train_fsdp.py or train_pp.py"),
    Rule({"layout": ("tokens", "experts"), "amp": ("fp16",)},
         "ranks would scale their parts of one loss apart", "--amp bf16"),
    Rule({"entrypoint": ("train_pp.py",), "amp": ("fp16",)},
         "the first stages would not know the scale that the last one's loss needs", "--amp bf16"),
    Rule({"entrypoint": ("train_pp.py",), "fp8": ("te", "torchao")},
         "conversion of stages has no test yet", "--amp bf16, or train_fsdp.py"),
    Rule({"layout": ("tokens", "experts"), "fp8": ("te", "torchao")},
         "layers are converted to FP8 whole", "--amp bf16, or data parallelism alone"),
    Rule({"layout": ("experts",), "sac": ("op",)},
         "the policy cannot tell gathers of experts from what it keeps", "--sac-policy block"),
)
# fmt: on


def refusal(combination: Combination) -> Rule | None:
    """The first rule that refuses a combination; None if it is supported."""
    return next((rule for rule in RULES if rule.refuses(combination)), None)


def combination_of(args: Args, entrypoint: Script) -> Combination:
    """The cell that a run's arguments are in."""
    compiled = "off"
    if args.pt_compile:
        compiled = "graphs" if args.compile_mode in GRAPH_MODES else "on"
    return Combination(
        entrypoint=entrypoint,
        amp=args.amp,
        fp8=args.fp8_backend if args.use_fp8 else "off",
        compile=compiled,
        sac=args.sac_policy if args.sac_freq else "off",
        layout="experts" if args.ep > 1 else "tokens" if args.tp * args.cp > 1 else "data",
    )


def combinations_table() -> str:
    """The table of docs/COMBINATIONS.md: whether a combination works, and in which scripts."""
    columns = {"off": "eager", "on": "`--pt-compile`", "graphs": "with CUDA graphs"}
    lines = [f"| | {' | '.join(columns.values())} |", "|---|---|---|---|"]
    rows = [(amp, "off") for amp in AXES["amp"]] + [("bf16", fp8) for fp8 in ("te", "torchao")]
    for amp, fp8 in rows:
        name = f"`--amp {amp}`" if fp8 == "off" else f"`--use-fp8 --fp8-backend {fp8}`"
        cells = [_cell(amp, fp8, compiled) for compiled in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    reasons = [f"- {' + '.join(_flags(r))}: {r.reason}; use {r.instead}." for r in RULES]
    return "\n".join([*lines, "", *reasons])


def _cell(amp: str, fp8: str, compiled: str) -> str:
    names = {3: "✓", 2: "✓ without SAC op", 1: "✓ without SAC", 0: "✗"}
    parts = {}
    for script in Script:
        cells = [Combination(script, amp, fp8, compiled, sac) for sac in AXES["sac"]]
        works = sum(refusal(cell) is None for cell in cells)
        parts.setdefault(names[works], []).append(f"`{script}`")
    if len(parts) == 1:
        return next(iter(parts))
    return "; ".join(f"{what} in {', '.join(scripts)}" for what, scripts in parts.items())


def _flags(rule: Rule) -> list[str]:
    flags = {
        "entrypoint": lambda v: f"`{' '.join(v)}`",
        "amp": lambda v: f"`--amp {'|'.join(v)}`",
        "fp8": lambda v: "FP8" if len(v) == 2 else f"`--fp8-backend {v[0]}`",
        "compile": lambda v: (
            "`--pt-compile`" if "on" in v else f"`--compile-mode {'|'.join(GRAPH_MODES)}`"
        ),
        "sac": lambda v: "`--sac-freq`" if len(v) == 2 else f"`--sac-policy {v[0]}`",
        "layout": lambda v: "`--tp`, `--cp`, `--ep`" if len(v) == 2 else "`--ep`",
    }
    return [flags[axis](values) for axis, values in rule.when.items()]
