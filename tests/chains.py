"""Runs that are killed more than once, in changing layouts: `make faults PART=chains COUNT=40`.

A chain is one run of up to four attempts: torchrun starts it again, or the user does, perhaps otherwise.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from llm_train_bench.results.result_files import read_result
from llm_train_bench.run.checkpoint.attempt import checkpoints_at, step_of
from tests import faults
from tests.helpers import ROOT, free_port
from tests.processes import TORCHRUN, Started, signal_all, wait_until

STEPS, EVERY = 100, 10


class Setting(NamedTuple):
    """What is trained, and the commands that train the same: script, ranks and flags."""

    config: str
    flags: str
    layouts: tuple[str, ...]
    tolerance: float = 1e-5
    """Between layouts; in one, all is bitwise equal. A run at its last step is finished."""


DP = ("train_ddp.py 2 --bsz 2", "train.py 1 --bsz 4", "train_fsdp.py 2 --bsz 2",
      "train_fsdp.py 4 --bsz 1")  # fmt: skip
SGD = "--optimizer sgd --lr 0.1"
SETTINGS = {
    "dropout": Setting("micro", "", DP[:1]),
    "fp16": Setting("micro", "--amp fp16", DP[1:2]),
    "plain": Setting("llama", SGD, (*DP, "train_fsdp.py 4 --dp-replicate 2 --bsz 1")),
    "packed": Setting("llama", f"{SGD} --pack --pack-lengths 5,1.0", DP),
    "muon": Setting("llama", "--optimizer muon --lr 1e-5", DP[:3]),
    "lora": Setting("llama", "--lora-rank 2 --lr 1e-3", DP),
    "zero1": Setting("llama", "--lr 1e-3", ("train_ddp.py 2 --bsz 2 --zero1", *DP[:3])),
    "tp": Setting("llama", SGD, (*(f"train_fsdp.py {n} --tp 2 --bsz {8 // n}" for n in (2, 4)), DP[1])),
    "cp": Setting("llama", SGD, ("train_fsdp.py 2 --cp 2 --bsz 4", *DP[:2])),
    "ep": Setting("qwen3_moe", SGD.replace("0.1", "0.01"), ("train_fsdp.py 2 --ep 2 --bsz 2", *DP[1:3])),
    "pp": Setting("llama", SGD, ("train_pp.py 2 --pp 2 --bsz 1 --grad-acc-steps 4", *DP[:2])),
}  # fmt: skip
KINDS = ("script", "torchrun", "nodes", "srun")


def arguments(out: Path, setting: Setting, *more: str) -> list[str]:
    """The command line of a run "r", but for its script."""
    flags = f"--n-steps {STEPS - 2} --save-every {EVERY} {setting.flags} --quiet".split()
    config = ROOT / f"tests/configs/{setting.config}.json"
    return faults.arguments(out, "r", *flags, *more, config=config)


class Job:
    """The processes of one command, or of one per node or task; what they print goes to a file.

    The script by itself, torchrun, docker/torchrun_node.sh's agents on two nodes, or srun's tasks.
    """

    def __init__(self, kind: str, layout: str, argv: list[str], log: Path, restarts=0, **env: str):
        script, world, *flags = layout.split()
        flags += ["--dist-timeout", "45"] if world != "1" else []
        command, port = [script, *argv, *flags], str(free_port())
        own = [sys.executable, *command]
        if kind == "script" or world == "1":
            own += [] if world == "1" else ["--nproc", world]
            commands = [(own, {})]
        elif kind == "torchrun":
            commands = [([*TORCHRUN, world, "--max-restarts", str(restarts), *command], {})]
        elif kind == "nodes":
            options = f"-m llm_train_bench.run.agent --nnodes {world} --nproc-per-node 1"
            options += f" --max-restarts {restarts} --rdzv-backend c10d --rdzv-id j{port}"
            options += f" --rdzv-endpoint 127.0.0.1:{port} --rdzv-conf is_host="
            nodes = [f"{options}{int(i == 0)}".split() for i in range(int(world))]
            commands = [([sys.executable, *node, *command], {}) for node in nodes]
        else:
            at = {"SLURM_STEP_NUM_TASKS": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            tasks = [str(i) for i in range(int(world))]
            commands = [(own, at | {"SLURM_PROCID": i, "SLURM_LOCALID": i}) for i in tasks]
        self.rank_name, self.launchers = "SLURM_PROCID" if kind == "srun" else "RANK", []
        for command, more in commands:
            with log.open("a") as out:
                self.launchers.append(Started(command, more | env, stdout=out, stderr=out))

    def members(self) -> list[int]:
        return [pid for launcher in self.launchers for pid in launcher.members()]

    def ranks(self) -> dict[int, int]:
        """Rank to process id; the only process is rank 0."""
        ranks = {r: pid for one in self.launchers for r, pid in one.ranks(self.rank_name).items()}
        return ranks or {0: self.launchers[0].pid}

    def alive(self) -> bool:
        return all(launcher.poll() is None for launcher in self.launchers)

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


def kill_once(job: Job, run: Path, draw: random.Random) -> bool:
    """Kill some of a job's processes at some moment; whether it came to that."""
    changed = lambda: run.stat().st_mtime_ns if run.exists() else 0  # noqa: E731
    begun = changed()
    moments: list[Callable[[], bool]] = [
        lambda: draw.random() < 0.004,
        lambda: changed() != begun and draw.random() < draw.choice((0.02, 1)),
        lambda: any(run.glob("checkpoints/step-*.tmp")),
    ]
    moment, deadline = draw.choice(moments), time.monotonic() + 60
    while time.monotonic() < deadline and job.alive():
        if moment():
            ranks, launchers = list(job.ranks().values()), [p.pid for p in job.launchers]
            one = draw.choice([*ranks, *launchers])
            signal_all(draw.choice(([one], ranks, job.members())), signal.SIGKILL)
            return True
        time.sleep(0.003)
    return False


