"""Writing result.json so that it survives whatever ends the run, and reading it. Needs no torch."""

import contextlib
import dataclasses
import datetime
import errno
import json
import math
import os
import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import ConfigDict

from llm_train_bench.base.errors import printable_data
from llm_train_bench.base.files import sync_to_disk, write_whole
from llm_train_bench.base.machine import system_text
from llm_train_bench.base.redaction import redact, shown_text
from llm_train_bench.model.json_files import parse_json, plain_text
from llm_train_bench.results.schema import Attempt, Result, Status, Writer

# Held on disk from the start, so that a full disk cannot keep the result from being written.
RESERVED_BYTES = 2**20
RESERVED_BYTES_PER_STEP = 48


class ResultFile:
    """`result.json`: reserves space at once, given `n_steps`; a write replaces the whole file."""

    def __init__(self, directory: Path, n_steps: int | None):
        self.path, self.opened = directory / "result.json", directory.stat()
        self.spare = directory / ".result.json.reserved"
        self.size = 0
        if n_steps is not None:
            self.size = RESERVED_BYTES + RESERVED_BYTES_PER_STEP * n_steps
            self._fill(bytes(self.size))

    def _fill(self, content: bytes) -> None:
        if not os.path.samestat(self.path.parent.stat(), self.opened):  # another run has the name
            raise FileNotFoundError(errno.ENOENT, "was moved", str(self.path))
        with self.spare.open("r+b" if self.spare.exists() else "wb") as f:
            f.write(content)
            f.truncate()
        sync_to_disk(self.spare)

    def write(self, result: Result, last: bool = False) -> None:
        """Write into the reserved blocks and rename; after the `last` write nothing is reserved."""
        result.judge()
        if last:
            attempt = result.attempts[-1]
            attempt.ended = ": ".join(filter(None, (result.status, result.error)))
            attempt.end = attempt.end or wall_clock()
        content = redact(storable(result.model_dump(mode="json")))
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        self._fill(text.encode())
        self.spare.replace(self.path)
        if not last:
            self._fill(bytes(self.size))


