"""Runs as one file that may leave the machine, and that others can check. Needs no torch.

The file holds their results and steps. It has no paths, and no names of hosts and users; secrets and
what would only describe the machine's owner are left out.
"""

import contextlib
import copy
import getpass
import json
import os
import platform
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from llm_train_bench.base.errors import UsageError, printable_data
from llm_train_bench.base.files import SECRET, shown_command, shown_path, shown_word, write_whole
from llm_train_bench.base.strict import Strict, first_problem
from llm_train_bench.model.json_keys import parse_json, plain_file
from llm_train_bench.results.result_files import Step, read_result, read_steps, storable
from llm_train_bench.results.schema import Result
from llm_train_bench.settings.flags import OUTPUT, Args, defaults, of_kind

FORMAT, VERSION = "llm-train-bench shared result", 1
# Bounds of a file that is read: bytes, runs, steps of each, and characters of a text.
MOST_BYTES, MOST_RUNS, MOST_STEPS, LONGEST_TEXT = 8 * 2**20, 20, 20_000, 400
# Facts of the environment that a speed can depend on.
ENVIRONMENT = frozenset(
    "os python cpu cpu_count torch_threads libraries cuda hip cudnn nccl driver numa tf32 image settings "
    "git_sha git_dirty git_diff".split()
)
# Arguments that only say where and how something is written. Their defaults stand for them.
PRIVATE_ARGS = of_kind(OUTPUT) - {"device", "nproc", "peak_tflops", "usd_per_hour", "profile"}
PATTERNS = (
    re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+"),  # mail addresses
    re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])"),  # IPv4
    re.compile(r"(?<![0-9a-fA-F:])(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}"),  # IPv6, MAC
    re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|ASIA)[\w-]{12,}"),
    re.compile(r"\beyJ[\w-]{10,}\.[\w-]{5,}\.[\w-]*"),  # JSON web tokens
)
GONE = "..."


class SharedStep(Strict):
    """A step, as in steps.jsonl."""

    step: int
    phase: Literal["warmup", "measure", "profile"]
    loss: float | None
    lr: float | None
    grad_norm: float | None
    step_time_s: float
    tokens: int
    data_time_s: float
    forward_time_s: float | None
    backward_time_s: float | None
    optimizer_time_s: float | None
    idle_time_s: float = 0.0
    saved: bool = False
    at: float = 0.0
    compile_s: float = 0.0
    micro_batch_times_s: list[float] = Field(default_factory=list)

    def as_step(self) -> Step:
        """The step as the figures take it."""
        fields = self.model_dump(exclude={"micro_batch_times_s"})
        return Step(**fields, micro_batch_times_s=tuple(self.micro_batch_times_s))


class SharedRun(Strict):
    """A result with its steps."""

    result: Result
    steps: list[SharedStep] = Field(max_length=MOST_STEPS)


class SharedFile(Strict):
    """One file: a run, or repeats of one."""

    format: Literal["llm-train-bench shared result"] = FORMAT
    schema_version: Literal[1] = VERSION
    runs: list[SharedRun] = Field(min_length=1, max_length=MOST_RUNS)


def _strange(value: Any, path: str = "") -> Iterator[str]:
    """Where data has numbers that are none, or texts that are too long."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _strange(inner, f"{path}.{key}".lstrip(".")[:LONGEST_TEXT])
    elif isinstance(value, list):
        for inner in value:
            yield from _strange(inner, path)
    elif isinstance(value, float | int) and not -1e300 < value < 1e300:
        yield f"{path}: {value!r} is no number that a run has"[:LONGEST_TEXT]
    elif isinstance(value, str) and len(value) > LONGEST_TEXT:
        yield f"{path}: the text has more than {LONGEST_TEXT} characters"


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
    write_whole(to, json.dumps(storable(content), indent=1, allow_nan=False) + "\n")
    return sorted(left_out)


def _shared_run(run: Path) -> tuple[SharedRun, set[str]]:
    """A run as it may be shared, and dotted names of what was left out or changed."""
    path = run / "result.json" if run.is_dir() else run
    try:
        result = read_result(path)
    except OSError as error:
        raise UsageError(f"--share: {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        why = first_problem(error) if isinstance(error, ValidationError) else "not a result.json"
        raise UsageError(f"--share: {path}: {why}") from None
    if result.status != "ok":
        raise UsageError(
            f"--share: {path}: the run's status is {result.status}; share a finished run"
        )
    steps = read_steps(path.with_name("steps.jsonl"))
    if not steps:
        raise UsageError(f"--share: {path}: its steps.jsonl is not there or empty; both are needed")
    content = result.model_dump(mode="json")
    cleaned = cleaned_result(content, private_names(content))
    try:
        one = SharedRun.model_validate({"result": cleaned, "steps": steps})
    except ValidationError as error:
        raise UsageError(f"--share: {path}: {first_problem(error)}") from None
    return one, set(changed_paths(content, cleaned))


def private_names(content: dict[str, Any]) -> list[str]:
    """Names of this machine, of the run's hosts and of the user, the longest first."""
    names = {platform.node(), socket.gethostname(), os.environ.get("USER", "")}
    names |= {os.environ.get("LOGNAME", ""), Path.home().name}
    with contextlib.suppress(OSError, KeyError, ImportError):  # a container's user has no name
        names.add(getpass.getuser())
    names |= {str(rank.get("host", "")) for rank in content.get("ranks", ())}
    environment = content.get("environment") or {}
    names |= {str(content["writer"].get("host", "")), str(environment.get("hostname", ""))}
    names |= {name.split(".")[0] for name in names}
    # Everybody's names say nothing, and are words of other texts.
    common = {"root", "user", "localhost", "none", "home", "ubuntu", "admin", "runner", "worker"}
    return sorted(
        (n for n in names if len(n) > 1 and n.lower() not in common), key=len, reverse=True
    )


