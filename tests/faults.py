"""The campaign against checkpoints: crashes at every call, kills, damage and failing disks.

    make faults                    all parts, at most 90 minutes
    make faults PART=kills COUNT=50

tests/test_checkpoint.py runs a short form. Each part returns what it did, and fails by AssertionError.
"""

import contextlib
import dataclasses
import errno
import functools
import importlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import train_ddp  # noqa: F401 (before the ranks are forked)
import train_fsdp  # noqa: F401
from llm_train_bench.apply import precision
from llm_train_bench.base.token_files import write_tokens
from llm_train_bench.model.layout import ALONE as ALONE_HERE
from llm_train_bench.model.stored import DTYPES, read_block
from llm_train_bench.model.weights import Normal, Shard, Weight
from llm_train_bench.parallel.ranks import ALONE, MEETING, Ranks
from llm_train_bench.results.schema import Lineage, Metrics
from llm_train_bench.run.checkpoint import manifest, saver
from llm_train_bench.run.checkpoint.durable import Files
from llm_train_bench.run.checkpoint.lineage import Attempt, attempts, open_place, take_lock
from llm_train_bench.run.checkpoint.manifest import committed, newest, read_manifest, verify
from llm_train_bench.run.launch import train_planned
from llm_train_bench.settings.plan import Plan
from tests.helpers import ROOT, plan_of

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
KEEP_ALL = mock.patch.object(manifest, "KEPT", 1000)


