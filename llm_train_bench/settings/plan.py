"""The plan of a run: what flags, config and world mean together, resolved once. Needs no torch.

Every entrypoint, estimate.py and each cell of a sweep make it in one call. It refuses what does not
fit together. Where a device's memory is known, it notes what may not fit.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from llm_train_bench.base import machine
from llm_train_bench.base.documents import Packing, count_lengths, make_packing
from llm_train_bench.base.errors import DoesNotFit, UsageError
from llm_train_bench.base.machine import Platform
from llm_train_bench.formulas.memory_model import estimate_memory, largest_batch
from llm_train_bench.formulas.work import (
    Batch,
    Ddp,
    Fp8Work,
    FsdpOptions,
    Parallelism,
    Recompute,
    Work,
    alike,
    block_parameters,
)
from llm_train_bench.model.chunks import chunk_elements
from llm_train_bench.model.config import ModelConfig, load_config
from llm_train_bench.model.config_keys import TE_ACTIVATIONS
from llm_train_bench.model.json_files import FACTS
from llm_train_bench.model.options import AttentionKernel
from llm_train_bench.model.weights import Lora, adaptable, adapters
from llm_train_bench.settings.flags import (
    GRAPH_MODES,
    SHARDED,
    USUAL_STAGES,
    Args,
    BatchFlags,
    DataFlags,
    Fp8Flags,
    LoraFlags,
    OptimizerFlags,
    Script,
)
from llm_train_bench.settings.rules import broken_rule, check_sizes

LONGEST_DEFAULT = 4096
# Part of a device's memory that --bsz auto leaves free.
SPARE = 0.1
# Tracing is on this many steps before the first captured one: its start-up cost is over by then.
PROFILER_WARMUP = 2
# Steps of a resumed run that are not measured.
RESUME_WARMUP = 5
# Seconds after which a GPU's clocks are those of a long run.
GPU_WARMUP_S = 10.0
# Matmul operations of a micro batch from which `--linear auto` may take oneDNN.
LONG_STEP = 2e10
# Numbers in the 16 bytes that a grouped matmul loads at a time.
ROW_UNITS = {"off": 4, "bf16": 8, "fp16": 8}
# The parts of a block that are Transformer Engine's modules.
TE_MODULES = ("attn.qkv", "attn.out", "mlp")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The steps of a run: warm-up, the measured window, and those that a profiler captures."""

    warmup: int
    measured: int
    captured: range = range(0)
    start: int = 0
    """The first step: above 0 if the run resumes from a checkpoint."""
    profiler: Literal["torch", "nsys"] | None = None
    warmup_s: float = 0.0
    """Seconds of work before the window, in steps or beside them."""

    @property
    def window_begin(self) -> int:
        """The first measured step. A resumed process warms up anew: compiler, allocator, clocks."""
        return max(self.warmup, self.start + RESUME_WARMUP if self.start else 0)

    @property
    def window_end(self) -> int:
        """Steps until the measured window closes."""
        return self.warmup + self.measured

    @property
    def total(self) -> int:
        """All steps: until the window has closed and the capture has ended."""
        return max(self.window_end, self.captured.stop)

    @property
    def profiled(self) -> range:
        """The steps in which a profiler is on, warming up or capturing."""
        warmup = PROFILER_WARMUP if self.profiler == "torch" else 0
        return range(self.captured.start - warmup, self.captured.stop)

    def phase_of(self, step: int) -> str:
        """`warmup`, `resume`, `measure`, or `profile` for a step that is run only to be captured."""
        if step < self.warmup:
            return "warmup"
        if step < self.window_begin:
            return "resume"
        return "measure" if step < self.window_end else "profile"


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run, resolved. `args` has all groups of flags; a function takes the one that it needs."""

    script: Script
    args: Args
    platform: Platform
    work: Work
    schedule: Schedule
    packing: Packing | None = None
    """The documents that the training data are packed of."""
    notes: tuple[str, ...] = ()
    """What the record should say of how the plan was made."""

    def needs(self, work: Work) -> float:
        """Estimated bytes on each device, of the plan's `work` or of one with another batch."""
        memory = estimate_memory(work, fused_norm=self.platform != "cpu")
        return memory.peak if self.platform == "cpu" else memory.on_device(work.world)

    def within(self, memory_gib: float) -> "Plan":
        """This plan on devices of a memory, with a note where the estimate exceeds that of a GPU.

        DoesNotFit where the tokens of a micro batch are more than all memory.
        """
        if 8 * self.work.batch.micro_tokens > memory_gib * 2**30:
            raise DoesNotFit(
                f"already the token ids of a micro batch need more than {memory_gib:,.1f} GiB; use a "
                "smaller --bsz"
            )
        if self.platform == "cpu" or (need := self.needs(self.work) / 2**30) <= memory_gib:
            return self
        needs = f"this needs an estimated {need:,.1f} GiB, and the GPU has {memory_gib:,.1f}"
        note = f"memory may not suffice: {needs}; estimate.py suggests what would fit"
        return dataclasses.replace(self, notes=(*self.notes, note))

    @property
    def optimizer(self) -> OptimizerFlags | None:
        """The optimizer and its schedule; None where a step has none."""
        return self.args if self.work.pass_type == "step" else None


