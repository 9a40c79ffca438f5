"""Runs as one file that may leave the machine, and that others can check. Needs no torch.

The file holds results and their steps. All that can be derived is derived (`canonical`): --share writes
it, and --verify refuses a file that differs. What remains are times, losses, readings of sensors, the
model's config, flags and versions. Texts are versions and words of known kinds.
"""

import datetime
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from llm_train_bench.base.errors import UsageError, printable_data
from llm_train_bench.base.files import SECRET, write_whole
from llm_train_bench.base.hardware import find_peaks, name_of_part
from llm_train_bench.base.strict import Strict, first_problem
from llm_train_bench.check.references import plan_of_result
from llm_train_bench.check.workloads import model_hash
from llm_train_bench.formulas.flops import flops_per_token
from llm_train_bench.formulas.parameters import count_parameters, linear_parameters
from llm_train_bench.model.config import ModelConfig, parse_config
from llm_train_bench.model.json_keys import CONFIGS, ConfigError, parse_json, plain_file
from llm_train_bench.results.figures import (
    describe_fp8,
    fill_device_metrics,
    fill_flop_metrics,
    fill_flop_rates,
    fill_step_metrics,
)
from llm_train_bench.results.metrics import Metrics
from llm_train_bench.results.result_files import Step, read_result, read_steps, storable
from llm_train_bench.results.schema import (
    Device,
    Lineage,
    ModelInfo,
    Result,
    StepSize,
    Writer,
)
from llm_train_bench.settings.flags import OUTPUT, Args, defaults, of_kind, to_argv
from llm_train_bench.settings.run_file import result_flags
from llm_train_bench.trace.observed import Observed

FORMAT, VERSION = "llm-train-bench shared result", 1
# Bounds of a file: bytes, runs, steps of each, devices; characters of a text, and items of a list.
MOST_BYTES, MOST_RUNS, MOST_STEPS, MOST_DEVICES = 8 * 2**20, 20, 20_000, 100_000
LONGEST_TEXT, LONGEST_LIST = 400, 20_000
EXACT = 1e-6
# A version, or a few plain words: no path, no mail address, and no key that is long.
WORD = re.compile(r"(?![0-9a-zA-Z]{24})[\w.+:, =()-]{0,80}", re.ASCII)
DEVICE_NAME = re.compile(r"(?=.*[A-Za-z])[\w.+,@()/ -]{2,120}", re.ASCII)
# Values of variables: switches, numbers, versions, NCCL's constants, and key:value of an allocator.
SETTING = re.compile(
    r"true|false|on|off|\d{1,6}|\d{1,3}(?:\.\d{1,4}){1,2}(?:[-+]\d{1,3}|[a-z])?|"
    r"WARN|INFO|VERSION|RING|TREE|SIMPLE|LL|LL128|SYS|PIX|PXB|PHB|NVL|LOC|ACTIVE|PASSIVE|"
    r"(?:[a-z_]{2,40}:(?:True|False|[\d.]{1,8}),?){1,4}",
    re.ASCII,
)
# Variables whose values name hosts, devices of a network, jobs or places.
PLACES = re.compile(r"IFNAME|JOB_ID|FILE|PATH|DIR|HOME|HOST|ADDR|PORT|HCA|(^|_)PW($|_)")
# Readings that nothing in the file gives.
READ_METRICS = (
    "peak_allocated_gib peak_reserved_gib peak_rss_gib allocator_retries other_cpu_fraction "
    "stolen_cpu_fraction repeated_steps ep_capacity_needed"
).split()
COMPILED_METRICS = "compile_s n_compiled_graphs n_graph_breaks n_recompilations".split()
# Facts of the environment by their kinds.
TEXTS = ("os", "python", "cpu", "cuda", "hip", "nccl", "driver")
NUMBERS = ("cpu_count", "torch_threads", "cudnn")
# Keys of configs whose values are words.
TEXT_KEYS = frozenset(
    "model_type hidden_act hidden_activation activation_function rope_type type layer_types "
    "scoring_func topk_method position_embedding_type arch_name".split()
)


class Refused(Exception):
    """A file that contradicts itself or what is known; the message says where."""


STEP_OF_A_FILE = TypeAdapter(Step)


class SharedRun(Strict):
    """A result with its steps."""

    result: Result
    steps: list[Step] = Field(max_length=MOST_STEPS)


