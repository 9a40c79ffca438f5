"""Every layout against one device: losses, norms, every gradient, and the parameters at the end.

    make layouts               all cases
    DEVICE=cuda make layouts   on GPUs, which ranks share where there are fewer (docs/MODELS.md)

tests/test_layouts.py runs a short form. Tolerances are of fp32 on a CPU with gloo, over 6 AdamW steps
with clipping active, and in some models inactive at the end. Under bf16 only the first gradients are
held to one device's; so under FP8, where a number of fp32 noise may be rounded to a neighbour.
"""

import dataclasses
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llm_train_bench.base.documents import index_path
from llm_train_bench.base.token_files import write_tokens
from llm_train_bench.formulas.collectives import traffic as traffic_of
from llm_train_bench.measure.device import SHARE_GPU
from tests.dist_worker import DEVICE, Job, run_jobs
from tests.faults import steps_of, whole_state
from tests.helpers import FAMILIES, ROOT, facts_of, plan_of, result_of

STEPS = 6
COMMON = (
    f"--device {DEVICE} --amp off --warmup-steps 1 --warmup-seconds 0 --lr 2e-3 --lr-warmup-steps 0 "
    "--seq-len 32 --no-tensorboard --linear plain"
).split()
# What differs from tests.helpers.FAMILIES: sizes that divide, several layers, few heads or experts for
# the ranks. In gpt_oss no clamp is reached: rounding at its edge turns a gradient on or off.
_CHANGES = json.loads((ROOT / "tests/layout_models.json").read_text())
MODELS = {name: FAMILIES[model.pop("family")] | model for name, model in _CHANGES.items()}
# --grad-clip. Here it ends during a run, as norms fall below it; elsewhere all norms are above 0.3.
CLIPS = {"gpt2": 0.8, "deep": 1.15, "gpt_oss": 0.93, "gpt_oss-few": 1.08, "lopsided": 0.7}


@dataclasses.dataclass(frozen=True)
class Case:
    """Ranks, a model, and the flags of a layout; `mutant` as tests.dist_worker.Job has it."""

    ranks: int
    model: str
    flags: str
    mutant: str = ""
    resumes: str = ""  # the case from whose checkpoint this one goes on
    first: int = 0  # the step of that checkpoint

    @property
    def steps(self) -> int:
        """Of a mutant, and where roundings differ, only the first gradients are judged."""
        return 2 if self.mutant or self.rough else STEPS

    @property
    def rough(self) -> float:
        """Where a rounding may go the other way, the limit of the first gradients; else 0."""
        return 1e-2 if "--amp bf16" in self.flags else 1e-3 * ("--use-fp8" in self.flags)

    def size(self, flag: str, default: int = 1) -> int:
        words = self.flags.split()
        return int(words[words.index(flag) + 1]) if flag in words else default

    @property
    def micro(self) -> int:
        """The number of micro batches; without a flag a pipeline has two for each stage."""
        pp = self.size("--pp")
        return self.size("--grad-acc-steps", 2 * pp if pp > 1 else 1)

    @property
    def script(self) -> str:
        if self.ranks == 1:
            return "train.py"
        ways = {"--bucket-cap-mb": "train_ddp.py", "--pp": "train_pp.py"}
        return next((ways[w] for w in self.flags.split() if w in ways), "train_fsdp.py")


PACK = "--pack --pack-lengths 9,0.8"
BF16 = "--amp bf16 --bf16-weights"
BALANCED_ROUTE = "--route balanced"
MUON = "--optimizer muon"
FP8 = {
    recipe: f"--use-fp8 --fp8-emulate --fp8-recipe {recipe} --fp8-backend torchao"
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
}
FLAGS = dict(
    pack=PACK, lora="--lora-rank 4 --lora-alpha 64", bf16=BF16, muon=MUON,
    balanced=BALANCED_ROUTE, save="--save-every 1", fp8=FP8,
)  # fmt: skip


def read_cases() -> dict[str, Case]:
    """The cases of tests/layouts.txt by their names, which keep their marks here."""
    cases = {}
    for line in (ROOT / "tests/layouts.txt").read_text().splitlines():
        if not line.startswith("#"):
            line, _, mutant = line.partition(" ! ")
            line, _, saved = line.partition(" from ")
            name, ranks, model, *flags = line.format(**FLAGS).split()
            resumes, first = saved.split() or ("", 0)
            cases[name] = Case(int(ranks), model, " ".join(flags), mutant, resumes, int(first))
    return cases


MARKED = read_cases()
SHORT, ON_GPU = ([n.strip("*+") for n in MARKED if mark in n] for mark in "*+")
CASES = {name.strip("*+"): case for name, case in MARKED.items()}
MUTANTS = {name for name, case in CASES.items() if case.mutant}
# Cases of few ranks run a second time with all blocks recomputed, but for these, of which other tests or
# cases have both.
ALONE = (
    "--sac-freq --use-fp8 --optimizer --route --pt-compile --pack --lora-rank "
    "--offload-activations --bf16-weights --save-every"
).split()
CASES |= {
    f"{name}-sac": dataclasses.replace(case, flags=f"{case.flags} --sac-freq 1/1")
    for name, case in CASES.items()
    if case.ranks < 4 and not case.mutant and not any(word in case.flags for word in ALONE)
}
GLOBAL = 8  # samples of a step