def make_plan(
    args: Args,
    script: Script,
    world: int = 1,
    platform: Platform = "nvidia",
    config: ModelConfig | None = None,
    memory_gib: float | None = None,
    native_amp: str | None = None,
) -> Plan:
    """Resolve checked arguments for `world` ranks on a platform.

    `config` is the model's, where it is read already; `memory_gib` is a device's memory, by which --bsz
    auto becomes a number (without it, 1), and the loss is cut into chunks; `native_amp` is the format of
    --amp auto, by default that of current GPUs, or of this machine's CPU. UsageError or ConfigError where
    the run could not work.
    """
    config = config or load_config(args.config, args.pad_vocab, args.layers)
    if args.bsz == "auto":

        def sized(bsz: int) -> Plan:
            small = dataclasses.replace(args, bsz=bsz)
            return make_plan(small, script, world, platform, config, memory_gib, native_amp)

        return sized(1) if memory_gib is None else largest_plan(sized, args.global_bsz, memory_gib)
    amp = resolve_amp(args, script, platform, native_amp)
    check_expert_rows(config, amp)
    schedule = make_schedule(args, platform)
    seq_len = resolve_seq_len(args.seq_len, config)
    parallelism = resolve_parallelism(args, script, config, seq_len, world)
    reduced = "bf16" if args.bf16_weights else args.reduce_dtype
    ddp = Ddp(args.bucket_cap_mb, reduced, args.zero1) if script is Script.DDP else None
    if args.cpu_offload and platform == "cpu":
        raise UsageError("--cpu-offload has no meaning on a CPU; leave it out")
    # The stages of a pipeline stay gathered over all micro batches of a step.
    reshard = args.reshard_after_forward == "always" and script is not Script.PP
    sharding = FsdpOptions(reshard, args.reduce_dtype, args.cpu_offload, args.reduce_last)
    fsdp = sharding if script in SHARDED else None
    batch = resolve_batch(args, seq_len, parallelism)
    batch, packing = pack_documents(args, batch, schedule)
    work = Work(
        config, batch, parallelism, amp=amp, ddp=ddp, fsdp=fsdp,
        pass_type=args.pass_type, tf32=args.tf32, optimizer=args.optimizer,
        bf16_weights=args.bf16_weights, offload=args.offload_activations,
        balanced=args.route == "balanced",
        chunk_elements=chunk_elements(None if platform == "cpu" else memory_gib),
        compile_mode=args.compile_mode if args.pt_compile else None,
        cuda_graphs=args.pt_compile and args.compile_mode in GRAPH_MODES and platform != "cpu",
        recompute=resolve_recompute(args.sac_freq, args.sac_policy, config))  # fmt: skip
    check_sizes(args, work)
    work = dataclasses.replace(
        work,
        attention=choose_attention_kernel(args.attention, work, platform),
        linear=resolve_linear(work, args.linear, platform),
        lora=resolve_lora(args, work),
        fp8=resolve_fp8_layers(args, work, platform),
    )
    slow = platform == "cpu" and amp in machine.MULTIPLY and not machine.cpu_multiplies(amp)
    use = "; use --amp auto" if args.amp == amp else ""
    notes = (f"{amp}: {machine.SLOW_FORMAT}{use}",) if slow else ()
    args = dataclasses.replace(args, amp=amp)
    plan = Plan(script, args, platform, work, schedule, packing, notes)
    return plan if memory_gib is None else plan.within(memory_gib)