class SharedFile(Strict):
    """One file: a run, or repeats of one."""

    format: Literal["llm-train-bench shared result"] = FORMAT
    schema_version: Literal[1] = VERSION
    runs: list[SharedRun] = Field(min_length=1, max_length=MOST_RUNS)


def word(text: Any) -> str | None:
    """The text if it is a plain word that may leave the machine, else None."""
    fits = isinstance(text, str) and WORD.fullmatch(text) and not SECRET.search(text)
    return text if fits else None


def canonical(run: SharedRun) -> Result:
    """The result that follows from a run's readings and steps; Refused where there is none.

    Idempotent: the result of a canonical run is itself.
    """
    r = run.result
    if not 1 <= r.device.count <= MOST_DEVICES:
        raise Refused(f"device.count is {r.device.count}")
    config, model = _model(r)
    number = re.fullmatch(r"[0-9a-f]{8,32}", r.lineage.id)
    began = moment(r.started_at)
    if began is None or moment(r.ended_at) is None or number is None:
        raise Refused("started_at, ended_at or lineage.id is none")
    clean = r.model_copy(
        deep=True,
        update={
            "notes": [],
            "unfit_reasons": [],
            "error": None,
            "writer": Writer(host="", pid=0),
            "lineage": Lineage(
                id=r.lineage.id, name=model.name, attempt=0, began=began, started=began
            ),
            "run_name": model.name,
            "version": word(r.version) or "unknown",
            "entrypoint": r.entrypoint if r.ours else "Meter",
            "args": _args(r, model.name),
            "model": model,
            "device": _device(r),
            "attention_kernel": word(r.attention_kernel),
            "linear": word(r.linear),
            "environment": _environment(r.environment),
            "devices": [
                u.model_copy(
                    update={"throttled": {k: v for k, v in u.throttled.items() if word(k)}}
                    if u.throttled is not None
                    else {}
                )
                for u in r.devices
            ],
            "observed": _observed(r.observed),
            "ranks": [],
            "memory": None,
            "profile": None,
            "loss_known": r.loss_known or r.ours,
        },
    )
    clean.metrics = Metrics(**{name: getattr(r.metrics, name) for name in READ_METRICS})
    m = clean.metrics
    m.energy_source = word(r.metrics.energy_source)
    phases = {name: [s for s in run.steps if s.phase == name] for name in ("warmup", "measure")}
    if r.device.count == 1:
        clean.step_times_s = []  # of several ranks they are the slowest's
    plan = None
    if r.ours:
        plan = plan_of_result(
            clean, "cpu" if r.device.type == "cpu" else "nvidia", r.device.memory_gib
        )
        clean.batch = StepSize(**{k: getattr(plan.work.batch, k) for k in StepSize.model_fields})
        size = clean.batch
        clean.args |= {"bsz": size.micro_batch, "grad_acc_steps": size.grad_acc_steps}
        clean.args |= {"seq_len": size.seq_len}
        version = word(r.fp8.version if r.fp8 else "") or "unknown"
        clean.fp8 = describe_fp8(plan.work.fp8, config, version) if plan.work.fp8 else None
        clean.command = [r.entrypoint, *_words(clean.args)]
        if plan.work.compiled:
            m.window_compile_s = 0.0
            for name in COMPILED_METRICS:
                setattr(m, name, getattr(r.metrics, name))
    else:
        clean.fp8, clean.command = None, []
    fill_device_metrics(clean, clean.devices)
    fill_step_metrics(clean, phases["warmup"], phases["measure"])
    if plan:
        fill_flop_metrics(clean, plan.work)
    elif config and r.batch.seq_len:
        palm, causal = (
            flops_per_token(config, r.batch.seq_len, masked) for masked in (False, True)
        )
        fill_flop_rates(clean, palm, causal)
    if m.tokens_per_sec and clean.batch.seq_len:
        m.samples_per_sec = m.tokens_per_sec / clean.batch.seq_len
    if m.peak_reserved_gib and clean.device.memory_gib:
        m.memory_utilization = m.peak_reserved_gib / clean.device.memory_gib
    clean.notes = []
    return clean


def moment(text: str | None) -> float | None:
    """An ISO time with its zone, in seconds since 1970; None for anything else."""
    try:
        when = datetime.datetime.fromisoformat(text or "")
        return when.timestamp() if when.tzinfo else None
    except (ValueError, OverflowError):
        return None


