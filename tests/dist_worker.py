"""Runs on forked ranks, and an account of what each run did in `counts.json` beside its result.

It has the bytes and calls of collectives, calls of attention by format, digests of random states before
dropouts, exchanges that brought a rank nothing, the order of the first events, and the bytes held. With
`gradients` there are also gradients.safetensors and parameters.safetensors: whole, of the first step
(clipped; of a resumed run what was loaded), and after the last.
"""

import contextlib
import dataclasses
import gc
import hashlib
import importlib
import itertools
import json
import os
import re
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.distributed import distributed_c10d
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
import train_ddp
import train_fsdp
import train_pp
from llm_train_bench.apply.optimizer import build_optimizer, optimizer_step
from llm_train_bench.apply.precision import LossScaler
from llm_train_bench.apply.sharded import materialize
from llm_train_bench.measure.device import pick_device
from llm_train_bench.model import init, layers, transformer
from llm_train_bench.model.experts import Router, imbalance_since
from llm_train_bench.model.init import fill_normal
from llm_train_bench.model.piece_attention import Seen
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.parallel import ddp, fsdp
from llm_train_bench.parallel.fsdp import apply_fsdp, unshard
from llm_train_bench.parallel.layout import Gradients, RankLayout
from llm_train_bench.parallel.ranks import ALONE, Ranks, gather, join, leave
from llm_train_bench.run.checkpoint import saver
from llm_train_bench.run.checkpoint.saver import load
from llm_train_bench.run.launch import train_planned
from llm_train_bench.run.loop import build_evaluation
from tests.faults import KEEP_ALL
from tests.helpers import free_port, plan_of, without_inductor

ENTRYPOINTS = {f"{m.__name__}.py": m for m in (train, train_ddp, train_fsdp, train_pp)}
OPTIMIZERS = (train, ddp, train_fsdp, train_pp)  # where they build one
LOOP = "llm_train_bench.run.loop"
CPU = torch.device("cpu")
DEVICE = os.environ.get("DEVICE", "cpu")  # of tests/layouts.py
LLAMA, GPT2 = "tests/configs/llama-small.json", "tests/configs/gpt2-small.json"
KINDS = {
    "send": ("send", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
}
# Those that move tokens between ranks of a layout (llm_train_bench/parallel/layout.py).
TOKENS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_reduce": "all_reduce",
}
# What may run beside an exchange, and when it begins and ends.
EVENTS = (*TOKENS, "wait_tensor", "mm", "addmm", "_grouped_mm")


class Job(NamedTuple):
    """A run of a script on some ranks; `traced` compiles without Inductor's code.

    `mutant` names one of MUTANTS: the code is broken so, and must be caught.
    """

    name: str
    script: str
    argv: list
    ranks: int = 1
    traced: bool = False
    mutant: str = ""


# Stands in for a GPU's sensor: each rank sees one that takes 100 W.
METER = types.SimpleNamespace(
    source="tests/dist_worker.py",
    joules=lambda: 100.0 * time.perf_counter(),
    sample=lambda: None,
    limits=lambda: (None, None),
    throttle_counters=lambda: (0.0, {}),
    other_processes=lambda ours: None,
)