def check_expert_rows(config: ModelConfig, amp: str) -> None:
    """UsageError where rows of experts do not fill the 16 bytes that grouped matmuls load."""
    e = config.experts
    if e is None or math.gcd(config.hidden_size, e.size, e.latent or 0) % ROW_UNITS[amp] == 0:
        return
    latent = f", latent size {e.latent}" if e.latent else ""
    raise UsageError(
        f"{config.path}: hidden size {config.hidden_size}{latent} and expert size {e.size} must be "
        f"multiples of {ROW_UNITS[amp]} under --amp {amp}; change the config, or use --amp off"
    )


def resolve_amp(args: Args, script: Script, platform: Platform, native: str | None) -> str:
    """The format that --amp means: for auto the device's `native` one, or fp32 where that is refused.

    Without `native` it is that of current GPUs, or of this machine's CPU. FP8 and Transformer Engine
    need bf16.
    """
    if args.amp != "auto":
        return args.amp
    has_bf16 = platform != "cpu" or machine.cpu_multiplies("bf16")
    formats = (native or ("bf16" if has_bf16 else "off"), "off", "bf16")
    if args.use_fp8 or args.linear == "te":
        formats = ("bf16", "off")
    elif args.linear == "onednn":
        formats = ("off", "bf16")
    choices = (dataclasses.replace(args, amp=name) for name in formats)
    return next((a.amp for a in choices if not broken_rule(a, script)), formats[0])


def largest_plan(sized: Callable[[int], Plan], global_bsz: int | None, memory_gib: float) -> Plan:
    """The plan with the largest micro batch that leaves a tenth of a device's memory.

    `sized(bsz)` makes a plan of one. With --global-bsz only micro batches that divide it count.
    DoesNotFit if not even 1 does.
    """
    limit = (1 - SPARE) * memory_gib * 2**30
    if global_bsz is None:
        one = sized(1)
        bsz = largest_batch(lambda n: one.needs(one.work.with_micro_batch(n)), limit)
    else:
        bsz = 0
        for n in (n for n in range(1, global_bsz + 1) if global_bsz % n == 0):
            with contextlib.suppress(UsageError):  # as of too few micro batches
                if (plan := sized(n)).needs(plan.work) <= limit:
                    bsz = n
    if not bsz:
        raise DoesNotFit(
            f"--bsz auto: the estimate says that not even 1 leaves a tenth of {memory_gib:,.1f} GiB; "
            "use more GPUs, --sac-freq 1/1 or a smaller --seq-len"
        )
    plan = sized(bsz)
    need = plan.needs(plan.work) / 2**30
    note = f"--bsz auto: {bsz}, which needs an estimated {need:,.1f} of {memory_gib:,.1f} GiB"
    return dataclasses.replace(plan, notes=(*plan.notes, note))


def make_schedule(args: Args, platform: Platform) -> Schedule:
    """The steps of a run; UsageError for a capture that cannot be."""
    warmup, measured = args.warmup_steps, args.n_steps
    captured, profiler = range(0), None
    if args.profile:
        first = warmup + measured + PROFILER_WARMUP
        captured, profiler = range(first, first + args.profile_steps), "torch"
    elif args.nsys_start is not None:
        captured, profiler = range(args.nsys_start, args.nsys_end or 0), "nsys"
        if platform == "cpu":
            raise UsageError("--nsys-start: Nsight Systems profiles GPUs; use --profile on a CPU")
    if args.export and args.init_from and (Path(args.init_from) / FACTS).exists():
        return Schedule(0, 0)  # only a conversion: nothing is trained
    warmup_s = args.warmup_seconds
    if warmup_s is None:
        warmup_s = GPU_WARMUP_S if platform != "cpu" else 0.0
    return Schedule(warmup, measured, captured, profiler=profiler, warmup_s=warmup_s)


def resolve_seq_len(seq_len: int | None, config: ModelConfig) -> int:
    """The run's sequence length; UsageError if it is beyond what the model allows."""
    longest = config.max_position_embeddings
    if seq_len is not None and seq_len > longest:
        raise UsageError(
            f"--seq-len {seq_len}: {config.path} allows at most {longest} positions"
            " (max_position_embeddings or n_positions)"
        )
    return seq_len or min(longest, LONGEST_DEFAULT)


