"""The campaign against checkpoints: crashes at every call, kills, damage, full disks, and mutants.

    make faults                    all parts, at most 90 minutes
    make faults PART=kills COUNT=50

tests/test_checkpoint.py runs a short form. Each part returns what it did, and fails by AssertionError.
"""

import contextlib
import dataclasses
import errno
import io
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

import train
import train_ddp
import train_fsdp
from llm_train_bench.apply import precision
from llm_train_bench.model.layout import ALONE as ALONE_HERE
from llm_train_bench.model.stored import DTYPES, read_block
from llm_train_bench.parallel.ranks import ALONE, MEETING, Ranks
from llm_train_bench.results.schema import Lineage, Metrics
from llm_train_bench.run.checkpoint import saver
from llm_train_bench.run.checkpoint.durable import Files
from llm_train_bench.run.checkpoint.lineage import Attempt, Lease, open_place, places
from llm_train_bench.run.checkpoint.manifest import committed, newest, read_manifest, verify
from llm_train_bench.run.launch import train_planned
from tests.helpers import ROOT, plan_of

# A model so small that a save is a few kilobytes; with dropout, so that its state counts, and without.
CONFIG, PLAIN = (ROOT / f"tests/configs/{name}.json" for name in ("micro", "micro-plain"))
SHAPE = json.loads(CONFIG.read_text())
FLAGS = ["--seq-len", "8", "--bsz", "4", "--device", "cpu", "--amp", "off", "--no-tensorboard",
         "--warmup-steps", "2", "--lr-warmup-steps", "4", "--lr", "1e-2"]  # fmt: skip
STEPS, EVERY = 40, 5


