"""Runs that are killed more than once, under every launcher: `make faults PART=chains COUNT=100`.

A chain is one training of up to four attempts. A launcher starts it again, or the user types its
command again. After each kill, at a random moment, it must go on from the newest checkpoint.
"""

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from llm_train_bench.results.result_files import read_result
from llm_train_bench.run import loop
from llm_train_bench.run.checkpoint import durable
from llm_train_bench.run.checkpoint.lineage import attempts
from llm_train_bench.run.checkpoint.manifest import committed, step_of
from tests import faults
from tests.helpers import free_port, records_of
from tests.processes import TORCHRUN, Started, signal_all, wait_until

STEPS, EVERY = 160, 20
FLAGS = [*faults.FLAGS, *f"--n-steps {STEPS} --save-every {EVERY} --bsz 2".split()]


def arguments(out: Path, name: str, *more: str) -> list[str]:
    """The command line of a run, but for its script."""
    return [str(faults.CONFIG), *FLAGS, "--output-dir", str(out), "--run-name", name, *more]


KINDS = ("script", "torchrun", "nodes", "srun", "itself")


def commands(kind, script, argv, restarts) -> list[tuple[list[str], dict[str, str]]]:
    """What a user types to start a run, with its environment: once, or on each node, or for each task.

    The script by itself, torchrun, docker/torchrun_node.sh on two nodes (as in Kubernetes and in SLURM's
    branch with docker), its agents without the shell, srun's tasks, which nothing starts again but a
    new job, or one process.
    """
    command, port, job = [script, *argv], str(free_port()), f"j{random.random()}"
    own = [sys.executable, *command]
    if kind == "script":
        return [([*own, "--nproc", "2", "--max-restarts", str(restarts)], {})]
    if kind == "torchrun":
        return [([*TORCHRUN, "2", "--max-restarts", str(restarts), *command], {})]
    if kind == "itself":
        return [(own, {})]
    if kind == "agents":
        options = "-m llm_train_bench.run.agent --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d"
        options += f" --max-restarts {restarts} --rdzv-id {job} --rdzv-endpoint 127.0.0.1:{port}"
        nodes = [f"{options} --rdzv-conf is_host={host}".split() for host in (1, 0)]
        return [([sys.executable, *flags, *command], {}) for flags in nodes]
    if kind == "nodes":
        env = {"NNODES": "2", "HEAD": "127.0.0.1", "PORT": port, "GPUS": "1", "JOB_ID": job}
        env |= {"MAX_RESTARTS": str(restarts)}
        env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        nodes = [env | {"NODE": node} for node in "01"]
        return [(["bash", "docker/torchrun_node.sh", *command], node) for node in nodes]
    env = {"SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [(own, env | {"SLURM_PROCID": i, "SLURM_LOCALID": i}) for i in "01"]


def script_of(kind: str) -> str:
    return "train.py" if kind == "itself" else "train_ddp.py"


class Job:
    """The processes of one command, or of one per node or task; what they print goes to a file."""

    def __init__(self, kind, argv, log: Path, restarts=0, **env: str):
        self.kind, self.launchers = kind, []
        for command, more in commands(kind, script_of(kind), argv, restarts):
            with log.open("a") as out:
                self.launchers.append(Started(command, more | env, stdout=out, stderr=out))

    def members(self) -> list[int]:
        return [pid for launcher in self.launchers for pid in launcher.members()]

    def ranks(self) -> dict[int, int]:
        """Rank to process id."""
        name, ranks = "SLURM_PROCID" if self.kind == "srun" else "RANK", {}
        for launcher in self.launchers:
            ranks |= launcher.ranks(name)
        return ranks

    def signal_launchers(self, number: int) -> None:
        signal_all([p.pid for p in self.launchers if p.poll() is None], number)

    def finish(self, timeout: float = 240.0) -> list[int]:
        """Exit codes, when all have ended; as srun does, all are told to end when one ends badly."""
        deadline, ending = time.monotonic() + timeout, False
        while any(p.poll() is None for p in self.launchers):
            if len(self.launchers) > 1 and not ending and any(p.poll() for p in self.launchers):
                ending, deadline = True, time.monotonic() + 30
                self.signal_launchers(signal.SIGTERM)
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(0.02)
        wait_until(lambda: not self.members(), deadline - time.monotonic())  # of a killed launcher
        self.kill()
        return [p.wait() for p in self.launchers]

    def kill(self) -> None:
        signal_all(self.members(), signal.SIGKILL)


class Watch(threading.Thread):
    """Looks at a run's directories all the time: each attempt must start from the newest checkpoint."""

    def __init__(self, out: Path, name: str, given: Path | None):
        super().__init__(daemon=True)
        self.where, self.given, self.over = (out, name), given, threading.Event()
        self.starts: dict[str, int] = {}
        self.wrong: list[str] = []

    def run(self) -> None:
        while not self.over.wait(0.005):
            for run in attempts(*self.where):
                if run.name in self.starts or not (run / "result.json").exists():
                    continue
                out, name = self.where
                saved = committed(
                    out / name / "checkpoints"
                )  # it takes longer to save its own first
                begin = saved[-1] if saved else self.given
                newest_step = step_of(begin) if begin else 0
                with contextlib.suppress(ValueError, OSError):
                    r = read_result(run / "result.json")
                    self.starts[run.name] = first = r.resumed_from.step if r.resumed_from else 0
                    if first != newest_step:
                        self.wrong.append(f"{run.name} starts at {first}, not {newest_step}")


MOMENTS: dict[str, Callable[[Path, Path, random.Random], bool]] = {
    "at a time": lambda run, place, draw: draw.random() < 0.004,
    "in set-up": lambda run, place, draw: (run / "result.json").exists(),
    "before the first save": lambda run, place, draw: (run / "steps.jsonl").exists(),
    "while training": lambda _, place, draw: len(committed(place)) >= 2 and draw.random() < 0.02,
    "during a save": lambda run, place, draw: any(place.glob(".step-*")),
}
WHO = ("one rank", "all ranks", "launcher", "everything")


def kill_once(job: Job, out: Path, name, draw, running: int, who, moment) -> bool:
    """Kill some of a job's processes at some moment of its next attempt; whether it came to that."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and all(p.poll() is None for p in job.launchers):
        runs, run, place = attempts(out, name), out / "none", out / "none"
        if len(runs) > running:
            run, place = runs[-1], out / name / "checkpoints"
        if MOMENTS[moment](run, place, draw):
            ranks = list(job.ranks().values())
            launchers = [launcher.pid for launcher in job.launchers]
            processes = {"launcher": launchers, "everything": job.members()}.get(who, ranks)
            if processes:
                one = who in ("one rank", "launcher")
                signal_all([draw.choice(processes)] if one else processes, signal.SIGKILL)
                return True
        time.sleep(0.003)
    return False


def check_causes(out: Path, name: str, kind: str) -> None:
    """Every attempt's result says what ended it; no wrong process is named."""
    paths = [run / "result.json" for run in attempts(out, name)]
    *before, end = [read_result(path) for path in paths if path.exists()]
    assert end.status == "ok", (end.status, end.error)
    # One that is "ok" was killed after its end.
    assert {r.status for r in before} <= {"ok", "failed", "killed", "interrupted", "preempted"}
    for r in before if kind in ("script", "nodes", "agents") else []:
        error = r.error or ""
        if r.status == "failed":
            assert "killed by SIGKILL" in error, (r.run_name, error)
        elif r.status == "interrupted":
            # SIGTERM: the other node's launcher was killed.
            ended = kind != "script" and "SIGTERM" in error
            assert ended or "the end of its launcher" in error, (r.run_name, error)


@dataclasses.dataclass
class Script:
    """What happens in a chain: a launcher's restarts, or its command typed again after each kill."""

    inner: bool
    resume: str  # "auto", "given" (a checkpoint of the reference), or "" where a launcher restarts
    kills: list[tuple[str, str]]  # who is killed, and at which of the MOMENTS


def draw_script(kind: str, draw: random.Random) -> Script:
    """Any that the kind of start can do."""
    inner = kind not in ("srun", "itself") and draw.random() < 0.5
    resume = draw.choice(("auto", "given", "")) if inner else "auto"
    who = ("one rank", "all ranks") if inner or kind == "srun" else WHO
    who = ("launcher",) if kind == "itself" else who
    kills = [(draw.choice(who), draw.choice(list(MOMENTS))) for _ in range(draw.randint(1, 3))]
    return Script(inner, resume, kills)


def chain(number: int, reference: Path, kind, draw: random.Random, top: Path, script) -> int:
    """One chain under one kind of start; how often it was killed."""
    name, out = f"c{number}", top / f"out{number}"
    log, kills, given = top / f"{name}.log", 0, None
    argv = arguments(out, name)
    if script.resume == "given":
        given = draw.choice(sorted((reference / "checkpoints").glob("step-*"))[:3])
    argv += ["--resume", str(given)] if given else ["--resume", "auto"] if script.resume else []
    watch = Watch(out, name, given)
    watch.start()
    job = Job(kind, argv, log, len(script.kills) if script.inner else 0)
    try:
        for who, moment in script.kills:
            running = len(attempts(out, name)) if kills else 0
            hit = kill_once(job, out, name, draw, running, who, moment)
            kills += hit
            if not script.inner:
                job.finish()
                job = Job(kind, argv, log)
            elif hit:
                time.sleep(0.5)
            if not hit:
                break
        codes = job.finish()
        assert codes == [0] * len(codes), codes
        time.sleep(0.05)
        assert not watch.wrong, watch.wrong
        expected = sorted(faults.losses_of(reference.parent, reference.name))
        expected = [x for x in expected if x[0] >= (step_of(given) if given else 0)]
        (record,) = records_of(out)
        assert record.losses == expected, {*record.losses} ^ {*expected}
        check_causes(out, name, kind)
        faults.check_like(reference, out, name)
    except BaseException as error:
        error.add_note(f"{kind}, {argv}, {watch.starts}: {log.read_text()[-3000:]}")
        raise
    finally:
        watch.over.set()
        job.kill()
        job.finish()
    shutil.rmtree(out)
    return kills


def make_reference(top: Path, name: str = "reference", world: int = 2) -> Path:
    """The run that nobody disturbs, with all of its checkpoints."""
    with faults.KEEP_ALL:
        argv, script = arguments(top, name), script_of("itself" if world == 1 else "script")
        assert faults.fork(argv, script, world)
    return top / name


def chains(count: int = 100) -> str:
    """Chains of up to four attempts under every start, in turn."""
    draw, kills = random.Random(os.environ.get("SEED", "5")), 0
    with tempfile.TemporaryDirectory(prefix="chains-") as top:
        together, alone = make_reference(Path(top)), make_reference(Path(top), "alone", 1)
        for number in range(count):
            kind = KINDS[number % len(KINDS)]
            reference = alone if kind == "itself" else together
            begin = time.monotonic()
            done = chain(number, reference, kind, draw, Path(top), draw_script(kind, draw))
            kills += done
            took = time.monotonic() - begin
            print(f"  chain {number}: {kind}, {done} kills, {took:.0f} s", flush=True)
    return f"{kills} kills in {count} chains, 0 of them wrong"


@contextlib.contextmanager
def slow_disk(seconds: float) -> Iterator[None]:
    """What is forked inside writes so slowly; rank 1 is late in each step."""

    def write(self, path, parts, real=durable.Files.write):
        if path.name != "manifest.json":
            time.sleep(seconds)
        return real(self, path, parts)

    def rate(*args, real=loop.learning_rate):
        time.sleep(0.004 * (os.environ.get("RANK") == "1"))
        return real(*args)

    disk = mock.patch.object(durable.Files, "write", write)
    with disk, mock.patch.object(loop, "learning_rate", rate):
        yield


def wait_for(condition: Callable[[], object], job: Job, log: Path) -> None:
    ended = lambda: all(p.poll() is not None for p in job.launchers)  # noqa: E731
    assert wait_until(lambda: condition() or ended(), 120), log.read_text()[-2000:]
    assert not ended(), log.read_text()[-2000:]


@contextlib.contextmanager
def running(kind: str, top: Path, *flags: str, slow: float | None = None, **env: str):
    """A run "r" in its own directory, ended in any case; on a disk with `slow` seconds a file."""
    out = Path(tempfile.mkdtemp(dir=top, prefix=kind))
    argv, log = arguments(out, "r", *flags), out.with_suffix(".log")
    with contextlib.nullcontext() if slow is None else slow_disk(slow):
        job = Job(kind, argv, log, **env)
    try:
        wait_for((out / "r/steps.jsonl").exists, job, log)
        yield job, out, log, argv
    finally:
        job.kill()


ENDLESS = ["--save-every", "100000", "--n-steps", "100000"]


def check_saved_on_request(request: str, top: Path, early=False) -> None:
    """A signal saves all ranks at one step, on a disk slower than the agent would wait; 75 says so.

    The request has a kind of start, who is told, and the signal; `early` is before the first step.
    """
    kind, who, name = request.split()
    number = signal.Signals[f"SIG{name}"]
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    with running(kind, top, *ENDLESS, slow=4.0, **patience) as (job, out, log, _):
        if not early:
            wait_for(lambda: (out / "r/steps.jsonl").stat().st_size, job, log)
        if who == "launchers":
            job.signal_launchers(number)
        else:
            signal_all([job.launchers[0].pid if who == "one" else job.ranks()[1]], number)
        codes = job.finish(90)
    assert set(codes) == {75}, (request, codes, log.read_text()[-2000:])
    r, checkpoint = read_result(out / "r/result.json"), faults.last_of(out / "r/checkpoints")
    assert r.status == "preempted", r.error
    assert r.error == f"saved at step {step_of(checkpoint)} and stopped by SIG{name}"
    assert "Traceback" not in log.read_text() and len(committed(out / "r/checkpoints")) == 1


def check_second_signal(kind: str, top: Path) -> None:
    """It ends the run at once, a second after the first, while a disk stands still."""
    with running(kind, top, *ENDLESS, slow=50.0) as (job, out, log, _):
        wait_for(lambda: (out / "r/steps.jsonl").stat().st_size, job, log)
        job.signal_launchers(signal.SIGTERM)
        wait_for(lambda: list((out / "r/checkpoints").glob(".step*")), job, log)
        time.sleep(0.5)
        job.signal_launchers(signal.SIGTERM)
        begin = time.monotonic()
        codes = job.finish(60)
        took = time.monotonic() - begin
    r = read_result(out / "r/result.json")
    said = took, codes, log.read_text()[-2000:]
    assert took < 25 and set(codes) == {1 if kind == "torchrun" else 130}, said
    why = "a second signal" if kind in ("script", "agents") else "SIGTERM"
    assert (r.status, r.error) == ("interrupted", f"interrupted by {why}"), r.error
    assert "Traceback" not in log.read_text() and not committed(out / "r/checkpoints")


def check_second_run(top: Path) -> None:
    """The same command while the first still runs is refused, and disturbs nothing."""
    with running("script", top, "--n-steps", "2000", "--resume", "auto") as (job, out, log, argv):
        wait_for(lambda: list((out / "r/checkpoints").glob("step-*")), job, log)
        for kind in ("script", "srun"):
            assert 2 in Job(kind, argv, top / "other.log").finish(90)
        why = f"another run saves there: process {job.ranks()[0]} on"
        assert (top / "other.log").read_text().count(why) >= 2
        assert [p.name for p in out.iterdir()] == ["r"]
        signal_all([job.launchers[0].pid], signal.SIGTERM)
        assert job.finish() == [75], log.read_text()


def requests(count: int = 0) -> str:
    """Signals to launchers and ranks, once and twice, on slow disks; a second run of the same name."""
    early = ("script launchers USR1", "srun launchers USR1", "itself launchers USR1")
    cases = ("script launchers TERM", "agents launchers TERM", "agents one TERM", "srun launchers TERM",
             "script rank USR1", "agents rank INT", *early)  # fmt: skip
    twice = ("script", "agents", "srun", "itself")
    with tempfile.TemporaryDirectory(prefix="requests-") as top:
        for case in cases:
            check_saved_on_request(case, Path(top), case in early)
            print(f"  {case}", flush=True)
        for kind in twice:
            check_second_signal(kind, Path(top))
            print(f"  {kind}, twice", flush=True)
        check_second_run(Path(top))
    return f"{len(cases) + len(twice)} requests, a second run"