def chain(kind: str, name: str, draw: random.Random, top: Path, reference: Path) -> int:
    """One chain under one kind of start; how often it was killed."""
    setting, out = SETTINGS[name], Path(tempfile.mkdtemp(dir=top))
    run, log, argv, kills = out / "r", out / "log", arguments(out, setting), 0
    layouts = setting.layouts if draw.random() < 0.5 else setting.layouts[:1]
    restarts = draw.choice((0, 3)) if kind in ("torchrun", "nodes") else 0
    starts, used, codes = [], [], []

    def start(layout: str, restarts: int = 0) -> Job:
        starts.append(max([step_of(path) for path in checkpoints_at(run)], default=0))
        used.append(layout)
        return Job(kind, layout, argv, log, restarts)

    job = start(layouts[0], restarts)
    try:
        for _ in range(draw.randint(2, 4)):
            if not job.alive():
                job.finish()
                job = start(draw.choice(layouts), restarts)
            kills += kill_once(job, run, draw)
            wait_until(lambda: not job.alive(), 1.0 if restarts else 30.0)  # noqa: B023
        codes = job.finish()
        if any(codes):
            job = start(draw.choice(layouts))
            codes = job.finish()
        assert not any(codes), codes
        r = read_result(run / "result.json")
        assert r.status == "ok", r.error
        firsts = [attempt.first_step for attempt in r.attempts]
        # An attempt that was killed in set-up is not there; one that torchrun started is not in `starts`.
        begun = [s for s in starts if s < STEPS]  # else it was finished, but for its processes
        assert firsts == sorted(firsts) and firsts[-1] >= begun[-1], (firsts, starts)
        assert restarts or {*firsts} <= {*starts}, (firsts, starts)
        ends = {str(attempt.ended).partition(":")[0] for attempt in r.attempts[:-1]}
        assert ends <= {"ok", "killed", "failed", "interrupted", "preempted"}, ends
        faults.check_like(reference, run, setting.tolerance if len({*used}) > 1 else 0.0)
    except BaseException as error:
        error.add_note(f"{kind}, {name}, {used}, {starts}: {log.read_text()[-900:]}")
        raise
    finally:
        job.kill()
    shutil.rmtree(out)
    return kills


def make_reference(top: Path, name: str) -> Path:
    """The run that nobody disturbs, in the first layout."""
    setting, out = SETTINGS[name], top / name
    out.mkdir()
    codes = Job("script", setting.layouts[0], arguments(out, setting), out / "log").finish()
    assert codes == [0], (out / "log").read_text()
    return out / "r"


def chains(count: int = 40) -> str:
    """Chains of up to four attempts of every setting, under every start, in turn."""
    draw, kills = random.Random(os.environ.get("SEED", "5")), 0
    with tempfile.TemporaryDirectory(prefix="chains-") as top:
        references = {name: make_reference(Path(top), name) for name in SETTINGS}
        for number in range(count):
            name, kind = list(SETTINGS)[number % len(SETTINGS)], draw.choice(KINDS)
            kills += chain(kind, name, draw, Path(top), references[name])
    return f"{kills} kills in {count} chains, 0 of them wrong"