def _model(r: Result) -> tuple[ModelConfig | None, ModelInfo]:
    """The config without what does not describe the model, and what follows from it."""
    if not r.model.config:
        if r.ours:
            raise Refused("model.config is missing")
        return None, ModelInfo(name="unknown", hash="0" * 16)
    pad = r.args.get("pad_vocab") if r.ours else 1
    config = parse_config(r.model.config, "config.json", pad if isinstance(pad, int) else 1)
    unknown = set(config.unknown_keys)
    raw = {k: v for k, v in r.model.config.items() if k not in unknown and not _private(k, v)}
    name = f"{config.model_type}-{config.hash[:8]}"
    shipped = CONFIGS / f"{r.model.name}.json"
    if re.fullmatch(r"[\w.-]+", r.model.name) and shipped.exists():
        name = shipped.stem if model_hash(str(shipped)) == config.hash else name
    config = parse_config(raw, f"configs/{name}.json", config.vocab_multiple)
    if r.ours and (factor := r.args.get("mtp")) is not None:
        config = config.with_mtp(float(factor))
    return config, ModelInfo(
        name=name,
        path=config.path,
        hash=config.hash,
        n_parameters=count_parameters(config),
        n_matmul_parameters=sum(linear_parameters(config).values()),
        shape=storable(json.loads(json.dumps(config.shape()))),
        config=raw,
    )


def _private(key: str, value: Any) -> bool:
    """Whether a key of a config may say more than the model's shape; few keys have texts."""
    if isinstance(value, dict):
        return any(_private(k, v) for k, v in value.items())
    if isinstance(value, list):
        return any(_private(key, v) for v in value)
    text = isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9_.]{1,40}", value)
    text = text or (isinstance(value, str) and key not in TEXT_KEYS)
    return key.startswith("_") or not re.fullmatch(r"\w{1,60}", key, re.ASCII) or text


# Flags that the first shared results do not have; a later one may leave them out at their defaults.
LATER_FLAGS = frozenset(
    """pack pack_lengths pack_separator offload_activations lora_rank lora_alpha lora_targets
    lora_base mtp bf16_weights pp_layers pp_schedule ep_capacity""".split()
)


def _args(r: Result, model: str) -> dict[str, Any]:
    """The flags; those that only say where something is written have their defaults."""
    if not r.ours:
        names = [
            k for k in r.args if re.fullmatch(r"\w{1,40}", k, re.ASCII) and not SECRET.search(k)
        ]
        plain = {k: r.args[k] for k in names}
        return {k: (v if re.fullmatch(r"[A-Za-z]\w{0,23}", v, re.ASCII) else None)
                if isinstance(v, str) else v for k, v in plain.items()
                if v is None or isinstance(v, str | int | float)}  # fmt: skip
    args = dict(defaults(Args))
    for name in args.keys() - of_kind(OUTPUT):
        if name in LATER_FLAGS and name not in r.args:
            del args[name]
            continue
        if name not in r.args:
            raise Refused(f"args.{name} is missing")
        if name in ("pack", "lora_rank") and r.args[name]:
            raise Refused(f"args.{name}: its FLOPs cannot be derived from the file")
        args[name] = r.args[name]
    args |= {name: "file" for name in ("data", "val_data", "init_from") if args[name] not in
             ("synthetic", None)}  # fmt: skip
    args["config"] = f"configs/{model}.json"
    args |= {"device": r.device.type, "peak_tflops": r.args.get("peak_tflops")}
    if not isinstance(args["bsz"], int):
        raise Refused(f"args.bsz is {str(args['bsz'])[:40]}, and a run's is a number")
    for name, value in args.items():
        value = list(value) if isinstance(value, tuple) else value
        if (
            isinstance(value, str)
            and name != "config"
            and not re.fullmatch(r"[\w/.-]{1,40}", value)
        ):
            raise Refused(f"args.{name} is {value[:40]!r}")
        args[name] = value
    return args


def _words(args: dict[str, Any]) -> list[str]:
    """The command line that repeats a run with these arguments."""
    flags = result_flags(args)
    return [str(flags.pop("config")), *to_argv(flags)]