def resolve_batch(flags: BatchFlags, seq_len: int, parallelism: Parallelism) -> Batch:
    """Global batch = micro batch x accumulation x ranks with data of their own, exactly.

    UsageError if --global-bsz does not divide.
    """
    bsz = 1 if flags.bsz == "auto" else flags.bsz
    ranks = parallelism.dp_replicate * parallelism.dp_shard
    micro, accumulation = bsz * ranks, flags.grad_acc_steps
    if parallelism.pp > 1 and accumulation == 1:
        accumulation = 2 * parallelism.pp  # one would leave ranks idle
    if flags.global_bsz is not None:
        accumulation, rest = divmod(flags.global_bsz, micro)
        if rest or not accumulation:
            below = flags.global_bsz // micro * micro
            nearest = " or ".join(str(n) for n in (below, below + micro) if n)
            raise UsageError(
                f"--global-bsz {flags.global_bsz} is not a multiple of --bsz {bsz} x "
                f"{ranks} ranks = {micro}; {nearest} would be"
            )
    size = micro * accumulation
    return Batch(bsz, accumulation, ranks, size, seq_len, size * seq_len)


def pack_documents(
    flags: DataFlags, batch: Batch, schedule: Schedule
) -> tuple[Batch, Packing | None]:
    """With --pack the batch with its documents' lengths in the measured steps, and these documents."""
    if not flags.pack:
        return batch, None
    more = flags.pack_lengths, flags.pack_separator
    packing = make_packing(flags.data, flags.data_dtype, batch.seq_len, flags.seed, *more)
    size = batch.global_batch
    measured = range(schedule.window_begin * size, max(1, schedule.window_end) * size)
    lengths = count_lengths(packing, measured)
    if max(length for length, _ in lengths) < 2:
        source = "--pack-lengths" if flags.data == "synthetic" else f"--data {flags.data}"
        raise UsageError(f"{source}: documents of one token have no label; use longer ones")
    return dataclasses.replace(batch, documents=lengths), packing