def flags_of(case: Case, out: Path) -> list[str]:
    """The command line of a case; its batch makes the same global batch as one device's."""
    path, words = out / f"{case.model}.json", case.flags.split()
    path.write_text(json.dumps(MODELS[case.model]))
    words += ["--grad-clip", str(CLIPS.get(case.model, 0.3)), "--no-observe"]  # it would be counted
    if not (case.mutant or case.rough or case.resumes or "--save-every" in words):
        val, size = out / f"{case.model}.bin", MODELS[case.model]["vocab_size"]
        write_tokens(val, [np.random.default_rng(0).integers(0, size, GLOBAL * 32 + 1)], size)
        np.save(index_path(val), [*range(11, GLOBAL * 32, 11), GLOBAL * 32 + 1])
        words += ["--val-data", str(val)]
    if "--bsz" not in words:
        data = case.ranks // (case.size("--tp") * case.size("--cp") * case.size("--pp"))
        words += ["--bsz", str(GLOBAL // data // case.micro)]
    if case.resumes:
        words += ["--resume", str(checkpoint(case, out))]
    return [str(path), *COMMON, "--n-steps", str(case.steps - 1), *words]


def checkpoint(case: Case, out: Path) -> Path:
    return out / case.resumes / f"checkpoints/step-{case.first:08}"


def reference_of(case: Case) -> tuple[str, Case]:
    """The run on one device that a case is compared with, and the name of its directory."""
    low = "--use-fp8" in case.flags  # scales are of one micro batch, and so is a balance loss
    micro = case.micro if low or MODELS[case.model].get("output_router_logits") else 1
    kinds = [BF16 if BF16 in case.flags else "--amp bf16", PACK, FLAGS["lora"]]
    kinds += MUON, BALANCED_ROUTE, *FP8.values()
    more = "".join(f" {flags}" for flags in kinds if flags in case.flags)
    alone = Case(1, case.model, f"--bsz {GLOBAL // micro} --grad-acc-steps {micro}{more}")
    return f"{case.model}-{micro}{more.replace(' ', '')}", alone


def turn(name: str) -> tuple[int, int]:
    """When a case runs: after those from whose checkpoint it goes on, and by its number of ranks."""
    case = CASES[name]
    if not case.resumes:
        return 0, case.ranks
    wave, ranks = turn(case.resumes)
    return wave + (ranks > case.ranks), case.ranks


def run_cases(names: list[str], out: Path) -> None:
    """Cases and what they are compared with, by few forks of ranks; what lies in `out` already stays."""

    def job(name: str, case: Case) -> Job:
        traced = "--pt-compile" in case.flags
        return Job(name, case.script, flags_of(case, out), case.ranks, traced, case.mutant)

    jobs = [job(n, CASES[n]) for n in sorted((n for n in CASES if n in names), key=turn)]
    for i in range(0, len(jobs), 40):  # ranks slow down from job to job
        run_jobs(jobs[i : i + 40], out, gradients=True)
    alone = dict(reference_of(CASES[name]) for name in names)
    missing = [job(*each) for each in alone.items() if not (out / each[0]).exists()]
    run_jobs(missing, out, gradients=True)


# The largest differences from one device; norms and gradients are relative. Of a mutant, and under bf16
# (where roundings differ), only gradients of the first step are held to one device's.
LIMITS = dict(loss=1e-5, valid=1e-5, norm=5e-6, later=3e-5, gradient=1e-5, at_end=2e-4)


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a case is from one device, by the columns of LIMITS, and in which gradient most."""

    numbers: dict[str, float]
    worst: str
    traffic: dict[str, tuple[int, float]]
    """Bytes a step by the formula and as handed to collectives, by kind, where they differ."""
    limits: dict[str, float]

    @property
    def ok(self) -> bool:
        """Whether all are within the tolerances promised."""
        return not self.traffic and all(self.numbers[k] < most for k, most in self.limits.items())

    def __str__(self) -> str:
        numbers = " ".join(f"{n:8.1e}" for n in self.numbers.values())
        return f"{numbers}  {self.worst}" + f"  traffic {self.traffic}" * bool(self.traffic)


def compare(name: str, out: Path) -> Difference:
    """A finished case against one device."""
    case = CASES[name]
    alone, here = out / reference_of(case)[0], out / name
    steps = [steps_of(directory) for directory in (alone, here)]
    first = case.first
    clipped = [step["grad_norm"] > CLIPS.get(case.model, 0.3) for step in steps[0]]
    loose = case.rough or MUON in case.flags  # two steps, and another course
    as_meant = clipped[0] and (loose or all(clipped) == (case.model not in CLIPS))
    assert as_meant, "clipping is not as meant"
    steps[0] = steps[0][first : case.steps]
    assert len(steps[0]) == len(steps[1]) == case.steps - first
    loss = max(abs(a["loss"] - b["loss"]) for a, b in zip(*steps, strict=True))
    norms = [abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(*steps, strict=True)]
    gradients = [load_file(where / "gradients.safetensors") for where in (alone, here)]
    parameters = [load_file(where / "parameters.safetensors") for where in (alone, here)]
    for tensors in (gradients, parameters)[case.first > 0 :]:
        assert tensors[0].keys() == tensors[1].keys()
    if first:  # what was loaded is bit for bit what was saved, and there is no first step
        saved, begin = whole_state(checkpoint(case, out)), gradients[1]
        assert begin.keys() == {key for key in saved if not key.startswith(("step/", "scaler/"))}
        assert all(torch.equal(value, saved[key]) for key, value in begin.items()), name
        gradients = [parameters[0]] * 2
    worst = {
        key: ((gradients[1][key] - value).norm() / value.norm().clamp(min=1e-12)).item()
        for key, value in gradients[0].items()
    }
    most = max(worst, key=worst.get)
    last = max((parameters[1][k] - v).abs().max().item() for k, v in parameters[0].items())
    results = [result_of(where) for where in (alone, here)]
    expected, metrics = (result["metrics"] for result in results)
    in_fp8 = [(result["fp8"] or {}).get("n_parameters") for result in results]
    assert in_fp8[0] == in_fp8[1] and bool(in_fp8[0]) == ("--use-fp8" in case.flags)
    both = ["val_loss_before", "val_loss"] if "--val-data" in flags_of(case, out) else []
    validation = max((abs(metrics[key] - expected[key]) for key in both), default=0.0)
    facts, traffic = facts_of(here), {}
    if "moe" in case.model and BALANCED_ROUTE not in case.flags and metrics["n_measured_steps"]:
        assert 1 < metrics["expert_rows_max_over_mean"] < 8
    # Otherwise a rounding may choose another expert.
    exact = not (first or case.mutant or case.rough or "--optimizer" in case.flags)
    if expected["expert_rows_max_over_mean"] and exact:
        fullest = expected["expert_rows_max_over_mean"]
        assert metrics["expert_rows_max_over_mean"] == pytest.approx(fullest)
        of_ranks = metrics["ep_rank_rows_max_over_mean"]
        assert 1 <= of_ranks <= fullest and (of_ranks == 1 or "--ep" in case.flags)
    if case.model == "lopsided":
        assert any(facts["idle"]), "every rank got rows"
    # Nothing is seen of compiled steps.
    if case.ranks > 1 and "--pt-compile" not in case.flags:
        platform = "cpu" if DEVICE == "cpu" else "nvidia"
        work = plan_of(flags_of(case, out), case.script, case.ranks, platform).work
        assert work.parallelism.ulysses == ("gather" not in name)
        kinds = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
        kinds += ["send"] if work.parallelism.pp > 1 else []
        assert all(metrics[f"{k}_bytes"] == traffic_of(work, 0).get(k, 0) for k in kinds)
        for group, moved in enumerate(facts["traffic"]):
            for kind in kinds:
                pair = traffic_of(work, group).get(kind, 0), moved.get(kind, 0) / len(norms)
                # Learned routing sends as many tokens as it will.
                free = kind == "all_to_all" and work.parallelism.ep > 1 and not work.balanced
                same = pair[1] < 1.6 * pair[0] + 1e4 if free else pair[0] == pair[1]
                traffic |= {} if same else {f"{kind} of {group}": pair}
    numbers = loss, validation, max(norms[:3]), max(norms[3:], default=0.0), worst[most], last
    limits = {"gradient": case.rough or 1e-5} if case.steps == 2 else LIMITS
    if MUON in case.flags:  # momenta are rounded to bf16
        limits = limits | dict(loss=1e-4, valid=1e-4, norm=5e-5, later=3e-4, at_end=2e-3)
    return Difference(dict(zip(LIMITS, numbers, strict=True)), most, traffic, limits)


def main() -> int:
    names, failed = sys.argv[1:] or list(CASES), []
    names = ON_GPU if names == ["on-gpu"] else names
    if DEVICE == "cuda":
        os.environ.setdefault(SHARE_GPU, "1")
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(ROOT)
        out = Path(directory)
        print(f"{'layout':20} " + " ".join(f"{name:>8}" for name in LIMITS))
        for _, alike in itertools.groupby(sorted(names, key=turn), key=turn):
            run_cases(group := list(alike), out)
            for name in group:
                difference = compare(name, out)
                wrong = difference.ok == (name in MUTANTS)
                print(f"{name:20} {difference}", "  WRONG" if wrong else "", flush=True)
                failed += [name] if wrong else []
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