def whole_state(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, which must verify."""
    stored = verify(directory).tensors
    return {
        name: read_block(directory, name, t.parts, [0] * len(t.shape), t.shape, DTYPES[t.dtype])
        for name, t in stored.items()
    }


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), f"{name} differs"


class Crash(BaseException):
    """The machine stops here."""


class CrashingFiles(Files):
    """Stops before, or in the middle of, the n-th call; can then undo what no call had made durable.

    A write that was not synchronised may be on disk in part; a name that was not may be missing.
    """

    def __init__(self, at: int = 10**9, torn: float = 1.0, error: int | None = None):
        self.at, self.torn, self.error = at, torn, error
        self.calls: list[str] = []
        self.unsynced: list[Callable[[], None]] = []
        self.written: list[Path] = []

    def _call(self, name: str) -> bool:
        """Count a call; whether it is the one that fails."""
        self.calls.append(name)
        return len(self.calls) - 1 == self.at

    def _fail(self) -> None:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        raise Crash

    def make(self, directory: Path) -> None:
        if self._call("make"):
            self._fail()
        super().make(directory)
        self.unsynced.append(lambda: shutil.rmtree(directory, ignore_errors=True))

    def write(self, path: Path, parts) -> tuple[int, int]:
        parts = [bytes(p) for p in parts]
        if self._call("write"):
            content = b"".join(parts)
            path.write_bytes(content[: int(self.torn * len(content))])
            self._fail()
        self.written.append(path)
        return super().write(path, parts)

    def synchronize(self, descriptor: int) -> None:
        if self._call("synchronize"):
            size = os.fstat(descriptor).st_size
            os.ftruncate(descriptor, int(self.torn * size))
            self._fail()
        super().synchronize(descriptor)
        self.written = [p for p in self.written if not _is_open_at(p, descriptor)]

    def synchronize_names(self, directory: Path) -> None:
        if self._call("synchronize names"):
            self._fail()
        super().synchronize_names(directory)
        self.unsynced.clear()

    def rename(self, old: Path, new: Path) -> None:
        if self._call("rename"):
            self._fail()
        super().rename(old, new)
        self.unsynced.append(lambda: new.rename(old) if new.exists() else None)

    def remove(self, directory: Path) -> None:
        if self._call("remove"):
            for path in itertools.islice(sorted(directory.iterdir()), 1):  # half of it
                path.unlink()
            self._fail()
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


def _is_open_at(path: Path, descriptor: int) -> bool:
    return path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))


class OneRun:
    """A saver of one rank without a run around it: `save(step)` saves a state that tells the step."""

    def __init__(self, directory: Path, files: Files):
        plan = plan_of([CONFIG, *FLAGS, "--save-every", EVERY], "train.py", 1, "cpu")
        self.parameter = torch.nn.Parameter(torch.zeros(6, 4))
        model = types.SimpleNamespace(
            weights=lambda: [("w", self.parameter)], config=None, layout=ALONE_HERE
        )
        optimizer = torch.optim.SGD([self.parameter], momentum=0.9)
        optimizer.state[self.parameter]["momentum_buffer"] = torch.zeros(6, 4)
        result = types.SimpleNamespace(
            run_name="r", args=dataclasses.asdict(plan.args), notes=[], metrics=Metrics()
        )
        log = types.SimpleNamespace(steps=[], pause=lambda: None, start=lambda: None)
        (directory / "steps.jsonl").touch()
        place = (directory / "checkpoints").resolve()
        line = Lineage(id="one", name="r", attempt=0, began=0.0, started=0.0)
        attempt = Attempt(line, directory, place, leases=[Lease(place)])
        self.leases = attempt.leases
        attempt.checkpoint = newest([place])
        attempt.manifest = attempt.checkpoint and read_manifest(attempt.checkpoint)
        open_place(attempt)
        run = types.SimpleNamespace(
            plan=plan, ranks=ALONE, device=torch.device("cpu"), result=result, log=log, scaler=None,
            directory=directory, attempt=attempt, hang=None, end_steps=lambda: None, fp8=None,
            steps=(directory / "steps.jsonl").open("a"),
        )  # fmt: skip
        self.run, self.notes = run, result.notes
        with mock.patch.object(saver, "say", lambda text: None):
            self.saver = saver.Saver(run, model, optimizer, place, files)

    def save(self, step: int) -> None:
        with torch.no_grad():
            self.parameter.fill_(step)
        with (
            mock.patch.object(saver, "say", lambda text: None),
            mock.patch.object(saver.threading, "Thread", Inline),  # a crash must end the caller
        ):
            self.saver._save(step)
            self.saver.finish()

    def end(self) -> None:
        """As the kernel does when a process ends."""
        self.run.steps.close()
        for lease in self.leases:
            lease.release()


class Inline:
    """A thread that runs when it is started."""

    def __init__(self, target=lambda: None, args=(), daemon=True, name=""):
        self.work = lambda: target(*args)

    def start(self) -> None:
        self.work()

    def join(self, timeout) -> None: ...
    def is_alive(self) -> bool:
        return False


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


def crash_states() -> Iterator[tuple[CrashingFiles, Path]]:
    """Every state that a machine can leave behind which stops in the fourth save of a run."""
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
            yield files, here


def states(count: int = 0) -> str:
    """Property: the newest good checkpoint is the one before or the new one, whole."""
    n = 0
    for files, here in crash_states():
        found = newest([here / "checkpoints"])
        assert found is not None, files.calls
        step = verify(found).step
        assert step in (15, 20), (step, files.calls)
        state = whole_state(found)
        assert (state["p/w"] == step).all() and state["momentum_buffer/w"].shape == (6, 4)
        # The next run cleans up, saves, and has at most the two that are kept.
        again = OneRun(here, Files())
        again.save(25)
        again.end()
        left = sorted(p.name for p in (here / "checkpoints").iterdir())
        left = [name for name in left if not name.startswith("damaged-step-00000020-")]
        assert left[:2] == ["lineage.json", "lineage.lock"] and len(left) <= 4, left
        left = left[2:]
        assert all(name.startswith("step-") for name in left) and left[-1] == "step-00000025", left
        n += 1
    return f"{n} crash states"


def errors(count: int = 0) -> str:
    """ENOSPC, EIO and EDQUOT at every call: the save fails, is told, and nothing before is lost."""
    with stopped_runs() as (again, calls):
        cases = list(itertools.product((errno.ENOSPC, errno.EIO, errno.EDQUOT), range(len(calls))))
        for number, at in cases:
            run, here = again(CrashingFiles(at, 0.5, number))
            run.save(20)
            step = verify(newest([here / "checkpoints"])).step
            assert step in (15, 20)
            assert run.notes or step == 20, calls[at]
            assert step == 20 or os.strerror(number) in run.notes[0]
    return f"{len(cases)} failed calls"


def damage(count: int = 10_000) -> str:
    """Flips, truncations, swaps and losses of a committed checkpoint: the one before is taken."""
    draw, kinds = random.Random(1), {"flip": 0, "cut": 0, "gone": 0, "swap": 0}
    with tempfile.TemporaryDirectory() as top:
        base = Path(top)
        run = OneRun(base, Files())
        for step in (5, 10):
            run.save(step)
        before, last = committed(base / "checkpoints")
        names = sorted(p.name for p in last.iterdir())
        contents = {name: (last / name).read_bytes() for name in names}
        for _ in range(count):
            kind, name = draw.choice(list(kinds)), draw.choice(names)
            content = contents[name]
            if kind == "flip":
                i, bit = draw.randrange(len(content)), 1 << draw.randrange(8)
                changed = content[:i] + bytes([content[i] ^ bit]) + content[i + 1 :]
                (last / name).write_bytes(changed)
            elif kind == "cut":
                (last / name).write_bytes(content[: draw.randrange(len(content))])
            elif kind == "gone":
                (last / name).unlink()
            else:
                (last / name).write_bytes((before / name).read_bytes())
            # A manifest that was swapped for the one before names other checksums.
            assert newest([base / "checkpoints"]) == before, (kind, name)
            (last / name).write_bytes(content)
            kinds[kind] += 1
        assert newest([base / "checkpoints"]) == last
    return ", ".join(f"{n} {kind}s" for kind, n in kinds.items())


def arguments(out: Path, name: str, *more: str, config: Path = CONFIG) -> list[str]:
    """A short run that saves often and goes on by itself."""
    return [str(config), *FLAGS, "--n-steps", str(STEPS), "--output-dir", str(out), "--run-name", name,
            "--save-every", str(EVERY), "--resume", "auto", *more]  # fmt: skip


def run_here(argv: list[str]) -> None:
    """train.py in this process, quietly."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        train_planned(train.train, argv, "train.py", ALONE)


def fork(argv: list[str], kill_after: float | None = None, files: Files | None = None) -> int:
    """train.py in a forked child, killed outright after some seconds; the child's wait status."""
    child = os.fork()
    if not child:
        code = 1
        try:
            torch.set_num_threads(1)  # OpenMP's other threads were not forked
            if files is not None:
                saver.Files = lambda: files
            run_here(argv)
            code = 0
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def losses_of(out: Path, name: str) -> Iterator[tuple[int, float]]:
    """Step and loss of every line of every attempt of a run."""
    for path in [out / name / "steps.jsonl", *out.glob(f"{name}-restart*/steps.jsonl")]:
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):  # cut off by the kill
                step = json.loads(line)
                yield step["step"], step["loss"]