def storable(value: Any) -> Any:
    """JSON data that every reader takes: null for infinities, escapes for bytes that are no text."""
    if isinstance(value, dict):
        return {storable(k): storable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [storable(v) for v in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return finite(value)


def read_result(path: str | Path) -> Result:
    """The result.json of this path or directory; ValueError (a wrong schema) or OSError if it is none."""
    path = Path(path)
    path = path / "result.json" if path.is_dir() else path
    return parse_result(parse_json(plain_text(path, 256)))


def parse_result(content: Any) -> Result:
    """A result.json's content, made printable; pydantic's ValidationError if it is none."""
    content = printable_data(content)
    result = Result.model_validate(content)
    if result.status == "running" and (alive := is_alive(result.writer)) is not True:
        result.status = "unknown" if alive is None else "killed"
        result.judge()
    return result


def this_process(pid: int | None = None) -> Writer:
    """The description of this process, or of another of this host."""
    boot = system_text("/proc/sys/kernel/random/boot_id").strip() or None
    return Writer(host=platform.node(), boot=boot, pid=pid or os.getpid(), started=_started(pid))


def seconds_alive(pid: int | None = None) -> float | None:
    """Seconds since this process, or another, was started; None where the system does not tell."""
    started = _started(pid)
    if started is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


_EPOCH = time.time() - time.perf_counter()


def wall_clock() -> float:
    """Seconds since 1970; it goes on evenly in this process, whatever sets the system's clock."""
    return _EPOCH + time.perf_counter()


def begin_attempt(first_step: int = 0, lost_s: float = 0.0) -> Attempt:
    """The attempt that this process is; it starts with the launcher, unless that starts it again."""
    launched = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    alive = seconds_alive(os.getppid() if launched else None) or 0.0
    opened = wall_clock()
    return Attempt(first_step=first_step, start=opened - alive, opened=opened, lost_s=lost_s)


def is_alive(writer: Writer) -> bool | None:
    """Whether a process still runs; None where only another host can tell, or a system without /proc."""
    untold = writer.started is None and not Path("/proc/self/stat").exists()
    if writer.host != platform.node() or untold:
        return None
    return this_process(writer.pid) == writer


def _started(pid: int | None) -> int | None:
    """Start of a process in clock ticks since the boot; None where it is gone, or cannot be read."""
    state, *rest = system_text(f"/proc/{pid or 'self'}/stat").rpartition(")")[2].split() or "X"
    return None if state in "ZX" else int(rest[18])


# Once there is a result, the first rank of a machine writes the run's directory into a file of this name.
# It is for the process that started the rank.
RUN_POINTER = "run"


def run_told(pointer: Path) -> Path | None:
    """The directory of the run that a RUN_POINTER names, if there is one."""
    with contextlib.suppress(OSError, ValueError):
        directory = Path(pointer.read_text(encoding="utf-8", errors="surrogateescape"))
        return directory if (directory / "result.json").is_file() else None
    return None


def complete_result(pointer: Path, status: str, error: str, consequences: tuple[str, ...]) -> None:
    """Give the run that `pointer` names its true end, where its ranks could not know or write it.

    An error that begins with one of `consequences` is not the cause.
    """
    with contextlib.suppress(OSError, ValueError):
        path = (run_told(pointer) or pointer) / "result.json"  # below a file there is none
        file = ResultFile(path.parent, None)
        result = Result.model_validate_json(path.read_text(encoding="utf-8"))
        of_others = re.sub(r"^rank \d+: ", "", result.error or "").startswith(consequences)
        unaware = result.status == "interrupted" != status
        if result.status == "running" or unaware or of_others:
            result.status, result.error = cast(Status, status), error
            result.ended_at = result.ended_at or now()
            file.write(result, last=True)
        file.spare.unlink(missing_ok=True)


def now() -> str:
    """The time, UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def commit_of(environment: Mapping[str, Any]) -> str:
    """The revision of this project that ran, with a digest of its uncommitted changes."""
    e = environment
    changed = f"+{e.get('git_diff') or 'changes'}" if e.get("git_dirty") else ""
    return str(e.get("git_sha") or "unknown")[:10] + changed


# Variables that change no speed: `software` has the threads, and a cache's place and a job's number.
IRRELEVANT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR", "SLURM_JOB_ID")


def software(environment: Mapping[str, Any], on_cpu: bool) -> dict[str, str]:
    """Software and variables that a run's speed can depend on, besides our own: name to version.

    Paths in variables are shown as they may leave the machine, and an image without its registry.
    """
    e = environment
    parts = (e.get(name) for name in ("libraries", "image", "settings"))
    versions, image, settings = (dict(part) if isinstance(part, dict) else {} for part in parts)
    versions |= {name: e.get(name) for name in ("cuda", "hip", "cudnn", "nccl", "driver")}
    versions["threads"] = e.get("torch_threads") if on_cpu else None
    versions["python"] = e.get("python")
    versions |= {str(k): shown_text(str(v)) for k, v in settings.items() if k not in IRRELEVANT}
    tag = str(image.get("name") or "").rpartition("/")[2]
    versions["image"] = " ".join(filter(None, (tag, image.get("digest"))))
    return {name: str(version) for name, version in versions.items() if version}


@dataclasses.dataclass(frozen=True)
class Step:
    """One finished step, as a line of steps.jsonl; times in seconds, tokens over all ranks.

    None is what a loop of others did not tell.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # of a shared file's steps

    step: int
    phase: str
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
    micro_batch_times_s: tuple[float, ...] = ()


def step_fields(step: Step) -> dict[str, Any]:
    """A step as files have it: without what few steps have, where this one has none."""
    rare = ("saved", "idle_time_s", "compile_s", "micro_batch_times_s")
    fields = {name: finite(value) for name, value in vars(step).items()}
    return {name: value for name, value in fields.items() if value or name not in rare}


class StepsFile:
    """steps.jsonl: one JSON object a line and step; infinite and undefined values become null.

    The steps before `first_step` stay in a file that is there.
    """

    def __init__(self, path: Path, first_step: int = 0):
        kept = [step for step in read_steps(path) if step["step"] < first_step]
        # A new file: the old one may be a copy's too, by a link.
        write_whole(path, "".join(f"{json.dumps(step)}\n" for step in kept))
        self.file = path.open("a", encoding="utf-8")

    def __call__(self, steps: list[Step]) -> None:
        for step in steps:
            self.file.write(json.dumps(step_fields(step)) + "\n")
        self.file.flush()

    def fileno(self) -> int:
        """The file's descriptor, to synchronise it by."""
        return self.file.fileno()

    def close(self) -> None:
        # A failed write was reported when it happened; the buffer may still hold its data.
        with contextlib.suppress(OSError):
            self.file.close()


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The steps of a steps.jsonl, up to where a kill cut it off."""
    return [e for e in json_lines(path) if isinstance(e.get("step"), int)]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, up to where a kill cut it off."""
    entries = []
    text = plain_text(path, 1024, errors="replace") if path.is_file() else ""
    for line in text.splitlines():
        try:
            entries.append(parse_json(line))
        except ValueError:
            break
    return [e for e in entries if isinstance(e, dict)]


def step_figures(
    step: Step, flops_per_token: float | None = None, peak_tflops: float | None = None
) -> dict[str, float | None]:
    """The figures of a step, by their tags in TensorBoard and the trackers; FLOPs are per device."""
    rate = step.tokens / step.step_time_s
    tflops = flops_per_token and rate * flops_per_token / 1e12
    return {
        "train/loss": step.loss,
        "train/lr": step.lr,
        "train/grad_norm": step.grad_norm,
        "speed/step_time_s": step.step_time_s,
        "speed/tokens_per_sec": rate,
        "speed/model_tflops_per_gpu": tflops,
        "speed/mfu": tflops / peak_tflops if tflops and peak_tflops else None,
    }


def finite(value: Any) -> Any:
    """A number JSON can hold, or None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Those of the values that are finite numbers, as floats."""
    numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