def cleaned_result(content: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A result's content without what is private; a content that is clean already stays as it is."""
    r = copy.deepcopy(content)
    r["writer"] = {"host": "", "boot": None, "pid": 0, "started": None}
    hosts: dict[str, str] = {}
    for rank in r.get("ranks", ()):
        host = rank["host"]
        numbered = re.fullmatch(r"node \d+", host)
        rank["host"] = host if numbered else hosts.setdefault(host, f"node {len(hosts)}")
    r["command"] = shown_command(r["command"])
    default = defaults(Args)
    for name, value in r["args"].items():
        if name in PRIVATE_ARGS:
            plain = default[name]
            r["args"][name] = list(plain) if isinstance(plain, tuple) else plain
        elif SECRET.search(name) and name not in default:
            r["args"][name] = None
        elif isinstance(value, str):
            r["args"][name] = shown_word(value)
    r["model"]["path"] = shown_path(r["model"]["path"]) if r["model"]["path"] else ""
    r["environment"] = {k: v for k, v in r["environment"].items() if k in ENVIRONMENT}
    settings = r["environment"].get("settings")
    if isinstance(settings, dict):
        kept = {k: shown_word(str(v)) for k, v in settings.items() if not SECRET.search(k)}
        r["environment"]["settings"] = kept
    image = r["environment"].get("image")
    if isinstance(image, dict) and image.get("name"):  # a registry's name may be private
        image["name"] = str(image["name"]).rpartition("/")[2]
    if resumed := r.get("resumed_from"):
        resumed["path"] = shown_path(resumed["path"])
    r["notes"] = [" ".join(map(shown_word, note.split(" "))) for note in r["notes"]]
    r["run_name"] = shown_word(r["run_name"])
    r["lineage"]["name"] = shown_word(r["lineage"]["name"])
    words = [re.escape(name) for name in names]
    own = re.compile(rf"(?<![\w-])(?:{'|'.join(words)})(?![\w-])", re.I) if words else None
    return _without(r, own)


def _without(value: Any, own: re.Pattern[str] | None) -> Any:
    """Data without names and patterns in its texts, keys included."""
    if isinstance(value, dict):
        return {_without(k, own): _without(v, own) for k, v in value.items()}
    if isinstance(value, list):
        return [_without(v, own) for v in value]
    if isinstance(value, str):
        for pattern in (*PATTERNS, *([own] if own else [])):
            value = pattern.sub(GONE, value)
        return value[:LONGEST_TEXT]
    return value


def changed_paths(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Dotted names of what differs; the items of a list share a name."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from changed_paths(value, after.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(before, list) and isinstance(after, list):
        for a, b in zip(before, after, strict=False):
            yield from changed_paths(a, b, path)
    elif before != after:
        yield path


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
        content = parse_json(data)
    except ValueError as error:
        raise UsageError(f"{path}: not usable JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{path}: is no shared result; compare.py RUN --share FILE.json makes one")
    if where := next(_strange(content), None):
        raise UsageError(f"{path}: {where}")
    try:
        return SharedFile.model_validate(printable_data(content))
    except ValidationError as error:
        raise UsageError(f"{path}: {first_problem(error)}") from None


def folder_of(hardware: str) -> str:
    """The folder of results/ for a device's name: letters, digits and dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", hardware.lower()).strip("-.")[:80] or "unknown"