def check_like(reference: Path, out: Path, name: str) -> None:
    """A run in pieces has ended as the undisturbed one: state, losses, and nothing left behind."""
    found = places(out, name)
    assert_equal(whole_state(newest(found)), whole_state(newest([reference / "checkpoints"])))
    expected = dict(losses_of(reference.parent, reference.name))
    for step, loss in losses_of(out, name):
        assert loss == expected[step], (step, loss, expected[step])
    assert len(found) == 1 and len(committed(found[0])) <= 2 and not list(found[0].glob(".*"))


class KillingFiles(CrashingFiles):
    """Kills its process at the n-th call."""

    def _fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def calls(count: int = 0) -> str:
    """kill -9 of a real run at every durable call of its first three saves."""
    n = 0
    with tempfile.TemporaryDirectory() as top:
        out = Path(top)
        run_here(arguments(out, "reference"))
        for at in range(45):
            name = f"r{at}"
            fork(arguments(out, name), files=KillingFiles(at, torn=0.5))
            assert fork(arguments(out, name)) == 0
            check_like(out / "reference", out, name)
            n += 1
    return f"{n} kills at a call"


def kills(count: int = 1000) -> str:
    """Random kills of one rank, from a process that is warm already."""
    draw, n, runs = random.Random(2), 0, 0
    with tempfile.TemporaryDirectory() as top:
        out = Path(top)
        run_here(arguments(out, "warm"))
        start = time.monotonic()
        fork(arguments(out, "reference"))
        takes = time.monotonic() - start
        while n < count:
            name = f"r{runs}"
            for _ in range(12):
                n += 1
                if fork(arguments(out, name), draw.uniform(0.02, 1.1 * takes)) == 0:
                    break
            else:
                assert fork(arguments(out, name)) == 0
            check_like(out / "reference", out, name)
            for path in out.glob(f"{name}*"):
                shutil.rmtree(path)
            runs += 1
    return f"{n} kills in {runs} runs, 0 of them wrong"