def whole_state(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, which must verify."""
    return {
        name: read_block(
            directory, name, t.parts, Shard((0,) * len(t.shape), t.shape), DTYPES[t.dtype]
        )
        for name, t in verify(directory).tensors.items()
    }


def last_of(place: Path) -> Path:
    """The newest good checkpoint, which must exist."""
    checkpoint = newest(place, [])
    assert checkpoint is not None
    return checkpoint


def assert_equal(*states, atol: float = 0.0) -> None:
    """Of two states: all tensors, bit for bit."""
    torch.testing.assert_close(*states, rtol=0, atol=atol)


class Crash(BaseException):
    """The machine stops here."""


class CrashingFiles(Files):
    """Stops before, or in the middle of, the n-th call; can then undo what no call had made durable.

    A write that was not synchronised may be on disk in part; a name that was not may be missing.
    """

    def __init__(self, at: int = 10**9, torn: float = 1.0, error: int | None = None):
        self.at, self.torn, self.error = at, torn, error
        self.calls: list[str] = []
        self.unsynced: list[Callable[[], object]] = []
        self.written: list[Path] = []

    def _call(self, name: str, halfway: Callable[[], object] = lambda: None) -> None:
        """Count a call; the n-th stops halfway."""
        self.calls.append(name)
        if len(self.calls) - 1 == self.at:
            halfway()
            raise OSError(self.error, os.strerror(self.error)) if self.error else Crash

    def make(self, directory: Path) -> None:
        self._call("make")
        super().make(directory)
        self.unsynced.append(lambda: shutil.rmtree(directory, ignore_errors=True))

    def write(self, path: Path, parts) -> tuple[int, int]:
        content = b"".join(map(bytes, parts))
        self._call("write", lambda: path.write_bytes(content[: int(self.torn * len(content))]))
        self.written.append(path)
        return super().write(path, [content])

    def synchronize(self, descriptor: int) -> None:
        stat = os.fstat(descriptor)
        self._call("synchronize", lambda: os.ftruncate(descriptor, int(self.torn * stat.st_size)))
        super().synchronize(descriptor)
        same = lambda path: path.exists() and os.path.samestat(path.stat(), stat)  # noqa: E731
        self.written = [path for path in self.written if not same(path)]

    def synchronize_names(self, directory: Path) -> None:
        self._call("synchronize names")
        super().synchronize_names(directory)
        self.unsynced.clear()

    def rename(self, old: Path, new: Path) -> None:
        self._call("rename")
        super().rename(old, new)
        self.unsynced.append(lambda: new.rename(old) if new.exists() else None)

    def remove(self, directory: Path) -> None:
        self._call("remove", lambda: [p.unlink() for p in sorted(directory.iterdir())[:1]])
        super().remove(directory)

    def lose(self) -> None:
        """Undo, last first, all names that were never synchronised, and tear such content."""
        for path in self.written:
            final = path.parent.with_name(path.parent.name.strip(".").removesuffix(".part"))
            for place in (path, final / path.name):
                if place.exists():
                    place.write_bytes(place.read_bytes()[: place.stat().st_size // 2])
        for undo in reversed(self.unsynced):
            undo()


@functools.cache
def one_rank_plan() -> Plan:
    return plan_of([CONFIG, *FLAGS, "--save-every", EVERY], platform="cpu")


class OneRun:
    """A saver of one rank without a run around it: `save(step)` saves a state that tells the step."""

    def __init__(self, directory: Path, files: Files):
        plan = one_rank_plan()
        self.parameter = torch.nn.Parameter(torch.zeros(6, 4))
        weight = Weight(None, "w", "weight", (6, 4), Normal(1.0), ())
        weights = lambda: [(weight, self.parameter)]  # noqa: E731
        model = types.SimpleNamespace(weights=weights, config=None, layout=ALONE_HERE)
        optimizer = torch.optim.SGD([self.parameter], momentum=0.9)
        optimizer.state[self.parameter]["momentum_buffer"] = torch.zeros(6, 4)
        facts = dict(args=dataclasses.asdict(plan.args), remarks=[], metrics=Metrics())
        result = types.SimpleNamespace(run_name="r", linear="plain", **facts)
        result.remark = result.remarks.append
        (directory / "steps.jsonl").touch()
        line = Lineage(id="one", name=directory.name, attempt=0, began=0.0, started=0.0)
        attempt = Attempt(line, directory, saves=True)
        attempt.lock, attempt.checkpoint = take_lock(attempt.place), newest(attempt.place, [])
        attempt.manifest = attempt.checkpoint and read_manifest(attempt.checkpoint)
        open_place(attempt)
        run = types.SimpleNamespace(
            plan=plan, ranks=ALONE, device=torch.device("cpu"), result=result, scaler=None,
            log=types.SimpleNamespace(steps=[], pause=lambda: None, start=lambda: None),
            directory=directory, attempt=attempt, hang=None, end_steps=lambda: None, fp8=None,
            steps=(directory / "steps.jsonl").open("a"),
        )  # fmt: skip
        self.run, self.notes = run, result.remarks
        with mock.patch.object(saver, "say", lambda text: None):
            self.saver = saver.Saver(run, model, optimizer)
        self.saver.files = files

    def begin_save(self, step: int) -> None:
        with torch.no_grad():
            self.parameter.fill_(step)
        self.saver._save(step)

    def save(self, step: int) -> None:
        inline = mock.patch.object(saver.threading, "Thread", Inline)  # a crash must end the caller
        with inline, mock.patch.object(saver, "say", lambda text: None):
            self.begin_save(step)
            self.saver.finish()

    def end(self) -> None:
        """As the kernel does when a process ends."""
        self.run.steps.close()
        self.run.attempt.lock.close()


class Inline(threading.Thread):
    """A thread that runs when it is started."""

    start = threading.Thread.run
    join = lambda self, timeout: None  # noqa: E731


@contextlib.contextmanager
def stopped_runs() -> Iterator[tuple[Callable[[CrashingFiles], tuple[OneRun, Path]], list[str]]]:
    """Runs of three saves, copied anew each time, and the calls that a fourth save makes."""
    with tempfile.TemporaryDirectory() as top:
        base, here = Path(top) / "base", Path(top) / "here"
        base.mkdir()
        run = OneRun(base, Files())
        for step in (5, 10, 15):
            run.save(step)

        def again(files: CrashingFiles) -> tuple[OneRun, Path]:
            shutil.rmtree(here, ignore_errors=True)
            shutil.copytree(base, here)
            return OneRun(here, files), here

        again(probe := CrashingFiles())[0].save(20)
        yield again, probe.calls


def states(count: int = 0) -> str:
    """Every state that a machine can leave behind which stops in the fourth save of a run.

    Property: the newest good checkpoint is the one before or the new one, whole.
    """
    n = 0
    with stopped_runs() as (again, calls):
        for at, torn, lost in itertools.product(range(len(calls)), (0.0, 0.5, 0.999, 1.0), (0, 1)):
            if torn < 1.0 and calls[at] not in ("write", "synchronize"):
                continue
            run, here = again(files := CrashingFiles(at, torn))
            with contextlib.suppress(Crash):
                run.save(20)
            run.end()
            if lost:
                files.lose()
            checkpoint = last_of(here / "checkpoints")
            step, state = verify(checkpoint).step, whole_state(checkpoint)
            assert step in (15, 20), (step, files.calls)
            assert (state["p/w.weight"] == step).all()
            assert state["momentum_buffer/w.weight"].shape == (6, 4)
            # The next run cleans up, saves, and has at most the two that are kept.
            run = OneRun(here, Files())
            run.save(25)
            run.end()
            left = sorted(p.name for p in (here / "checkpoints").iterdir())
            left = [name for name in left if not name.startswith("damaged-step-00000020-")]
            assert left[0] == "lineage.lock" and len(left) <= 3, left
            assert all(x.startswith("step-") for x in left[1:]), left
            assert left[-1] == "step-00000025", left
            n += 1
    return f"{n} crash states"


def errors(count: int = 0) -> str:
    """ENOSPC, EIO and EDQUOT at every call: the save fails, says so, and nothing before is lost."""
    with stopped_runs() as (again, calls):
        cases = list(itertools.product((errno.ENOSPC, errno.EIO, errno.EDQUOT), range(len(calls))))
        for number, at in cases:
            run, here = again(CrashingFiles(at, 0.5, number))
            run.save(20)
            step = verify(last_of(here / "checkpoints")).step
            assert step in (15, 20)
            assert run.notes or step == 20, calls[at]
            assert step == 20 or os.strerror(number) in run.notes[0]
            assert calls[at] == "remove" or not list((here / "checkpoints").glob(".step*"))
    return f"{len(cases)} failed calls"


def damage(count: int = 10_000) -> str:
    """Flips, truncations, swaps and losses of a committed checkpoint: the one before is taken."""
    draw, kinds = random.Random(1), dict.fromkeys(("flip", "cut", "gone", "swap"), 0)
    with tempfile.TemporaryDirectory() as top:
        base, place = Path(top), Path(top) / "checkpoints"
        run = OneRun(base, Files())
        for step in (5, 10):
            run.save(step)
        before, last = committed(place)
        contents = {path: path.read_bytes() for path in sorted(last.iterdir())}
        for _ in range(count):
            kind, path = draw.choice(list(kinds)), draw.choice(list(contents))
            content, at = contents[path], draw.randrange(len(contents[path]))
            flipped = bytes([content[at] ^ 1 << draw.randrange(8)])
            # A manifest that was swapped for the one before names other checksums.
            damaged = {"flip": content[:at] + flipped + content[at + 1 :]}
            damaged["swap"] = (before / path.name).read_bytes()
            path.write_bytes(damaged.get(kind, content[:at]))
            if kind == "gone":
                path.unlink()
            assert newest(place, []) == before, (kind, path.name)
            path.write_bytes(content)
            kinds[kind] += 1
        assert newest(place, []) == last
    return ", ".join(f"{n} {kind}s" for kind, n in kinds.items())


def arguments(out: Path, name: str, *more: str, config: Path = CONFIG) -> list[str]:
    """A short run that saves often and goes on by itself."""
    flags = f"--n-steps {STEPS} --save-every {EVERY} --resume auto".split()
    return [str(config), *FLAGS, *flags, "--output-dir", str(out), "--run-name", name, *more]


def run_here(argv: list[str], script: str = "train.py", ranks: Ranks = ALONE) -> None:
    """One rank in this process, quietly."""
    train = importlib.import_module(script.removesuffix(".py")).train
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        train_planned(train, argv, script, ranks)


def fork(argv: list[str], script="train.py", world=1, kill_after=None, draw=random) -> bool:
    """Forked ranks of a run, one or all killed after some seconds; whether all ended well."""
    children = []
    with tempfile.TemporaryDirectory() as meeting:
        for rank in range(world):
            if child := os.fork():
                children.append(child)
                continue
            try:
                torch.set_num_threads(1)  # OpenMP's other threads were not forked
                if world > 1:
                    names = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
                    os.environ |= names | {"GLOO_SOCKET_IFNAME": "lo", MEETING: meeting}
                run_here(argv, script, Ranks(rank, world, rank))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if kill_after is not None:
            time.sleep(kill_after)
            for child in draw.choice([children, [draw.choice(children)]]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        codes, deadline = [], time.monotonic() + (20 if kill_after else 240)
        for child in children:
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                if time.monotonic() > deadline:  # as an agent would
                    os.kill(child, signal.SIGKILL)
                time.sleep(0.01)
            codes.append(ended[1])
    return not any(codes)


def steps_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]


def losses_of(out: Path, name: str) -> Iterator[tuple[int, float]]:
    """Step and loss of every line of every attempt of a run."""
    for path in [out / name / "steps.jsonl", *out.glob(f"{name}-restart*/steps.jsonl")]:
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):  # cut off by the kill
                step = json.loads(line)
                yield step["step"], step["loss"]


def check_like(reference: Path, out: Path, name: str, tolerance=0.0) -> None:
    """A run in pieces has ended as the undisturbed one: state, losses, and nothing left behind."""
    place = out / name / "checkpoints"
    pair = [last_of(at) for at in (place, reference / "checkpoints")]
    assert pair[0].name == pair[1].name
    assert_equal(*map(whole_state, pair), atol=tolerance)
    expected = dict(losses_of(reference.parent, reference.name))
    for step, loss in losses_of(out, name):
        assert abs(loss - expected[step]) <= tolerance / 10, (step, loss, expected[step])
    names = [path.name for path in place.iterdir()]
    assert sum(name.startswith("step-") for name in names) <= 2, names
    assert not any(name.startswith((".", "damaged")) for name in names), names
    for run in attempts(out, name):
        shutil.rmtree(run)


def kill_runs(count: int, layouts, tolerance=0.0, flags: str = "", config: Path = CONFIG) -> str:
    """Runs killed at random moments, on a random one of the layouts at each attempt."""
    draw, n, runs = random.Random(2), 0, 0
    with tempfile.TemporaryDirectory() as top:
        out = Path(top)
        argv_of = functools.partial(arguments, out, config=config)
        run_here(argv_of("warm", *flags.split()))  # so that forks are
        start = time.monotonic()
        assert fork(argv_of("reference", *flags.split()))
        takes = time.monotonic() - start
        while n < count:
            done, tries, name = False, 0, f"r{runs}"
            while not done and tries < 12:
                tries += 1
                script, world, own = draw.choice(layouts)
                own += f" {flags} --bsz {4 // world}" + " --dist-timeout 15" * (world > 1)
                longest = 1.1 * takes if world == 1 else 2.5
                kill_after = draw.uniform(0.02, longest) if tries < 12 else None
                done = fork(argv_of(name, *own.split()), script, world, kill_after, draw=draw)
                n += kill_after is not None
            assert done, name
            check_like(out / "reference", out, name, tolerance)
            runs += 1
    return f"{n} kills in {runs} runs, 0 of them wrong"


def kills(count: int = 1000) -> str:
    """Random kills of one rank."""
    return kill_runs(count, [("train.py", 1, "")])


LAYOUTS = (
    ("train.py", 1, ""), ("train_ddp.py", 2, ""), ("train_fsdp.py", 2, ""), ("train_fsdp.py", 4, ""),
    ("train_fsdp.py", 4, "--dp-replicate 2"), ("train_ddp.py", 4, ""),
)  # fmt: skip


def ranks(count: int = 300) -> str:
    """Kills of 1 to 4 gloo ranks, which are another script or number at each attempt."""
    # Adam would blow up the rounding errors of gradients that are zero, as of the keys' biases.
    return kill_runs(count, LAYOUTS, 1e-4, "--optimizer sgd --lr 0.1", PLAIN)


def pieces(count: int = 0) -> str:
    """Runs in two pieces: dropout, fp16 whose scale moves, SGD, a token file read by a process."""
    growth = mock.patch.object(precision.LossScaler, "GROWTH_STEPS", 3)
    with tempfile.TemporaryDirectory() as top, growth:
        out = Path(top)
        write_tokens(out / "x.bin", [np.arange(5000) % 32], 32)
        cases = {
            "plain": [], "fp16": ["--amp", "fp16"], "sgd": ["--optimizer", "sgd"],
            "data": ["--data", str(out / "x.bin"), "--n-workers", "1"],
            "accumulated": ["--grad-acc-steps", "2", "--sac-freq", "1/2"],
        }  # fmt: skip
        for name, flags in cases.items():
            with KEEP_ALL:
                run_here(arguments(out, name, *flags))
            again = arguments(out, f"{name}2", *flags)
            again[again.index("auto")] = str(out / name / "checkpoints/step-00000015")
            run_here(again)
            check_like(out / name, out, f"{name}2")
    return f"{len(cases)} runs in two pieces"


def main() -> None:
    """Run the parts that PART names, COUNT times each where it has a number."""
    from tests import chains

    parts = PARTS | {"chains": chains.chains, "requests": chains.requests}
    count = os.environ.get("COUNT")
    for name in (os.environ.get("PART") or " ".join(parts)).split():
        start = time.monotonic()
        done = parts[name](*([int(count)] if count else []))
        print(f"{name}: {done}; {time.monotonic() - start:.0f} s", flush=True)


PARTS = {f.__name__: f for f in (states, errors, damage, pieces, kills, ranks)}


if __name__ == "__main__":
    os.chdir(ROOT)
    torch.set_num_threads(1)
    main()
