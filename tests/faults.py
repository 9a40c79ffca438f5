"""The campaign against checkpoints: `make faults`, or parts of it by PART="calls chains" COUNT=50.

Each part returns what it did, and fails by AssertionError. The suite runs short forms.
"""

import contextlib
import errno
import functools
import io
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO
from unittest import mock

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader

import train
from llm_train_bench.parallel.ranks import ALONE
from llm_train_bench.results.result_files import read_result, read_steps
from llm_train_bench.run.checkpoint import attempt, saver  # before a run is forked
from llm_train_bench.run.checkpoint.attempt import checkpoints_at, newest_good, step_of
from llm_train_bench.run.launch import train_planned
from tests.helpers import ROOT

if not torch.cuda.is_available():
    # A process's first backward starts autograd's threads. After fake tensors, a CUDA build starts one
    # for a device that is not there, and autograd then refuses to work in forks.
    torch.ones((), requires_grad=True).backward()

# A model so small that a save is a few kilobytes; with dropout, so that its state counts, and without.
CONFIG, PLAIN = (ROOT / f"tests/configs/{name}.json" for name in ("micro", "micro-plain"))
SHAPE = json.loads(CONFIG.read_text())
FLAGS = "--seq-len 8 --bsz 4 --device cpu --amp off --no-tensorboard --no-observe".split()
FLAGS += "--warmup-steps 2 --lr-warmup-steps 4 --lr 1e-2".split()
STEPS, EVERY = 20, 5
# Inside, a run in this process, or in forks of it, keeps all of its checkpoints.
KEEP_ALL = mock.patch.object(attempt, "KEPT", 1000)