class Traffic(TorchDispatchMode):
    """Adds up the tensors handed to collectives; loss, norm and wishes to stop are left out.

    Also counts the bytes that tensors hold, until `looking` ends.
    """

    def __init__(self, keeps: bool):
        super().__init__()
        self.keeps = keeps  # gradients
        self.bytes, self.calls, self.waits, self.events = Counter(), Counter(), 0, []
        self.held, self.kernels = {}, 0
        self.most_held, self.looking = 0, True
        self.model, self.gradients, self.loads = None, {}, False

    def built(self, model, *args):
        """Stands in for build_optimizer: by then the model exists."""
        self.looking = False
        optimizer = build_optimizer(model, *args)
        if self.keeps:
            keep = self.unseen(self.at_step)
            optimizer.register_step_pre_hook(lambda *_: keep(model, optimizer))
        self.model = model
        return optimizer

    def load(self, *args) -> None:
        """Stands in for that of saver.py, whose step makes the optimizer's state."""
        self.loads = True
        self.unseen(load)(*args)
        self.loads = False

    def fill_normal(self, *args) -> None:
        """Stands in for that of model/init.py, whose temporary tensors have a size of their own."""
        looking, self.looking = self.looking, False
        fill_normal(*args)
        self.looking = looking

    def unseen(self, function):
        """The function, whose collectives are not counted: it is no part of a step."""

        def called(*args, **options):
            before = self.bytes.copy(), self.calls.copy()
            value = function(*args, **options)
            self.bytes, self.calls = before
            return value

        return called

    def counting_waits(self):
        """A patch under which a layout's waits for the numbers of experts' rows are counted."""
        rows_to_send = RankLayout.rows_to_send

        def called(*args):
            self.waits += 1
            return rows_to_send(*args)

        return mock.patch.object(RankLayout, "rows_to_send", called)

    def at_step(self, model, optimizer) -> None:
        """Keep the first step's gradients; of a resumed run what was loaded."""
        if self.gradients or self.loads:
            return
        named = dict(model.weights())
        if not optimizer.state:
            # What the optimizer takes: it may clip them itself.
            scale = getattr(optimizer, "grad_scale", 1.0)
            clipped = {n: p.grad / scale for n, p in named.items() if p.requires_grad}
            self.gradients = gather_parameters(model, clipped)
        else:
            self.gradients = {f"p/{n}": t for n, t in gather_parameters(model, named).items()}
        keys = {key for state in optimizer.state.values() for key, t in state.items() if t.ndim}
        for key in sorted(keys):  # in the same order on all ranks
            states = ((n, optimizer.state.get(p, {})) for n, p in named.items())
            state = {n: state[key] for n, state in states if key in state}
            self.gradients |= {f"{key}/{n}": t for n, t in gather_parameters(model, state).items()}

    def _look_at(self, tensor) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)  # for a DTensor, this rank's part
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            if storage._cdata not in self.held:
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata)
                self.most_held = max(self.most_held, sum(self.held.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        if name in EVENTS and len(self.events) < 5000:
            back = torch._C._current_graph_task_id() != -1
            self.events.append(f"{'backward ' * back}{name}")
        if namespace == "c10d" and name in KINDS:
            kind, position = KINDS[name]
            tensors = args[position]
            for t in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                # uint8: a gather of several formats at once.
                counts = kind == "all_to_all"  # of experts' rows
                if t.numel() > 2 and (t.is_floating_point() or t.dtype == torch.uint8 or counts):
                    self.bytes[kind] += t.numel() * t.element_size()
                    self.calls[kind] += 1
        elif namespace == "_c10d_functional" and name in TOKENS:
            size = args[0].numel() * args[0].element_size()
            whole = args[1] if name == "all_gather_into_tensor" else 1
            if name == "all_to_all_single" and not sum(args[1]):
                self.calls["exchanges that brought nothing"] += 1
            self.bytes[TOKENS[name]] += size * whole
        elif re.match("_scaled_dot_product|block_attention", name) and "backward" not in name:
            self.kernels += 1
            self.calls.setdefault("gathers before attention", self.calls["all_gather"])
        made = func(*args, **(kwargs or {}))
        if self.looking:
            for leaf in tree_leaves(made):
                self._look_at(leaf)
        return made


def watched(name: str, fact: Callable[[torch.Tensor], str], facts: list[str], module=F):
    """Lists a fact at each eager call of a function of a module, from its first argument."""
    function = getattr(module, name)

    def called(first, *args, **kwargs):
        facts.append(fact(first))
        return function(first, *args, **kwargs)

    return mock.patch.object(module, name, called)


def generator_digest(_) -> str:
    return hashlib.sha256(torch.get_rng_state().numpy()).hexdigest()


def gather_parameters(model, named) -> dict[str, torch.Tensor]:
    """Copies of the named tensors of all ranks, whole."""
    detached = ((weight, t.detach()) for weight, t in named.items())
    return {weight.name: t.clone() for weight, t in model.layout.gather_parameters(detached)}


def restless(best):
    """A router that breaks near ties in another way at every second call."""
    calls = itertools.count()

    def chosen(self, scores):
        sign = 1 if next(calls) % 2 else -1
        return best(self, scores + sign * 0.02 * torch.linspace(-1, 1, scores.shape[-1]))

    return chosen


# Ways to break layouts, which tests/layouts.py must see: where, which name, and what it is then.
MUTANTS = {
    "documents see each other": (
        transformer, "Seen", lambda window=None, starts=None, *rest: Seen(window, None, *rest)),
    "gradients are averaged": (fsdp, "sharded_modules", lambda model: []),
    "fused weights lie in the order of files": (
        init, "segment_rows", lambda weight: [torch.arange(sum(weight.segments))]),
    "norms' gradients stay partial": (
        Gradients, "partial", property(lambda self: [], lambda self, value: None)),
    "a tied head's gradients stay apart": (
        RankLayout, "swap_with_stage", lambda self, numbers, pp_rank: torch.zeros_like(numbers)),
    "scales are of a rank's part": (
        RankLayout, "max_over_ranks", lambda self, numbers, *kinds, whole=RankLayout.max_over_ranks: (
            numbers if kinds else whole(self, numbers))),
    "recomputation routes otherwise": (Router, "best", restless(Router.best)),
}  # fmt: skip


def sharded(ranks, *flags, seq_len=8, config=LLAMA):
    """The model of a run of train_fsdp.py and its optimizer."""
    plan = plan_of([config, "--seq-len", seq_len, *flags], "train_fsdp.py", ranks.world, "cpu")
    with torch.device("meta"):
        model = Transformer(plan.work.config, seq_len)
    layout = RankLayout(plan.work.parallelism, ranks.rank)
    apply_fsdp(model, layout.connect(CPU, plan.args.dist_timeout), plan.work)
    materialize(model, CPU, 0)
    return model, build_optimizer(model, plan.optimizer)


def embedding_gradient_error(ranks) -> float:
    """Relative distance of the embedding's gradient: bf16 against fp32; few tokens, each often."""
    gradients = []
    for amp in ("off", "bf16"):
        model, _ = sharded(ranks, "--amp", amp, seq_len=64, config=GPT2)
        ids = torch.randint(4, (32, 64), generator=torch.Generator().manual_seed(ranks.rank))
        model(ids, ids).backward()
        gradients.append(unshard(model.embed.weight.grad))
    fp32, bf16 = gradients
    return ((bf16 - fp32).norm() / fp32.norm()).item()


def skips_for_an_overflow_elsewhere(ranks) -> bool:
    """Whether this rank's fp16 step leaves the weights alone when a shard of the last one overflows."""
    (model, optimizer), scaler = sharded(ranks, "--amp", "fp16"), LossScaler(CPU)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if ranks.rank == ranks.world - 1:
        model.embed.weight.grad.to_local()[0, 0] = float("inf")
    before = [p.to_local().clone() for p in model.parameters()]
    optimizer_step(list(model.parameters()), optimizer, 1e-3, 1.0, scaler)
    after = [p.to_local() for p in model.parameters()]
    return scaler.skipped.item() == 1 and all(map(torch.equal, before, after))


def hsdp_timeouts(ranks) -> list[float]:
    """Timeouts [s] of the groups of a 2 x n mesh with --dist-timeout 7, and of a layout with --tp 2."""
    groups = []
    for flag in ("--dp-replicate", "--tp"):
        argv = [LLAMA, flag, "2", "--dist-timeout", "7"]
        plan = plan_of(argv, "train_fsdp.py", ranks.world, "cpu")
        layout = RankLayout(plan.work.parallelism, ranks.rank)
        meshes = layout.connect(CPU, plan.args.dist_timeout)
        groups += [*meshes["dense"].get_all_groups(), *layout.groups.values()]
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]


def groups_of_all_jobs(made: dict):
    """A job's groups are those that the jobs before have made: each has threads, which slow the rest."""
    asked = Counter()

    def group(ranks, **options):
        asked[key := tuple(ranks)] += 1
        if (key, asked[key]) not in made:
            made[key, asked[key]] = dist.new_group(ranks, **options)
        return made[key, asked[key]]

    return mock.patch("torch.distributed.device_mesh.new_group", group)


def check_shards(ranks, out: Path) -> None:
    """Further facts of sharded models, which every rank tells, in checks2.json and checks4.json."""
    checks = {
        "skipped": skips_for_an_overflow_elsewhere(ranks),
        "timeouts": hsdp_timeouts(ranks),
        "embedding": embedding_gradient_error(ranks),
    }
    gathered = {name: gather(ranks, check) for name, check in checks.items()}
    if ranks.main:
        (out / f"checks{ranks.world}.json").write_text(json.dumps(gathered))


def work(ranks, jobs: Iterable[Job], out: Path, gradients: bool = False) -> None:
    """All jobs, one after the other, on this rank or alone."""
    made = {}
    for name, script, flags, _, traced, mutant in jobs:
        argv = [*map(str, flags), "--output-dir", str(out), "--run-name", name]
        traffic, formats, states = Traffic(gradients), [], []
        traffic.looking = script == "train_fsdp.py"
        with contextlib.ExitStack() as stack:
            if "--pt-compile" in argv:  # Dynamo compiles nothing while a dispatch mode looks on
                torch._dynamo.reset()
                stack.enter_context(without_inductor() if traced else contextlib.nullcontext())
            else:
                seen = watched("attend", lambda query: str(query.dtype), formats, layers)
                stack.enter_context(seen)
                stack.enter_context(watched("dropout", generator_digest, states))
                stack.enter_context(traffic)
            for patch in (
                traffic.counting_waits(),
                groups_of_all_jobs(made),
                *(mock.patch.object(m, "build_optimizer", traffic.built) for m in OPTIMIZERS),
                mock.patch("llm_train_bench.model.init.fill_normal", traffic.fill_normal),
                mock.patch("llm_train_bench.measure.power.find_sensor", lambda device: METER),
                mock.patch("llm_train_bench.measure.power.PowerMeter.SHORTEST_S", 0.0),
                mock.patch("llm_train_bench.measure.matmul_rate.SECONDS", 0.01),
                KEEP_ALL,
                mock.patch(f"{LOOP}.imbalance_since", traffic.unseen(imbalance_since)),
                mock.patch(
                    f"{LOOP}.build_evaluation",
                    lambda *facts, t=traffic: t.unseen(build_evaluation(*facts)),
                ),
                mock.patch.object(saver, "load", traffic.load),
                mock.patch.object(saver.Saver, "save", traffic.unseen(saver.Saver.save)),
                # torch 2.15 sends objects by the collectives of tensors.
                *(
                    mock.patch.object(place, name, traffic.unseen(getattr(place, name)))
                    for place in (dist, distributed_c10d)
                    for name in ("all_gather_object", "gather_object")
                ),
                *([mock.patch.object(*MUTANTS[mutant], create=True)] if mutant else []),
                *([scales_as_powers_of_two()] if "--use-fp8" in argv else []),
            ):
                stack.enter_context(patch)
            train_planned(ENTRYPOINTS[script].train, argv, script, ranks)
        if gradients:
            parameters = gather_parameters(traffic.model, dict(traffic.model.weights()))
            if ranks.main:
                save_file(traffic.gradients, out / name / "gradients.safetensors")
                save_file(parameters, out / name / "parameters.safetensors")
        groups = gather(ranks, traffic.bytes)
        each = len(groups) // (int(argv[argv.index("--pp") + 1]) if "--pp" in argv else 1)
        groups = [groups[i : i + each] for i in range(0, len(groups), each)]
        moved = [g[0] | {"all_to_all": sum(r["all_to_all"] for r in g) / each} for g in groups]
        facts = {
            "traffic": moved,
            "attention": Counter(formats) | {"kernels": traffic.kernels},
            "dropout": gather(ranks, states),
            "idle": gather(ranks, traffic.calls["exchanges that brought nothing"]),
            "calls": traffic.calls,
            "events": traffic.events,
            "waits": traffic.waits,
            "built": traffic.most_held,
        }
        if ranks.main:
            (out / name / "counts.json").write_text(json.dumps(facts))


def run_jobs(jobs: Iterable[Job], out: Path, gradients=False, check=None) -> None:
    """Run all jobs in their order: in this process, or by one fork of ranks for all in a row.

    This process has imported everything. `check` is called on each fork's ranks in the end.
    """
    jobs = list(jobs)
    if any("--pt-compile" in job.argv for job in jobs):
        importlib.import_module("torch._inductor.compile_fx")  # as a first compilation would
    gc.freeze()  # every run collects garbage: spare it what the imports left
    for world, same in itertools.groupby(jobs, key=lambda job: job.ranks):
        if world == 1 and DEVICE == "cpu":
            work(ALONE, same, out, gradients)
        else:  # a process that has used a GPU cannot be forked
            args = world, free_port(), list(same), out, gradients, check
            how = "fork" if DEVICE == "cpu" else "spawn"
            start_processes(_run_rank, args, world, start_method=how)


def scales_as_powers_of_two():
    """A patch under which tensorwise scales are rounded down, as those of rows always are.

    Otherwise a last bit of the largest number changes all of a tensor's roundings.
    """
    from torchao.float8 import Float8LinearConfig

    make = Float8LinearConfig.from_recipe_name

    def from_recipe_name(recipe):
        return dataclasses.replace(make(recipe), round_scales_to_power_of_2=True)

    return mock.patch.object(Float8LinearConfig, "from_recipe_name", staticmethod(from_recipe_name))


def _run_rank(rank: int, world: int, port: int, jobs, out: Path, gradients, check) -> None:
    torch.set_num_threads(1)  # OpenMP's other threads were not forked
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks, path = Ranks(rank, world, rank), out / f"rank{rank}of{world}.log"
    with path.open("a") as log, contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
        if world > 1:
            join(ranks, pick_device(DEVICE, rank), 300.0)
        work(ranks, jobs, out, gradients)
        if check:
            check(ranks, out)
        gc.collect()
        leave()
