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
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from llm_train_bench.compare.find_results import read_records
from llm_train_bench.compare.records import LogFacts
from llm_train_bench.results.result_files import read_result
from llm_train_bench.run.checkpoint.lineage import attempts, places
from llm_train_bench.run.checkpoint.manifest import candidates, committed, newest, step_of, verify
from tests import faults
from tests.helpers import ROOT, TORCHRUN, free_port, processes_with

STEPS, EVERY = 160, 20
MARK = "LLM_TRAIN_BENCH_CHAIN"
FLAGS = [*faults.FLAGS, *f"--n-steps {STEPS} --save-every {EVERY} --bsz 2".split()]


def arguments(out: Path, name: str, *more: str) -> list[str]:
    """The command line of a run, but for its script."""
    return [str(faults.CONFIG), *FLAGS, "--output-dir", str(out), "--run-name", name, *more]


KINDS = ("script", "torchrun", "nodes", "srun", "itself")


def commands(
    kind: str, script: str, argv: list[str], restarts: int
) -> list[tuple[list[str], dict]]:
    """What a user types to start a run, with its environment: once, or on each node, or for each task.

    The script by itself, torchrun, docker/torchrun_node.sh on two nodes (as in Kubernetes and in SLURM's
    branch with docker), srun's tasks, which nothing starts again but a new job, or one process.
    """
    python, again = [sys.executable], ["--max-restarts", str(restarts)]
    if kind == "script":
        return [([*python, script, *argv, "--nproc", "2", *again], {})]
    if kind == "torchrun":
        return [([*TORCHRUN, "2", *again, script, *argv], {})]
    if kind == "nodes":
        shared = {"NNODES": "2", "HEAD": "127.0.0.1", "PORT": str(free_port()), "GPUS": "1",
                  "JOB_ID": f"j{random.random()}", "MAX_RESTARTS": str(restarts),
                  "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # fmt: skip
        command = ["bash", "docker/torchrun_node.sh", script, *argv]
        return [(command, shared | {"NODE": str(node)}) for node in (0, 1)]
    if kind == "srun":
        shared = {"SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "127.0.0.1"}
        shared["MASTER_PORT"] = str(free_port())
        tasks = ({"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in (0, 1))
        return [([*python, script, *argv], shared | task) for task in tasks]
    return [([*python, script, *argv], {})]


@dataclasses.dataclass
class Job:
    """The processes of one command, or of one a node or task."""

    kind: str
    launchers: list[subprocess.Popen]
    mark: str

    def members(self) -> dict[int, dict[str, str]]:
        """Living processes of this job, with their environments."""
        return processes_with(f"{MARK}={self.mark}")

    def ranks(self) -> dict[int, int]:
        """Rank to process."""
        name = "SLURM_PROCID" if self.kind == "srun" else "RANK"
        return {int(env[name]): pid for pid, env in self.members().items() if name in env}

    def finish(self, timeout: float = 240.0) -> list[int]:
        """Exit codes, when all have ended; as srun does, all are told to end when one ends badly."""
        deadline, told = time.monotonic() + timeout, False
        while any(p.poll() is None for p in self.launchers):
            if len(self.launchers) > 1 and not told and any(p.poll() for p in self.launchers):
                told, deadline = True, time.monotonic() + 30
                signal_all([p.pid for p in self.launchers if p.poll() is None], signal.SIGTERM)
            if time.monotonic() > deadline:
                signal_all(list(self.members()), signal.SIGKILL)
            time.sleep(0.02)
        while self.members() and time.monotonic() < deadline:  # ranks of a killed launcher
            time.sleep(0.05)
        signal_all(list(self.members()), signal.SIGKILL)
        for p in self.launchers:
            p.communicate()
        return [p.returncode for p in self.launchers]


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def start(
    kind: str,
    argv: list[str],
    restarts: int = 0,
    log: Path | None = None,
    script: str = "train_ddp.py",
    more: dict[str, str] | None = None,
) -> Job:
    """Start a job, with more variables; what it prints goes to a file."""
    mark = f"{random.random()}"
    own, launchers = os.environ | {"OMP_NUM_THREADS": "1", MARK: mark}, []
    for command, env in commands(kind, script, argv, restarts):
        with (log or Path(os.devnull)).open("a") as out:
            launchers.append(
                subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out,
                                 env=own | env | (more or {}))
            )  # fmt: skip
    return Job(kind, launchers, mark)


class Watch(threading.Thread):
    """Looks at a run's directories all the time: each attempt must start from the newest checkpoint."""

    def __init__(self, out: Path, name: str, save_dir: str | None, given: Path | None):
        super().__init__(daemon=True)
        self.out, self.name_of_run, self.save_dir = out, name, save_dir
        self.given, self.wrong, self.over = given, [], threading.Event()
        self.seen: dict[str, int] = {}

    def committed(self) -> int:
        """The newest committed step, or where the run was told to start; 0 for none."""
        found = candidates(places(self.out, self.name_of_run, self.save_dir))
        return step_of(found[0]) if found else step_of(self.given) if self.given else 0

    def run(self) -> None:
        while not self.over.wait(0.005):
            for run in attempts(self.out, self.name_of_run):
                if run.name in self.seen or not (run / "result.json").exists():
                    continue
                newest_step = self.committed()  # it takes longer to save its own first
                with contextlib.suppress(ValueError, OSError):
                    r = read_result(run / "result.json")
                    first = r.resumed_from.step if r.resumed_from else 0
                    self.seen[run.name] = first
                    if first != newest_step:
                        self.wrong.append(f"{run.name} starts at {first}, not {newest_step}")


MOMENTS: dict[str, Callable[[Path, Path, random.Random], bool]] = {
    "at a time": lambda run, place, draw: draw.random() < 0.004,
    "in set-up": lambda run, place, draw: (run / "result.json").exists(),
    "before the first save": lambda run, place, draw: (run / "steps.jsonl").exists(),
    "while training": lambda run, place, draw: (
        len(list(place.glob("step-*"))) >= 2 and draw.random() < 0.02
    ),
    "during a save": lambda run, place, draw: any(place.glob(".step-*")),
}
WHO = ("one rank", "all ranks", "launcher", "everything")


def kill_once(job: Job, out: Path, name: str, save_dir: str | None, draw: random.Random,
              running: int, who: str, moment: str) -> bool:  # fmt: skip
    """Kill some of a job's processes at some moment of its next attempt; whether it came to that."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and all(p.poll() is None for p in job.launchers):
        runs = attempts(out, name)
        run = runs[-1] if len(runs) > running else out / "none"
        own = Path(save_dir) / name if save_dir else out / name / "checkpoints"
        if MOMENTS[moment](run, own if len(runs) > running else out / "none", draw):
            ranks = list(job.ranks().values())
            if not ranks and who in ("one rank", "all ranks"):
                continue
            victims = {
                "one rank": [draw.choice(ranks)] if ranks else [], "all ranks": ranks,
                "launcher": [draw.choice(job.launchers).pid], "everything": list(job.members()),
            }[who]  # fmt: skip
            signal_all(victims, signal.SIGKILL)
            return True
        time.sleep(0.003)
    return False


def check_causes(out: Path, name: str, kind: str) -> None:
    """Every attempt's result says what ended it: nobody is said to live, nobody is blamed wrongly."""
    *before, end = [read_result(run / "result.json") for run in attempts(out, name)
                    if (run / "result.json").exists()]  # fmt: skip
    assert end.status == "ok", (end.status, end.error)
    ours = kind in ("script", "nodes")
    for r in before:
        assert r.status != "running", r.run_name
        told = r.error or ""
        if r.status == "failed" and ours:
            assert "killed by SIGKILL" in told, (kind, r.run_name, told)
        elif r.status == "interrupted" and ours:
            ended = kind == "nodes" and "SIGTERM" in told  # as the other node's launcher was killed
            assert ended or "the end of its launcher" in told, (kind, r.run_name, told)
        done = r.status == "ok"  # and killed after that
        ways = ("failed", "killed", "interrupted", "preempted")
        assert done or r.status in ways, (r.status, told)


@dataclasses.dataclass
class Script:
    """What happens in a chain: a launcher's restarts, or its command typed again after each kill."""

    inner: bool
    auto: bool
    given: bool
    save_dir: bool
    kills: list[tuple[str, str]]  # who is killed, and at which of the MOMENTS


def draw_script(kind: str, draw: random.Random) -> Script:
    """Any that the kind of start can do."""
    inner = kind != "srun" and draw.random() < 0.5
    given = inner and draw.random() < 0.5
    auto = not given and (not inner or draw.random() < 0.5)
    who = ("one rank", "all ranks") if inner or kind == "srun" else WHO
    kills = [(draw.choice(who), draw.choice(list(MOMENTS))) for _ in range(draw.randint(1, 3))]
    return Script(inner, auto, given, draw.random() < 0.4, kills)


def chain(
    number: int, reference: Path, kind: str, draw: random.Random, top: Path, script: Script
) -> int:
    """One chain under one kind of start; how often it was killed."""
    name, out = f"c{number}", top / f"out{number}"
    save_dir = str(top / f"saves{number}") if script.save_dir else None
    log, kills, given = top / f"{name}.log", 0, None
    argv = arguments(out, name, *(["--save-dir", save_dir] if save_dir else []))
    if script.given:
        given = draw.choice(sorted((reference / "checkpoints").glob("step-*"))[:3])
    argv += ["--resume", str(given)] if given else ["--resume", "auto"] if script.auto else []
    watch = Watch(out, name, save_dir, given)
    watch.start()
    restarts = len(script.kills) if script.inner else 0
    try:
        job = start(kind, argv, restarts, log)
        for who, moment in script.kills:
            running = len(attempts(out, name))
            hit = kill_once(job, out, name, save_dir, draw, running if kills else 0, who, moment)
            kills += hit
            if not script.inner:
                job.finish()
                job = start(kind, argv, 0, log)
            elif hit:
                time.sleep(0.5)
            if not hit:
                break
        codes = job.finish()
        assert codes == [0] * len(codes), (kind, argv, codes, log.read_text()[-3000:])
        time.sleep(0.05)
        said = (kind, argv, watch.seen)
        assert not watch.wrong, (watch.wrong, *said)
        found = places(out, name, save_dir)
        assert len(found) == 1, (found, *said, log.read_text()[-3000:])
        (place,) = found
        found = newest([place])
        assert verify(found).step == STEPS + 2, (found, *said)
        faults.assert_equal(
            faults.whole_state(found), faults.whole_state(newest([reference / "checkpoints"]))
        )
        assert len(list(place.glob("step-*"))) <= 2 and not list(place.glob(".*")), list(
            place.iterdir()
        )
        assert not list(place.glob("damaged*")), list(place.iterdir())
        records = read_records([str(out)], print, LogFacts())
        assert len(records) == 1, ([(r.label, r.lineage, r.first_step) for r in records], *said)
        (record,) = records
        expected = sorted(faults.losses_of(reference.parent, "reference"))
        expected = [x for x in expected if x[0] >= (step_of(given) if given else 0)]
        assert record.losses == expected, (*said, set(record.losses) ^ set(expected))
        check_causes(out, name, kind)
    finally:
        watch.over.set()
        signal_all(list(job.members()), signal.SIGKILL)
        job.finish()
    shutil.rmtree(out)
    return kills


def make_reference(top: Path) -> Path:
    """The run that nobody disturbs, with all of its checkpoints."""
    argv = arguments(top, "reference", "--save-keep", "1000")
    assert faults.fork_ranks("train_ddp.py", 2, argv, None, random.Random())
    return top / "reference"


def chains(count: int = 100) -> str:
    """Chains of up to four attempts under every start, in turn."""
    draw, kills = random.Random(os.environ.get("SEED", "5")), 0
    with tempfile.TemporaryDirectory(prefix="chains-") as top:
        reference = make_reference(Path(top))
        for number in range(count):
            kind = KINDS[number % 4]
            begin = time.monotonic()
            script = draw_script(kind, draw)
            done = chain(number, reference, kind, draw, Path(top), script)
            kills += done
            took = time.monotonic() - begin
            print(f"  chain {number}: {kind}, {done} kills, {took:.0f} s", flush=True)
    return f"{kills} kills in {count} chains, 0 of them wrong"


SLOW = """import os, sys, time
sys.path.insert(0, {root!r})
import llm_train_bench.base.start
llm_train_bench.base.start._TOP = __import__("pathlib").Path(__file__).resolve().parent
llm_train_bench.base.start._begin()
from llm_train_bench.run.checkpoint import durable
real = durable.Files.write
def write(self, path, parts):
    if path.name != "manifest.json":
        time.sleep(float(os.environ.get("SLOW_S", "0")))
    return real(self, path, parts)
durable.Files.write = write
import {name}
from llm_train_bench.run.launch import launch, launch_ranks
if __name__ == "__main__":
    start = launch if {name!r} == "train" else launch_ranks
    sys.exit(start({name}.train, sys.argv[1:], __file__))
"""


def slow_script(top: Path, name: str = "train_ddp") -> str:
    """A script of ours on a disk that takes SLOW_S seconds for a file."""
    (top / "slow").mkdir(exist_ok=True)
    (top / "slow" / f"{name}.py").write_text(SLOW.format(root=str(ROOT), name=name))
    return str(top / "slow" / f"{name}.py")


def wait_for(condition: Callable[[], object], job: Job, log: Path, timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        assert any(p.poll() is None for p in job.launchers), log.read_text()[-2000:]
        time.sleep(0.005)


@contextlib.contextmanager
def running(kind: str, top: Path, *flags: str, slow: str = "", **env: str):
    """A run "r" in its own directory, ended in any case; on a disk with `slow` seconds a file."""
    out = Path(tempfile.mkdtemp(dir=top, prefix=kind))
    script = "train" if kind == "itself" else "train_ddp"
    argv = arguments(out, "r", *flags)
    path = slow_script(top, script) if slow else f"{script}.py"
    job = start(kind, argv, 0, log := out.with_suffix(".log"), path, {"SLOW_S": slow} | env)
    try:
        wait_for((out / "r/steps.jsonl").exists, job, log)
        yield job, out, log, argv
    finally:
        signal_all(list(job.members()), signal.SIGKILL)


ENDLESS = ["--save-every", "100000", "--n-steps", "100000"]


def check_saved_on_request(
    kind: str, top: Path, who: str, number: int, early: bool = False
) -> None:
    """A signal saves all ranks at one step, on a disk slower than the agent would wait; 75 says so.

    `early` is before the first step.
    """
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    with running(kind, top, *ENDLESS, slow="4", **patience) as (job, out, log, _):
        if not early:
            wait_for(lambda: (out / "r/steps.jsonl").stat().st_size, job, log)
        ranks = job.ranks()
        victims = {"launchers": [p.pid for p in job.launchers], "one": [job.launchers[0].pid],
                   "rank": [ranks.get(1)]}[who]  # fmt: skip
        signal_all(victims, number)
        codes = job.finish(90)
    assert set(codes) == {75}, (kind, who, codes, log.read_text()[-2000:])
    r, found = read_result(out / "r/result.json"), newest([out / "r/checkpoints"])
    said = f"saved at step {step_of(found)} and stopped by {signal.Signals(number).name}"
    assert r.status == "preempted" and r.error == said, r.error
    assert "Traceback" not in log.read_text() and len(committed(out / "r/checkpoints")) == 1


def check_second_signal(kind: str, top: Path) -> None:
    """It ends the run at once, a second after the first, while a disk stands still."""
    with running(kind, top, *ENDLESS, slow="50") as (job, out, log, _):
        wait_for(lambda: (out / "r/steps.jsonl").stat().st_size, job, log)
        signal_all([p.pid for p in job.launchers], signal.SIGTERM)
        wait_for(lambda: list((out / "r/checkpoints").glob(".step*")), job, log)
        time.sleep(0.5)
        signal_all([p.pid for p in job.launchers], signal.SIGTERM)
        begin = time.monotonic()
        codes = job.finish(60)
        took = time.monotonic() - begin
    r = read_result(out / "r/result.json")
    assert took < 25 and set(codes) == {1}, (took, codes, log.read_text()[-2000:])
    assert r.status == "interrupted", (r.status, r.error)
    assert "Traceback" not in log.read_text() and not committed(out / "r/checkpoints")


def check_second_run(top: Path) -> None:
    """The same command while the first still runs is refused, and disturbs nothing."""
    with running("script", top, "--n-steps", "2000", "--resume", "auto") as (job, out, log, argv):
        wait_for(lambda: list((out / "r/checkpoints").glob("step-*")), job, log)
        for kind in ("script", "srun"):
            other = start(kind, argv, 0, top / "other.log")
            assert 2 in other.finish(90)
        assert "another run saves there: process" in (top / "other.log").read_text()
        assert [p.name for p in out.iterdir()] == ["r"]
        signal_all([job.launchers[0].pid], signal.SIGTERM)
        assert job.finish() == [75], log.read_text()


def check_slow_save(top: Path) -> None:
    """A save slower than its timeout is given up, and the run ends well; the next attempt saves."""
    out, log = top / "slow-save", top / "slow-save.log"
    argv = arguments(out, "r", "--resume", "auto")
    for slow, steps in (("4", None), ("0", STEPS + 2)):
        flags = ["--save-timeout", "1"]
        job = start("script", [*argv, *flags], 0, log, slow_script(top), {"SLOW_S": slow})
        assert job.finish() == [0], log.read_text()[-2000:]
        found = newest([out / "r/checkpoints"])
        assert (found and step_of(found)) == steps, (slow, found)
    r = read_result(out / "r/result.json")
    assert any("given up after 1 s; no more saves are made" in note for note in r.notes), r.notes


def check_stopwatch(top: Path) -> str:
    """The parts of a killed and resumed run's time, against a stopwatch of the test's own."""
    out, log, begin = top / "watch", top / "watch.log", time.time()
    argv = arguments(out, "r", "--resume", "auto", "--n-steps", "500")
    job = start("script", argv, 0, log)
    wait_for(lambda: len(list((out / "r/checkpoints").glob("step-*"))) == 2, job, log)
    signal_all(list(job.members()), signal.SIGKILL)
    job.finish()
    killed = time.time()
    time.sleep(3.0)
    waited = time.time() - killed
    assert start("script", argv, 0, log).finish() == [0], log.read_text()[-2000:]
    took = time.time() - begin
    m = read_result(out / "r-restart1/result.json").metrics
    whole = sum(m.time_parts_s.values())
    # The launcher ends after the result is written.
    assert 0 <= took - whole < 5 and waited <= m.time_parts_s["waiting"] < waited + 3, (took, m)
    parts = ", ".join(f"{name} {s:.1f}" for name, s in m.time_parts_s.items())
    return f"{whole:.1f} s of {took:.1f} by a stopwatch, goodput {m.goodput:.1%}: {parts}"


def requests(count: int = 0) -> str:
    """Signals to launchers and ranks, once and twice, on slow disks; a second run of the same name."""
    n = 0
    with tempfile.TemporaryDirectory(prefix="requests-") as top:
        for kind, who, number in (
            ("script", "launchers", signal.SIGTERM), ("nodes", "launchers", signal.SIGTERM),
            ("nodes", "one", signal.SIGTERM), ("srun", "launchers", signal.SIGTERM),
            ("script", "rank", signal.SIGUSR1), ("nodes", "rank", signal.SIGINT),
            ("script", "launchers", signal.SIGUSR1), ("srun", "launchers", signal.SIGUSR1),
            ("itself", "launchers", signal.SIGUSR1),
        ):  # fmt: skip
            check_saved_on_request(kind, Path(top), who, number, early=who == "launchers" and n > 4)
            print(f"  {kind}, {who}, {number.name}", flush=True)
            n += 1
        for kind in ("script", "nodes", "srun", "itself"):
            check_second_signal(kind, Path(top))
            print(f"  {kind}, twice", flush=True)
            n += 1
        check_second_run(Path(top))
        check_slow_save(Path(top))
        print(f"  {check_stopwatch(Path(top))}", flush=True)
    return f"{n} requests, a second run, a slow save, a stopwatch"