def whole_state(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, which must be as it was written."""
    assert newest_good([directory], []), directory
    stored = FileSystemReader(directory).read_metadata().state_dict_metadata
    whole = {name: torch.zeros(t.size, dtype=t.properties.dtype) for name, t in stored.items()}
    saver.read(directory, whole)
    return {name.partition(",")[0]: tensor for name, tensor in whole.items()}


def last_of(run: Path) -> Path:
    """The newest good checkpoint of a run, which must exist."""
    (path, _) = newest_good(checkpoints_at(run), []) or ()
    return path


def steps_of(run: Path) -> list[dict]:
    return read_steps(run / "steps.jsonl")


def losses_of(run: Path) -> list[tuple[int, float]]:
    return [(step["step"], step["loss"]) for step in steps_of(run)]


def check_like(reference: Path, run: Path, tolerance=0.0) -> None:
    """A run in pieces has ended as the undisturbed one: state, losses, and nothing left behind."""
    for read in (lambda run: whole_state(last_of(run)), losses_of):
        torch.testing.assert_close(read(run), read(reference), rtol=0, atol=tolerance)
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(left) == 2 and all(step_of(Path(name)) >= 0 for name in left), left


def arguments(out: Path, name: str, *more: str, config: Path = CONFIG) -> list[str]:
    """A short run that saves often and goes on by itself."""
    flags = f"--n-steps {STEPS - 2} --save-every {EVERY} --resume auto".split()
    return [str(config), *FLAGS, *flags, "--output-dir", str(out), "--run-name", name, *more]


def run_here(argv: list[str]) -> None:
    """A run in this process, quietly."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        train_planned(train.train, argv, "train.py", ALONE)


def fork(argv: list[str], prepare: Callable[[], object] = lambda: None) -> bool:
    """A run in a fork; whether it ended well."""
    if child := os.fork():
        return not os.waitpid(child, 0)[1]
    try:
        torch.set_num_threads(1)  # OpenMP's other threads were not forked
        prepare()
        run_here(argv)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def watch(run: Path, log: TextIO, at: int = 0) -> None:
    """List the calls of this process that change files of a run, and end it before one of them."""
    calls = itertools.count(1)

    def hook(event: str, args: tuple) -> None:
        changes = event in ("os.rename", "os.mkdir", "os.remove", "os.truncate", "shutil.rmtree")
        changes |= event == "open" and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and str(args[0]).startswith(str(run)):
            log.write(f"{event} {Path(args[0]).name}\n")
            if next(calls) == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def calls(every: int = 1) -> str:
    """Kill a run at every write and rename, and tear what it wrote: it goes on as if nothing had been."""
    with tempfile.TemporaryDirectory() as top, Path(top, "calls").open("w+", buffering=1) as log:
        out, reference = Path(top), Path(top, "reference")
        run_here(arguments(out, "warm"))
        assert fork(arguments(out, "reference"), lambda: watch(reference, log))
        names = (out / "calls").read_text().splitlines()
        assert {"os.rename step-00000010.tmp", "open __0_0.distcp", "open facts.json"} <= {*names}
        killed = range(1, len(names) + 1, every)
        for at in killed:
            run, why = out / f"r{at}", names[at - 1]
            assert not fork(arguments(out, run.name), functools.partial(watch, run, log, at)), why
            for path in run.glob("checkpoints/*.tmp/*"):
                os.truncate(path, path.stat().st_size // 2)
            saved = [step_of(path) for path in checkpoints_at(run)]
            assert fork(arguments(out, run.name)), why
            first = read_result(run / "result.json").first_step
            assert first == max(saved, default=0), (first, saved, why)
            check_like(reference, run)
    return f"{len(killed)} kills at {len(names)} calls"


def disks(count: int = 0) -> str:
    """Disks that are full before the first save, in the middle of it, and of the second."""
    with tempfile.TemporaryDirectory() as top:
        out = Path(top)
        run_here(arguments(out, "reference"))
        size = sum(path.stat().st_size for path in last_of(out / "reference").iterdir())
        for budget in (0.0, 0.5, 1.5):
            run, left = out / f"r{budget}", [budget * size]

            @contextlib.contextmanager
            def create_stream(fs, path, mode, real=FileSystem.create_stream, left=left):
                def write(data):
                    left[0] -= len(data)
                    if left[0] < 0:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    return stream.write(data)

                with real(fs, path, mode) as stream:
                    yield mock.Mock(wraps=stream, write=write) if mode == "wb" else stream

            with mock.patch.object(FileSystem, "create_stream", create_stream):
                run_here(arguments(out, run.name))
            r = read_result(run / "result.json")
            assert r.status == "ok" and not [*run.glob("checkpoints/*.tmp")]
            why = [text for text in r.texts("information") if "was not saved" in text]
            assert why and all("No space left on device" in text for text in why), r.remarks
            assert [step_of(path) for path in checkpoints_at(run)] == [5] * (budget > 1)
            (run / "result.json").unlink()  # or the run would be finished
            run_here(arguments(out, run.name))
            check_like(out / "reference", run)
    return "3 full disks"


def damage(count: int = 10_000) -> str:
    """Flips, truncations, losses and exchanges of a checkpoint's files: the one before is taken."""
    draw, kinds = random.Random(1), ("flip", "cut", "gone", "exchange")
    with tempfile.TemporaryDirectory() as top:
        run_here(arguments(Path(top), "r"))
        before, last = found = checkpoints_at(Path(top) / "r")
        contents = {path: path.read_bytes() for path in sorted(last.iterdir())}
        for number in range(count):
            kind, (path, content) = kinds[number % 4], draw.choice([*contents.items()])
            at = draw.randrange(len(content))
            damaged = bytearray(content[:at] if kind == "cut" else content)
            damaged[at : at + 1] = [content[at] ^ 1 << draw.randrange(8)] if kind == "flip" else b""
            # Facts that were exchanged for those before name other checksums.
            path.write_bytes((before / path.name).read_bytes() if kind == "exchange" else damaged)
            if kind == "gone":
                path.unlink()
            taken = newest_good(found, [])
            assert taken and taken[0] == before, (kind, path.name)
            path.write_bytes(content)
        assert last_of(Path(top) / "r") == last
    return f"{count} damages"


PARTS = {f.__name__: f for f in (calls, disks, damage)}


def main() -> None:
    """Run the parts that PART names, COUNT times each where it has a number."""
    from tests import chains

    count, parts = os.environ.get("COUNT"), PARTS | {"chains": chains.chains}
    for name in (os.environ.get("PART") or " ".join(parts)).split():
        start, done = time.monotonic(), parts[name](*([int(count)] if count else []))
        print(f"{name}: {done}; {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    os.chdir(ROOT)
    torch.set_num_threads(1)
    main()