def _device(r: Result) -> Device:
    """The device with what this project lists of it; a user's own peak stays marked as such."""
    d = r.device
    if not DEVICE_NAME.fullmatch(d.name):
        raise Refused(f"device.name is {d.name[:60]!r}, which no driver says")
    part = name_of_part(d.name, d.memory_gib) if d.type == "cuda" else d.name
    own = r.args.get("peak_tflops")
    peaks = find_peaks(part, own if isinstance(own, int | float) else None)
    if d.type == "cpu" and not own:  # a CPU's own measurement is no listed peak
        peaks = find_peaks("")
    return Device(
        type=d.type,
        name=d.name,
        memory_gib=d.memory_gib,
        count=d.count,
        hardware=(peaks.name or part) if d.type == "cuda" else part,
        peak_bf16_tflops=peaks.bf16_tflops,
        peak_fp8_tflops=peaks.fp8_tflops,
        peak_fp4_tflops=peaks.fp4_tflops,
        peak_source=peaks.source,
    )


def _environment(e: dict[str, Any]) -> dict[str, Any]:
    """Versions and facts that a speed can depend on, each of its kind."""
    found: dict[str, Any] = {name: word(e.get(name)) for name in TEXTS}
    if isinstance(cpu := e.get("cpu"), str) and DEVICE_NAME.fullmatch(cpu):
        found["cpu"] = cpu  # its vendor's text
    found |= {n: v if isinstance(v := e.get(n), int) and 0 <= v < 2**31 else None for n in NUMBERS}
    found["tf32"] = bool(e.get("tf32"))
    parts = {name: e.get(name) for name in ("libraries", "settings", "image", "numa")}
    parts = {name: value if isinstance(value, dict) else {} for name, value in parts.items()}
    if len(parts["libraries"]) > 50 or len(parts["settings"]) > 200:
        raise Refused("environment has more libraries or settings than a run tells")
    found["libraries"] = {str(k): word(v) for k, v in parts["libraries"].items() if word(k)}
    found["settings"] = {
        str(k): v
        for k, v in parts["settings"].items()
        if word(k) and not SECRET.search(k) and not PLACES.search(k)
        and isinstance(v, str) and SETTING.fullmatch(v)
    }  # fmt: skip
    nodes, balancing = (parts["numa"].get(k) for k in ("nodes", "balancing"))
    found["numa"] = {"nodes": nodes if isinstance(nodes, int) else None,
                     "balancing": balancing if isinstance(balancing, bool) else None}  # fmt: skip
    digest = str(parts["image"].get("digest"))
    found["image"] = {"digest": digest} if re.fullmatch(r"sha256:[0-9a-f]{64}", digest) else None
    sha = str(e.get("git_sha"))
    found["git_sha"] = sha if re.fullmatch(r"[0-9a-f]{7,40}", sha) else None
    found["git_dirty"] = e.get("git_dirty") if isinstance(e.get("git_dirty"), bool) else None
    diff = str(e.get("git_diff"))
    return found | ({"git_diff": diff} if re.fullmatch(r"[0-9a-f]{10}", diff) else {})


def _observed(o: Observed | None) -> Observed | None:
    """Kernels by their names; how long each took is not shared."""
    if o is None:
        return None
    attention = {k: [w for w in names if word(w)] for k, names in o.attention.items() if word(k)}
    matmuls = {k: v for k, v in o.matmuls.items() if word(k)}
    fallbacks = [text for text in o.fallbacks if re.fullmatch(r"[\w ():,.>+-]{1,120}", text)]
    return Observed(attention=attention, matmuls=matmuls, fallbacks=fallbacks)


def share(runs: Iterable[Path], to: Path) -> list[str]:
    """Write a file of runs' directories or result.json files; returns the names of what was left out."""
    shared, left_out = [], set()
    for run in runs:
        one, changed = _shared_run(run)
        shared.append(one)
        left_out |= changed
    try:
        content = SharedFile(runs=shared).model_dump(mode="json")
    except ValidationError as error:
        raise UsageError(f"--share: {first_problem(error)}") from None
    if to.name in ("result.json", "steps.jsonl"):
        raise UsageError(f"--share {to}: would replace a run's own file; use another name")
    write_whole(to, json.dumps(storable(content), indent=1, allow_nan=False) + "\n")
    return sorted(left_out)


