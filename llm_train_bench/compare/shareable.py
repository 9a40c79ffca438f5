"""What of a result may leave the machine: numbers, words of known kinds, versions. Needs no torch.

No path, host, user name or secret. What must tell two settings apart is a digest.
"""

import hashlib
import re
from typing import Any

from llm_train_bench.base.redaction import SECRET
from llm_train_bench.model.json_files import shipped_config
from llm_train_bench.results.schema import Attempt, Result, Writer
from llm_train_bench.settings.flags import (
    OUTPUT,
    REMOVED,
    Args,
    declared,
    defaults,
    of_kind,
    to_argv,
)
from llm_train_bench.settings.run_file import result_flags
from llm_train_bench.trace.observed import Observed

# A version, or a few plain words: no path, no mail address, no long key, and no name of a host.
WORD = re.compile(
    r"(?![0-9a-zA-Z]{24})(?!.*[A-Za-z][\w-]*\.[A-Za-z]{2,})[\w.+:, =()-]{0,80}", re.ASCII)  # fmt: skip
DEVICE_NAME = re.compile(r"[\w.+,@()/ -]{2,120}", re.ASCII)
# Values of variables: switches, numbers, versions, NCCL's constants, and key:value of an allocator.
VARIABLE = re.compile(
    r"true|false|on|off|\d{1,6}(\.\d{1,4}){0,2}|WARN|INFO|Ring|Tree|RING|TREE|SIMPLE|LL|LL128|"
    r"SYS|PIX|PXB|PHB|NVL|LOC|ACTIVE|PASSIVE|"
    r"([a-z_]{2,40}:(True|False|[\d.]{1,8}),?){1,4}", re.ASCII)  # fmt: skip
# Variables whose values name hosts, devices of a network, jobs or places.
PLACES = re.compile(r"IFNAME|JOB_ID|FILE|PATH|DIR|HOME|HOST|ADDR|PORT|HCA|(^|_)PW($|_)")
# Keys of configs whose values are words.
TEXT_KEYS = frozenset(
    "model_type hidden_act hidden_activation activation_function rope_type type layer_types "
    "scoring_func topk_method position_embedding_type arch_name".split()
)


def word(text: Any) -> str | None:
    """The text if it is a plain word that may leave the machine, else None."""
    fits = isinstance(text, str) and WORD.fullmatch(text) and not SECRET.search(text)
    return text if fits else None


def public_device(name: str) -> str:
    """A device's name, or a digest of what no driver says."""
    return name if DEVICE_NAME.fullmatch(name) else digest(name)


def public_name(name: str) -> str:
    """The name of an argument, or a digest of one that may be private."""
    plain = re.fullmatch(r"[A-Za-z]\w{0,39}|text-[0-9a-f]{10}", name, re.ASCII)
    return name if plain and not SECRET.search(name) else digest(name)