def resolve_recompute(freq: str | None, policy: str, config: ModelConfig) -> Recompute:
    """Blocks that --sac-freq q/p chooses, spread evenly: 1/2 every second, from the second on.

    UsageError where it would choose none.
    """
    if freq is None:
        return Recompute()
    match, n = re.fullmatch(r"(\d+)/(\d+)", freq), config.num_hidden_layers
    q, p = map(int, match.groups()) if match else (0, 0)
    if not 0 < q <= p:
        raise UsageError(
            f"--sac-freq {freq}: must be two whole numbers q/p with 0 < q <= p, as in 1/4: q of every p "
            "blocks; leave the flag out for none"
        )
    blocks = tuple(i for i in range(n) if (i + 1) * q // p > i * q // p)
    if not blocks:
        raise UsageError(
            f"--sac-freq {freq} recomputes no block: {config.path} has only {n} of them; "
            f"1/{n} recomputes one"
        )
    return Recompute(blocks, policy)


def resolve_parallelism(
    args: Args, script: Script, config: ModelConfig, seq_len: int, world: int
) -> Parallelism:
    """The ranks' shares of layers, tokens, heads and experts; UsageError where sizes do not divide."""
    if script not in SHARDED:
        return Parallelism(dp_replicate=world)
    tp, cp, ep = args.tp, args.cp, args.ep
    pp = (args.pp or USUAL_STAGES) if script is Script.PP else 1
    _must_divide("--pp", pp, f"{world} ranks", world, least=2)
    _must_divide("--dp-replicate", args.dp_replicate, f"{world // pp} ranks", world // pp)
    shards = world // pp // args.dp_replicate
    replica = f"the {shards} ranks of a replica"
    if ep > 1 and "experts" not in config.parts:
        raise UsageError(f"--ep {ep}: {config.path} has no experts; leave it out")
    r = config.recurrent if "recurrent" in config.parts else None
    if r and not r.delta and r.norm_groups % tp:
        raise UsageError(
            f"--tp {tp}: {config.path} has norms of a state's outputs that span {r.norm_groups} parts of "
            "all heads; use --cp"
        )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = [heads, kv_heads]
    sizes += [config.intermediate_size] if "dense" in config.parts else []
    sizes += [r.groups, r.heads] if r else []
    experts = config.experts
    sizes += [experts.shared_size] if experts and experts.shared_size else []
    parts = "heads, key/value heads and MLP" if not config.latent else "heads and MLP"
    _must_divide("--tp", tp, f"{parts} of {config.path} ({', '.join(map(str, sizes))})", *sizes)
    _must_divide("--tp x --cp", tp * cp, replica, shards)
    _must_divide("--tp x --cp", tp * cp, f"--seq-len {seq_len}", seq_len)
    if experts:
        _must_divide("--ep", ep, f"{experts.number} experts", experts.number)
    _must_divide("--ep", ep, replica, shards)
    ulysses = heads // tp % cp == 0 and kv_heads // tp % cp == 0
    if r and cp > 1:
        groups = r.groups // tp
        even = r.heads // tp % cp == 0 and 0 in (groups % cp, cp % groups)
        if not (even and ulysses):
            raise UsageError(
                f"--cp {cp}: {config.path} has layers with states, whose heads must divide over --tp x "
                f"--cp ({heads}, of keys and values {kv_heads}, of states {r.heads}); use a smaller --cp"
            )
    if not ulysses:
        _must_divide("twice --cp", 2 * cp, f"--seq-len {seq_len}", seq_len)
    dp_shard, stages = shards // (tp * cp), (args.pp_virtual, args.pp_layers)
    return Parallelism(args.dp_replicate, dp_shard, cp, tp, ep, pp, *stages, ulysses)


def _must_divide(flag: str, value: int, what: str, *sizes: int, least: int = 1) -> None:
    greatest = math.gcd(*sizes)
    if greatest % value:
        possible = [str(n) for n in range(least, greatest + 1) if greatest % n == 0]
        raise UsageError(
            f"{flag} {value} does not divide {what}; {', '.join(possible) or 'nothing'} would"
        )


def choose_attention_kernel(name: str, work: Work, platform: Platform) -> AttentionKernel:
    """The kernels that --attention means for a step; UsageError for what cannot serve.

    `auto` becomes `blocks` for short samples on a CPU: there the kept probabilities are at most a third
    of what else a block keeps.
    """
    config, on_cpu = work.config, platform == "cpu"
    special = "sliding windows, sinks, --pack and keys gathered by --cp"
    cut = work.windowed or bool(work.batch.documents)
    can_flex = cut and not config.sinks and not work.by_tokens
    can_blocks = on_cpu and not work.masked and not config.attention_dropout
    why = ""
    if name == "flex" and on_cpu and work.trains:
        why = "FlexAttention works on a CPU only under --pass-type forward"
    elif name == "flex" and not can_flex:
        why = "it is for sliding windows and --pack, without sinks and keys gathered by --cp"
    elif name == "blocks" and not can_blocks:
        why = f"works only on a CPU, and without attention_dropout, {special}"
    elif name in ("cudnn", "efficient", "math") and work.masked:
        why = f"{special} have kernels of their own"
    if why:
        raise UsageError(f"--attention {name}: {why}; use --attention auto")
    if work.masked and config.attention_dropout:
        raise UsageError(
            f"{config.path}: attention_dropout {config.attention_dropout} does not work with {special}; "
            "set it to 0"
        )
    short = work.batch.seq_len * work.matmul_bytes <= 2048
    in_flex = can_flex and (name == "flex" or (name == "auto" and not on_cpu))
    causal = "blocks" if name == "auto" and can_blocks and short else name
    return AttentionKernel(causal, "flex" if in_flex else "pieces")


def resolve_linear(work: Work, name: str, platform: Platform) -> str | None:
    """`te`, `plain` or `onednn`; None where there is no choice.

    `auto` is oneDNN in long steps on AMD's CPUs: PyTorch takes MKL, which is half as fast there
    (docs/LAB.md). UsageError where the library asked for cannot serve.
    """
    if name == "te":
        refuse_te(work.config, "--linear te")
        if work.config.activation not in TE_ACTIVATIONS:
            raise UsageError(f"--linear te: Transformer Engine has no {work.config.activation}")
        return name
    able = platform == "cpu" and work.amp == "off" and work.parallelism.tp == 1
    if name == "onednn" and not able:
        raise UsageError(
            "--linear onednn: is for fp32 on a CPU, without --tp; use --device cpu --amp off"
        )
    if name == "auto":
        operations = 6 * sum(block_parameters(work.config)) * work.batch.micro_tokens
        name = "onednn" if operations > LONG_STEP and machine.made_by_amd() else "plain"
    return name if able else None


def refuse_te(config: ModelConfig, flag: str, te: bool = True) -> None:
    """UsageError for what FP8 libraries, or (`te`) Transformer Engine's modules, have no layers for."""
    states = "recurrent" in config.parts
    parts = {
        "layers with states": states,
        "experts": te and config.experts,
        "latent attention": te and config.latent,
        "norms after its layers": te and any(layer.post_norm for layer in config.layers),
        "norms of 1 + weight": te and config.norm_offset,
        "a gate of attention's output": te and config.output_gate,
    }
    if part := next((part for part, has in parts.items() if has), None):
        torchao_can = flag == "--use-fp8" and not states
        advice = "use --fp8-backend torchao" if torchao_can else "leave it out"
        raise UsageError(f"{flag}: {config.path} has {part}, which it cannot replace; {advice}")


def resolve_lora(flags: LoraFlags, work: Work) -> Lora | None:
    """The adapters, if any; UsageError for a family that cannot have them, and for unknown targets."""
    if (rank := flags.lora_rank) is None:
        return None
    config = work.config
    if config.model_type == "gpt2" or config.output_gate or config.recurrent:
        raise UsageError(
            f"--lora-rank: is not implemented for {config.model_type}, whose rows have another order in "
            "Hugging Face's files"
        )
    targets = frozenset(flags.lora_targets.split(","))
    known = {hf.linear for weight in adaptable(config) for hf in weight.hf}
    if unknown := targets - known - {"all"}:
        raise UsageError(
            f"--lora-targets {min(unknown)!r}: there are all, {', '.join(sorted(known))}"
        )
    base_bytes = 2 if work.amp == "bf16" else 4
    added = tuple(adapters(config, targets, rank))
    return Lora(rank, flags.lora_alpha or 2.0 * rank, base_bytes, added)


def resolve_fp8_layers(flags: Fp8Flags, work: Work, platform: Platform) -> Fp8Work | None:
    """The linear layers of a block that run in FP8, if any; UsageError where sizes do not allow it."""
    if not flags.use_fp8:
        return None
    config, recipe = work.config, flags.fp8_recipe
    te = flags.fp8_backend == "te"
    refuse_te(config, "--use-fp8", te)
    multiple = 16
    if recipe == "mxfp8":  # a scale per 32 numbers; hipBLASLt's matmuls sum over multiples of 128
        multiple = 128 if platform == "amd" else 32
    # The weight's gradient is summed over a rank's tokens; if not in FP8, their number need not divide.
    tokens = work.own_tokens if config.latent or config.experts else work.gathered_tokens
    if tokens % multiple and recipe != "rowwise_with_gw_hp":
        raise UsageError(
            f"--use-fp8 with {recipe}: --bsz x --seq-len = {tokens} tokens of a rank is not a multiple "
            f"of {multiple}; change either"
        )
    every = (weight for i, *_ in alike(work, work.layers) for weight in config.matrices[i])
    # (out, in) of a rank's part of a layer, or of one expert.
    shapes = {w.module: w.shard(work.parallelism).sizes[-2:] for w in every if not w.stays_exact}
    modules = {name: [name] for name in shapes}
    if te:  # its modules stand for one or more linear layers
        modules = {
            name: [x for x in shapes if f"{x}.".startswith(f"{name}.")] for name in TE_MODULES
        }
    unfit = {}
    for name, group in modules.items():
        n, k = shapes[group[-1]]
        if n % multiple or k % multiple:
            unfit[name] = f"{k} x {n} is not in multiples of {multiple}"
    if te and config.activation not in TE_ACTIVATIONS:
        unfit["mlp"] = f"Transformer Engine has no {config.activation}"
    if unfit.keys() == modules.keys():
        why = "; ".join(f"{name}: {reason}" for name, reason in unfit.items())
        raise UsageError(
            f"--use-fp8: no layer of {config.path} can run in FP8: {why}; leave it out"
        )
    layers = tuple(layer for name in modules if name not in unfit for layer in modules[name])
    for layer in layers if flags.fp8_all_gather else ():
        if shapes[layer][0] % work.parallelism.shards:
            raise UsageError(
                f"--fp8-all-gather: {shapes[layer][0]} rows of blocks.0.{layer} do not divide "
                f"over {work.parallelism.shards} ranks; leave it out"
            )
    kept = "embeddings, attention" if te else "embeddings, norms, attention"
    always = {"head": "always", kept: "no linear layers"}
    if config.experts:
        always["router"] = "always"
    return Fp8Work(
        flags.fp8_backend,
        recipe,
        emulated=flags.fp8_emulate,
        all_gather=flags.fp8_all_gather,
        layers=layers,
        high_precision=always | {f"blocks.*.{name}": why for name, why in unfit.items()},
    )