LAYOUTS = (
    ("train.py", 1, []), ("train_ddp.py", 2, []), ("train_fsdp.py", 2, []), ("train_fsdp.py", 4, []),
    ("train_fsdp.py", 4, ["--dp-replicate", "2"]), ("train_ddp.py", 4, []),
)  # fmt: skip


def fork_rank(script: str, argv: list[str], rank: int, world: int, meeting: Path) -> int:
    """One rank of a run as a forked child; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
                       "GLOO_SOCKET_IFNAME": "lo", MEETING: str(meeting)}  # fmt: skip
        ranks = Ranks(rank, world, rank) if world > 1 else ALONE
        entry = {"train.py": train, "train_ddp.py": train_ddp, "train_fsdp.py": train_fsdp}[script]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            train_planned(entry.train, argv, script, ranks)
        code = 0
    finally:
        os._exit(code)


def fork_ranks(script, world, argv, kill_after: float | None, draw: random.Random) -> bool:
    """All ranks of a run, of which one or all are killed after some seconds; whether all ended well."""
    with tempfile.TemporaryDirectory() as meeting:
        children = [fork_rank(script, argv, rank, world, Path(meeting)) for rank in range(world)]
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


def by_forks(script, world, argv, extra, draw, last: bool) -> tuple[bool, bool]:
    """An attempt by forked ranks: whether it was killed, and whether it ended well."""
    argv = [*argv, "--bsz", str(4 // world), *extra]
    argv += ["--dist-timeout", "15"] if world > 1 else []
    wait = None if last else draw.uniform(0.1, 2.5)
    return not last, fork_ranks(script, world, argv, wait, draw)


def by_commands(script, world, argv, extra, draw, last: bool) -> tuple[bool, bool]:
    """An attempt as a user starts it; the last is one of train.py that nobody disturbs."""
    if last:
        script, world, extra = LAYOUTS[0]
    more = ["--nproc", str(world), "--dist-timeout", "60"] if world > 1 else []
    process = subprocess.Popen(
        [sys.executable, str(ROOT / script), *argv, "--bsz", str(4 // world), *more, *extra],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    how = "none" if last else draw.choice(["kill", "terminate", "rank", "none"])
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=180 if last else draw.uniform(1.0, 14.0))
    if hit := process.poll() is None and how != "none":
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        victim = int(draw.choice(children)) if how == "rank" and children else process.pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGTERM if how == "terminate" else signal.SIGKILL)
    return hit, process.wait(timeout=180) == 0


def changing(attempt: Callable[..., tuple[bool, bool]], tries: int, count: int, seed: int) -> str:
    """Kills of runs that have another script or number of ranks at each attempt."""
    draw, n, runs = random.Random(seed), 0, 0
    # Adam would blow up the rounding errors of gradients that are zero, as of the keys' biases.
    sgd = ["--optimizer", "sgd", "--lr", "0.1"]
    with tempfile.TemporaryDirectory() as top:
        out = Path(top)
        run_here(arguments(out, "reference", *sgd, config=PLAIN))
        reference = whole_state(newest([out / "reference/checkpoints"]))
        losses = dict(losses_of(out, "reference"))
        while n < count:
            name, done = f"r{runs}", False
            argv = arguments(out, name, *sgd, config=PLAIN)
            for number in range(tries):
                script, world, extra = draw.choice(LAYOUTS)
                hit, done = attempt(script, world, argv, extra, draw, number == tries - 1)
                n += hit
                if done:
                    break
            found = newest(places(out, name))
            assert done and verify(found).step == STEPS + 2, (name, script, world)
            for key, tensor in whole_state(found).items():
                far = (tensor.double() - reference[key].double()).abs().max()
                assert far < 1e-4, (key, far)
            for step, loss in losses_of(out, name):
                assert abs(loss - losses[step]) < 1e-5, (step, loss, losses[step])
            for path in out.glob(f"{name}*"):
                shutil.rmtree(path)
            runs += 1
    return f"{n} kills in {runs} runs of changing layouts, 0 of them wrong"


def ranks(count: int = 300) -> str:
    """Kills of 1 to 4 gloo ranks from a warm process."""
    return changing(by_forks, 8, count, 4)


def commands(count: int = 50) -> str:
    """Kills of real command lines."""
    return changing(by_commands, 7, count, 3)


def disk(count: int = 10) -> str:
    """A limit on file sizes at ten levels stands for a full disk: the run goes on, and says so."""
    told = 0
    with tempfile.TemporaryDirectory() as top:
        out = Path(top)
        run_here(arguments(out, "reference"))
        largest = max(p.stat().st_size for p in out.rglob("*.safetensors"))
        for level in range(count):
            child = os.fork()
            if not child:
                try:
                    torch.set_num_threads(1)
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                    limit = int(largest * level / count)
                    real = Files.write

                    def write(self, path, parts, limit=limit, real=real):
                        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                        try:
                            return real(self, path, parts)
                        finally:
                            unlimited = resource.RLIM_INFINITY
                            resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))

                    Files.write = write
                    run_here(arguments(out, f"r{level}"))
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            result = json.loads((out / f"r{level}" / "result.json").read_text())
            assert result["status"] == "ok" and any("was not saved" in n for n in result["notes"])
            assert committed(out / f"r{level}" / "checkpoints") == []
            assert not list((out / f"r{level}" / "checkpoints").glob(".step*"))
            told += 1
    return f"{told} levels of a full disk"


def pieces(count: int = 0) -> str:
    """Runs in two pieces: dropout, fp16 whose scale moves, SGD, a token file read by a process."""
    import numpy as np

    from llm_train_bench.apply.tokens import write_tokens

    with (
        tempfile.TemporaryDirectory() as top,
        mock.patch.object(precision.LossScaler, "GROWTH_STEPS", 3),
    ):
        out = Path(top)
        write_tokens(out / "x.bin", [np.arange(5000) % 32], 32)
        cases = {
            "plain": [], "fp16": ["--amp", "fp16"], "sgd": ["--optimizer", "sgd"],
            "data": ["--data", str(out / "x.bin"), "--n-workers", "1"],
            "accumulated": ["--grad-acc-steps", "2", "--sac-freq", "1/2"],
        }  # fmt: skip
        for name, flags in cases.items():
            argv = arguments(out, name, "--save-keep", "100", *flags)
            run_here(argv)
            again = arguments(out, f"{name}2", *flags)
            again[again.index("auto")] = str(out / name / "checkpoints/step-00000015")
            run_here(again)
            check_like(out / name, out, f"{name}2")
    return f"{len(cases)} runs in two pieces"


# Parts of the product, each without one thing: file, what stands there, what instead, and the tests
# one of which must then fail.
CHECKPOINT = "llm_train_bench/run/checkpoint"
SOURCE_MUTANTS = [
    ("manifest.py", 'raise ValueError(f"{name} is not what', 'print(f"{name}', "small and damage"),
    ("manifest.py", "in newest_first[keep:]:  #", "in newest_first:  #", "campaign and states"),
    ("saver.py", "            commit(part,", "            retain([self.directory], 0, self.files)\n"
     "            commit(part,", "campaign and states"),
    ("saver.py", "set_random_state(directory, run.ranks.rank, run.device)", "...", "campaign and pieces"),
    ("../../apply/precision.py", 'STATE = ("scale", "good_steps", "skipped")', "STATE = ()",
     "campaign and pieces"),
    ("saver.py", "        self.run.result.notes.append(text)\n", "", "campaign and errors"),
    ("durable.py", "        shutil.rmtree(directory)\n", "        ...\n", "campaign_in_small and disk"),
    ("durable.py", "            self.synchronize(f.fileno())\n", "", "synchronised_first"),
    ("durable.py", "        os.fsync(descriptor)\n\n    def syn", "        ...\n\n    def syn",
     "synchronised_first"),
    ("durable.py", "    files.synchronize_names(part)\n", "", "synchronised_first"),
    ("durable.py", "    files.synchronize_names(final.parent)\n", "", "synchronised_first"),
    ("durable.py", "            os.fsync(descriptor)\n        fin", "            ...\n        fin",
     "synchronised_first"),
    ("manifest.py", "        verify(newest_first[0])\n", "        pass\n", "other_bytes"),
    ("manifest.py", "key=step_of, reverse=True", "key=step_of", "other_bytes or damaged_checkpoint"),
    ("manifest.py", "if (stored.bytes, stored.crc32) != (found.bytes, found.crc32):", "if False:",
     "token_file"),
    ("manifest.py", "(seen.bytes, seen.mtime_ns) == (size, stat.st_mtime_ns)", "seen.bytes == size",
     "token_file"),
    ("../../compare/find_results.py", "for number in sorted(attempts)]",
     "for number in sorted(attempts, reverse=True)]", "whole_chain"),
    ("lineage.py", "        if locked is not False and (", "        if True or (", "two_runs"),
    ("lineage.py", "or not self._renewed())", "or True)", "another_host"),
    ("lineage.py", "                if committed(attempt.place):", "                if False:",
     "another_run_are_not_touched"),
    ("lineage.py", "if step_of(path) > start:", "if False:", "damaged_checkpoint"),
    ("lineage.py", "        clean(lease.place, Files())\n", "", "campaign and states"),
    ("lineage.py", 'own = [p for p in map(Path, word["places"]) if p.is_dir()]', "own = []",
     "whole_chain"),
    ("lineage.py", "    if last and last.name == name:", "    if last:", "another_name"),
    ("lineage.py", "        if link.is_symlink() and not link.exists():", "        if False:",
     "cannot_be_read"),
    ("saver.py", "signal.SIGTERM, signal.SIGUSR1)\n#", "signal.SIGTERM)\n#", "on_request"),
    ("saver.py", "            if heard.again(number):", "            if False:", "second_signal"),
    ("saver.py", "    torch.manual_seed(seed)\n", "", "numbers_of_its_own"),
    ("saver.py", "        start = time.perf_counter()\n        self.finish()\n",
     "        start = time.perf_counter()\n", "waits_for_the_one_before"),
    ("saver.py", "if not save.fate.acquire(blocking=False):\n                raise", "if False:\n"
     "                raise", "never_committed"),
    ("saver.py", "        if self.given_up:\n", "        if False:\n", "never_committed"),
    ("saver.py", "not all(lease.held() for lease in self.run.attempt.leases)", "False",
     "lost_its_place"),
    ("saver.py", "            self.files.synchronize(self.run.steps.fileno())\n", "",
     "synchronised_first"),
    ("saver.py", "own = {*self.run.attempt.own, self.directory}", "own = {self.directory}",
     "another_place"),
    ("../../measure/steps.py", "# before the window's first step\n            self.steps[-1] = "
     "dataclasses.replace(self.steps[-1], saved=True)\n        self.drain()\n", "\n            pass\n",
     "losses_are_on_disk"),
    ("../life.py", ", start_sample=before.samples", ", start_sample=before.step * plan.work.batch."
     "global_batch", "another_batch"),
    ("../agent.py", "                config.shutdown_timeout = patience\n", "                pass\n",
     "on_request"),
    ("../agent.py", "                codes.append(_told(", "                codes.append(1 or _told(",
     "test_a_chain_ends"),
    ("../../parallel/ranks.py", "    return os.environ.get(ROUND) or os", "    return os",
     "test_a_chain_ends"),
]  # fmt: skip


def source_mutants(count: int = 100) -> str:
    """The product with one thing taken out: one of the tests that are named for it must fail."""
    first = int(os.environ.get("FIRST", 0))
    for number, (name, old, new, tests) in enumerate(SOURCE_MUTANTS[:count]):
        if number < first:
            continue
        with tempfile.TemporaryDirectory(prefix="mutant-") as top:
            files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
            for path in files.strip("\0").split("\0"):
                (Path(top) / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, Path(top) / path, follow_symlinks=False)
            path = Path(top) / CHECKPOINT / name
            assert path.read_text().count(old) == 1, (name, old)
            path.write_text(path.read_text().replace(old, new))
            argv = ["-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-k", tests]
            argv += ["tests/test_checkpoint.py", "tests/test_chains.py"]
            done = subprocess.run([sys.executable, *argv], cwd=top, capture_output=True, text=True)
            assert done.returncode == 1, f"the mutant lives: {name}: {old} ({done.stdout[-300:]})"
            print(f"  {number}: {path.name}: {tests}", flush=True)
    return f"{len(SOURCE_MUTANTS[:count])} mutants of the source, all caught"


def main() -> None:
    """Run the parts that PART names, COUNT times each where it has a number."""
    from tests import chains

    parts = PARTS | {"chains": chains.chains, "requests": chains.requests}
    count = os.environ.get("COUNT")
    for name in (os.environ.get("PART") or " ".join(parts)).split():
        start = time.monotonic()
        told = parts[name](*([int(count)] if count else []))
        print(f"{name}: {told}; {time.monotonic() - start:.0f} s", flush=True)


PARTS = {f.__name__: f for f in (states, errors, damage, pieces, calls, kills, ranks, commands, disk,
                                 source_mutants)}  # fmt: skip


if __name__ == "__main__":
    os.chdir(ROOT)
    torch.set_num_threads(1)
    main()