def public_value(name: str, value: Any) -> Any:
    """A number, or one of the words that the flag of this name takes; a digest of any other text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [public_value(name, each) for each in value]
    text = str(value)
    number = r"\d{1,12}(\.\d{1,12})?"
    plain = rf"text-[0-9a-f]{{10}}|synthetic|\d+/\d+|{number}(,{number})*"
    if name == "lora_targets":  # names of layers
        plain += r"|[a-z_,]{1,60}"
    flag = declared(Args).get(name)
    words = [REMOVED.get(name), *(flag.options if flag else ())]
    return text if text in words or re.fullmatch(plain, text, re.ASCII) else digest(text)


def digest(text: str) -> str:
    """What tells a text from others without saying it."""
    return f"text-{hashlib.sha256(text.encode('utf-8', 'backslashreplace')).hexdigest()[:10]}"


def run_id(r: Result) -> str:
    """What tells a run from others."""
    return r.run_id if re.fullmatch(r"[0-9a-f]{8,32}", r.run_id) else digest(r.run_id)


def shareable(r: Result) -> Result:
    """A result without what may name a place, a person or a machine."""
    name = r.model.name
    file = name.removesuffix(f"-{r.args.get('layers')}-layers")
    if shipped_config(file) == file:  # no config of ours
        name = f"{word(r.model.config.get('model_type')) or 'model'}-{r.model.hash[:8]}"
        file = name
    known = {k: v for k, v in r.model.config.items() if k not in r.model.ignored_keys}
    config, shape = (
        {k: v for k, v in part.items() if not _private(k, v)} for part in (known, r.model.shape)
    )
    model = {"name": name, "path": f"configs/{file}.json", "config": config, "shape": shape}
    args = {public_name(k): public_value(k, v) for k, v in r.args.items()}
    command: list[str] = []
    if r.ours:
        places = of_kind(OUTPUT) - {"device", "usd_per_hour", "peak_tflops"}
        args |= {k: v for k, v in defaults(Args).items() if k in places and k in args}
        args |= {"config": model["path"], "device": r.device.type}
        flags = result_flags(args)
        command = [r.entrypoint, flags.pop("config"), *to_argv(flags)]
    update = {
        "error": None,
        "profile": None,
        "remarks": [],
        "writer": Writer(host="", pid=0),
        "run_id": run_id(r),
        "attempts": [Attempt(first_step=attempt.first_step) for attempt in r.attempts],
        "run_name": name,
        "model": r.model.model_copy(update=model | {"ignored_keys": []}),
        "args": args,
        "command": command,
        "version": word(r.version) or "unknown",
        "entrypoint": r.entrypoint if r.ours else digest(r.entrypoint),
        "started_at": word(r.started_at) or "",
        "ended_at": word(r.ended_at),
        "attention_kernel": word(r.attention_kernel),
        "linear": word(r.linear),
        "environment": public_environment(r.environment),
        "observed": None,
    }
    clean = r.model_copy(deep=True, update=update)
    for field in ("name", "hardware"):
        setattr(clean.device, field, public_device(getattr(r.device, field)))
    clean.device.peak_source = clean.device.roof_source = ""
    clean.metrics.energy_source = word(r.metrics.energy_source)
    for rank in clean.ranks:
        rank.host = ""
    for use in clean.devices:
        use.throttled = use.throttled and {k: v for k, v in use.throttled.items() if word(k)}
    if r.observed:
        names = {k: [n for n in v if word(n)] for k, v in r.observed.attention.items() if word(k)}
        matmuls = {k: n for k, n in r.observed.matmuls.items() if word(k)}
        clean.observed = Observed(attention=names, matmuls=matmuls)
    clean.judge()
    return clean


def _private(key: str, value: Any) -> bool:
    """Whether a key of a config may say more than the model's shape; few keys have texts."""
    if not re.fullmatch(r"[a-z]\w{0,59}", key, re.ASCII):
        return True
    if isinstance(value, dict):
        return any(_private(k, v) for k, v in value.items())
    if isinstance(value, list):
        return any(_private(key, v) for v in value)
    return isinstance(value, str) and not (key in TEXT_KEYS and re.fullmatch(r"\w{1,40}", value))


def public_environment(e: dict[str, Any]) -> dict[str, Any]:
    """Versions and facts that a speed can depend on, each of its kind."""
    names = ("os", "python", "cuda", "hip", "nccl", "driver")
    kept: dict[str, Any] = {name: word(e.get(name)) for name in names}
    kept["cpu"] = public_device(e["cpu"]) if isinstance(e.get("cpu"), str) else None
    for name in ("cpu_count", "torch_threads", "cudnn", "tf32", "git_dirty"):
        kept[name] = e.get(name) if isinstance(e.get(name), bool | int) else None
    for name in ("git_sha", "git_diff"):
        kept[name] = e.get(name) if re.fullmatch(r"[0-9a-f]{7,40}", str(e.get(name))) else None
    parts = (e.get(name) for name in ("libraries", "settings", "image"))
    libraries, settings, image = (part if isinstance(part, dict) else {} for part in parts)
    kept["libraries"] = {k: v for k, v in libraries.items() if word(k) and word(v)}
    public = [k for k in settings if word(k) and not PLACES.search(k) and not SECRET.search(k)]
    kept["settings"] = {k: settings[k] for k in public if VARIABLE.fullmatch(str(settings[k]))}
    tag, checksum = str(image.get("name") or "").rpartition("/")[2], str(image.get("digest"))
    tagged = re.fullmatch(r"[\w.-]{1,80}(:[\w.-]{1,80})?", tag, re.ASCII)
    known = re.fullmatch(r"sha256:[0-9a-f]{64}", checksum)
    kept["image"] = {"name": tag if tagged else None, "digest": checksum if known else None}
    return kept