def _shared_run(run: Path) -> tuple[SharedRun, set[str]]:
    """A run as it may be shared, and dotted names of what was left out or changed."""
    path = run / "result.json" if run.is_dir() else run
    try:
        r = read_result(path)
    except OSError as error:
        raise UsageError(f"--share: {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        why = first_problem(error) if isinstance(error, ValidationError) else "not a result.json"
        raise UsageError(f"--share: {path}: {why}") from None
    m, why, steps = r.metrics, "", read_steps(path.with_name("steps.jsonl"))
    if r.status != "ok":
        why = f"the run's status is {r.status}; share a finished run"
    elif r.resumed_from:
        why = "the run was resumed; share one that has all of its steps"
    elif spoilt := [
        mark for mark in r.unfit if "window" in mark or mark in ("profiled", *r.unfit_reasons)
    ]:
        why = f"its window was disturbed ({'; '.join(spoilt)}); share an undisturbed run"
    elif r.observed and r.observed.mismatches:
        why = f"{r.observed.mismatches[0]}; share a run of what was asked for"
    elif m.final_loss is None and r.loss_known:
        why = "its loss is not finite; share a run that learns"
    elif not steps:
        why = "its steps.jsonl is not there or empty; both are needed"
    if why:
        raise UsageError(f"--share: {path}: {why}")
    steps = [{k: v for k, v in step.items() if k != "saved"} for step in steps
             if step.get("phase") != "profile"]  # fmt: skip
    try:
        one = SharedRun.model_validate({"result": r, "steps": steps})
        one = SharedRun(result=canonical(one), steps=one.steps)
    except ValidationError as error:
        raise UsageError(f"--share: {path}: {first_problem(error)}") from None
    except (Refused, ConfigError) as error:
        raise UsageError(f"--share: {path}: {error}") from None
    before, after = (x.model_dump(mode="json") for x in (r, one.result))
    return one, set(changed_paths(before, after))


def changed_paths(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Dotted names of what differs; the items of a list share a name."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from changed_paths(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for a, b in zip(before, after, strict=True):
            yield from changed_paths(a, b, path)
    elif before != after and not _close(before, after):
        yield path


def _close(a: Any, b: Any) -> bool:
    """Whether two numbers are the same but for a library's rounding of sums and percentiles."""
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return numbers and math.isclose(a, b, rel_tol=EXACT, abs_tol=1e-12)


def read_shared(path: Path) -> SharedFile:
    """A shared file; UsageError if it is none. Its size and depth are bounded before it is parsed."""
    try:
        with plain_file(path).open("rb") as f:
            data = f.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise UsageError(f"{path}: is larger than {MOST_BYTES / 2**20:.0f} MiB")
    try:
        content = parse_json(data)  # its depth
        content = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not usable JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{path}: is no shared result; compare.py RUN --share FILE.json makes one")
    if type(content.get("schema_version")) is not int:
        raise UsageError(f"{path}: schema_version: must be {VERSION}")
    if where := next(_strange(content), None):
        raise UsageError(f"{path}: {where}")
    try:
        # A step at a time first: a million errors of one file would take minutes.
        runs = content.get("runs")
        for run in runs[:MOST_RUNS] if isinstance(runs, list) else ():
            steps = run.get("steps") if isinstance(run, dict) else None
            for step in steps if isinstance(steps, list) else ():
                STEP_OF_A_FILE.validate_json(json.dumps(step), strict=True)
        return SharedFile.model_validate_json(json.dumps(printable_data(content)), strict=True)
    except ValidationError as error:
        raise UsageError(f"{path}: {first_problem(error)}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; ValueError for one that has a key twice."""
    if len(content := dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return content


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number that a run has")


def _strange(value: Any, path: str = "") -> Iterator[str]:
    """Where data has numbers that no run has, or texts and lists that are too long."""
    if isinstance(value, dict):
        if len(value) > 2000 or any(len(key) > 200 for key in value):
            yield f"{path}: an object has more than 2,000 keys, or a key more than 200 characters"
        for key, inner in value.items():
            yield from _strange(inner, f"{path}.{key}".lstrip(".")[:LONGEST_TEXT])
    elif isinstance(value, list):
        most = LONGEST_LIST if not isinstance(value[:1] and value[0], str) else 200
        if len(value) > most:
            yield f"{path}: the list has more than {most:,} items"
        for inner in value:
            yield from _strange(inner, path)
    elif isinstance(value, float | int) and not -1e300 < value < 1e300:
        yield f"{path}: {str(value)[:40]} is no number that a run has"
    elif isinstance(value, str) and len(value) > LONGEST_TEXT:
        yield f"{path}: the text has more than {LONGEST_TEXT} characters"


def folder_of(hardware: str) -> str:
    """The folder of results/ for a device's name: letters, digits and dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", hardware.lower()).strip("-.")[:80] or "unknown"
