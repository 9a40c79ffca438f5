"""Ranks forked from a process that has imported everything; each does several runs in a row.

Cases are (name, script, flags, traced only[, mutant]). Next to each result lies `facts.json`:

- traffic: the bytes that collectives were really handed, by kind (of all-to-alls the ranks' mean); of a
  pipeline those of each group of ranks,
- attention: the calls of attention, by format, and how often a kernel of it ran,
- draws: what each rank would draw next; dropout: the states of its random numbers before its dropouts,
- idle: how many exchanges of tokens brought each rank nothing,
- calls: how often collectives were called, by kind; how many gathers before the first attention,
- built: the most bytes that tensors held until the model was built,

and with `gradients` also gradients.safetensors and parameters.safetensors: whole, of the first step
(clipped; of a resumed run what was loaded), and after the last.
"""

import contextlib
import gc
import hashlib
import importlib
import itertools
import json
import os
import time
import weakref
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.multiprocessing import ProcessContext, start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
import train_ddp
import train_fsdp
import train_pp
from llm_train_bench.apply.fp8.base import Fp8
from llm_train_bench.apply.fp8.te import TransformerEngineFp8
from llm_train_bench.apply.optimizer import build_optimizer, optimizer_step
from llm_train_bench.apply.precision import LossScaler
from llm_train_bench.model import te
from llm_train_bench.model.experts import Router, fullest_expert
from llm_train_bench.model.shares import divided
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.parallel.fsdp import apply_fsdp, materialize_shards, whole
from llm_train_bench.parallel.layout import Gradients, RankLayout
from llm_train_bench.parallel.ranks import Ranks, gather, join, leave
from llm_train_bench.run.checkpoint import training_state
from llm_train_bench.run.checkpoint.manifest import verify
from llm_train_bench.run.launch import train_planned
from llm_train_bench.run.loop import validation_loss
from tests import te_standin
from tests.faults import whole_state
from tests.helpers import attention_calls, free_port, is_attention, plan_of, without_inductor

ENTRYPOINTS = {f"{m.__name__}.py": m for m in (train, train_ddp, train_fsdp, train_pp)}
# Where optimizers are built.
OPTIMIZERS = (train, train_fsdp, train_pp)
CONVERTED = {2: ("gpt2-tiny", "llama-tiny"), 4: ("llama-tiny",)}
LOOP = "llm_train_bench.run.loop"
CPU, SMALL = torch.device("cpu"), "tests/configs/llama-small.json"
KINDS = {
    "send": ("send", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
}


# Those that move tokens between ranks of a layout (llm_train_bench/parallel/layout.py).
TOKENS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Meter:
    """Stands in for a CPU's energy counter: each rank sees a machine that takes 100 W."""

    source = "tests/dist_worker.py"

    def joules(self) -> float:
        return 100.0 * time.perf_counter()

    def sample(self) -> None: ...
    def limits(self) -> tuple[None, None]:
        return None, None

    def throttle_counters(self) -> tuple[float, dict]:
        return 0.0, {}

    def other_processes(self, ours) -> None: ...


class Traffic(TorchDispatchMode):
    """Adds up the tensors handed to collectives; loss, norm and wishes to stop are left out.

    Also counts the bytes that tensors hold, until `looking` ends.
    """

    def __init__(self, keeps: bool):
        super().__init__()
        self.keeps = keeps  # gradients
        self.bytes, self.calls = Counter(), Counter()
        self.held, self.kernels = {}, 0
        self.most_held, self.looking = 0, True
        self.model, self.gradients = None, {}

    def built(self, model, *args):
        """Stands in for build_optimizer: by then the model exists."""
        self.looking = False
        optimizer = build_optimizer(model, *args)
        if self.keeps:
            optimizer.register_step_pre_hook(lambda *_: self.at_step(model, optimizer))
        self.model = model
        return optimizer

    def unseen(self, function):
        """The function, whose collectives are not counted: it is no part of a step."""

        def called(*args):
            before = self.bytes.copy(), self.calls.copy()
            found = function(*args)
            self.bytes, self.calls = before
            return found

        return called

    def at_step(self, model, optimizer) -> None:
        """Keep the first step's gradients; of a resumed run what was loaded."""
        if self.gradients:
            return
        before = self.bytes.copy()
        named = dict(model.weights())
        if not optimizer.state:
            # What the optimizer takes: it may clip them itself.
            scale = getattr(optimizer, "grad_scale", 1.0)
            clipped = {n: p.grad / scale for n, p in named.items() if p.requires_grad}
            self.gradients = wholes(model, clipped)
        else:
            self.gradients = {f"p/{n}": t for n, t in wholes(model, named).items()}
        keys = {key for state in optimizer.state.values() for key, t in state.items() if t.ndim}
        for key in sorted(keys):  # in the same order on all ranks
            some = {n: optimizer.state[p][key] for n, p in named.items() if optimizer.state.get(p)}
            self.gradients |= {f"{key}/{n}": t for n, t in wholes(model, some).items()}
        self.bytes = before  # without these gathers

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
        if namespace == "c10d" and name in KINDS:
            kind, position = KINDS[name]
            tensors = args[position]
            for t in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                # uint8: a gather of several formats at once.
                if t.numel() > 2 and (t.is_floating_point() or t.dtype == torch.uint8):
                    self.bytes[kind] += t.numel() * t.element_size()
                    self.calls[kind] += 1
        elif namespace == "_c10d_functional" and name in TOKENS:
            size = args[0].numel() * args[0].element_size()
            whole = args[1] if name == "all_gather_into_tensor" else 1
            if name == "all_to_all_single" and not sum(args[1]):
                self.calls["exchanges that brought nothing"] += 1
            self.bytes[TOKENS[name]] += size * whole
        elif is_attention(func):
            self.kernels += 1
            self.calls.setdefault("gathers before attention", self.calls["all_gather"])
        made = func(*args, **(kwargs or {}))
        if self.looking:
            for leaf in tree_leaves(made):
                self._look_at(leaf)
        return made


@contextlib.contextmanager
def dropout_states():
    """Lists the state of the random numbers, as a digest, before each eager call of dropout."""
    drop, states = F.dropout, []

    def listed(*args, **kwargs):
        states.append(hashlib.sha256(torch.get_rng_state().numpy()).hexdigest())
        return drop(*args, **kwargs)

    with mock.patch.object(F, "dropout", listed):
        yield states


def wholes(model, named) -> dict[str, torch.Tensor]:
    """Copies of the named tensors of all ranks, whole."""
    found = model.layout.wholes(model.config, ((n, t.detach()) for n, t in named.items()))
    return {name: tensor.clone() for name, tensor in found}


def unordered(config, name, whole, layout):
    """A part of each weight as if nothing were fused."""
    how = divided(config, name)
    return whole if how is None else whole.chunk(layout.tp, how[1])[layout.tp_rank]


def without_partial(init):
    """Gradients that forget which of them are partial."""

    def replaced(self, *args):
        init(self, *args)
        self.partial = []

    return replaced


def restless(best):
    """A router that breaks near ties in another way at every second call."""
    calls = itertools.count()

    def chosen(self, scores):
        sign = 1 if next(calls) % 2 else -1
        return best(self, scores + sign * 0.02 * torch.linspace(-1, 1, scores.shape[-1]))

    return chosen


# Ways to break layouts, which tests/layouts.py must see.
MUTANTS = {
    "gradients are averaged": lambda: mock.patch(
        "llm_train_bench.parallel.fsdp.sharded_modules", lambda model: []
    ),
    "fused weights are cut unordered": lambda: mock.patch(
        "llm_train_bench.parallel.fsdp.own_part", unordered
    ),
    "norms' gradients stay partial": lambda: mock.patch.object(
        Gradients, "__init__", without_partial(Gradients.__init__)
    ),
    "a tied head's gradients stay apart": lambda: mock.patch.object(
        RankLayout, "exchanged", lambda self, numbers, pp_rank: torch.zeros_like(numbers)
    ),
    "recomputation routes otherwise": lambda: mock.patch.object(
        Router, "best", restless(Router.best)
    ),
}


def sharded_llama(ranks, device, *flags, seq_len=8, config="configs/llama-tiny.json"):
    """The arguments and the model of a run of train_fsdp.py, just before its optimizer is built."""
    argv = [config, "--seq-len", seq_len, *flags]
    plan = plan_of(argv, "train_fsdp.py", ranks.world, "cpu")
    return plan, shard(plan, device)


def shard(plan, device, model=None, fp8=None):
    """The model of a plan, sharded and filled."""
    if model is None:
        with torch.device("meta"):
            model = Transformer(plan.work.config, plan.work.batch.seq_len)
    layout = RankLayout(plan.work.fsdp, torch.distributed.get_rank())
    apply_fsdp(model, layout.connect(device, plan.ranks.dist_timeout), plan.work)
    materialize_shards(model, device, 0, fp8=fp8)
    return model


def held_bytes(ranks, device) -> int:
    """Bytes of parameters and AdamW state that this rank holds of a sharded model after a step."""
    plan, model = sharded_llama(ranks, device, "--amp", "off")
    optimizer = build_optimizer(model, plan.optimizer)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    model(ids, ids).backward()
    optimizer.step()
    model.reshard()
    state = [t for s in optimizer.state.values() for t in s.values() if t.ndim]
    held = [t.to_local() for t in (*model.parameters(), *state)]
    return sum(t.numel() * t.element_size() for t in held)


def embedding_gradient_error(ranks, device) -> float:
    """Relative distance of the embedding's gradient: bf16 against fp32; few tokens, each often."""
    gradients = []
    for amp in ("off", "bf16"):
        _, model = sharded_llama(ranks, device, "--amp", amp, seq_len=256, config=SMALL)
        ids = torch.randint(4, (8, 256), generator=torch.Generator().manual_seed(ranks.rank))
        model(ids, ids).backward()
        gradients.append(whole(model.embed.weight.grad))
    fp32, bf16 = gradients
    return ((bf16 - fp32).norm() / fp32.norm()).item()


def dtypes_in_a_block(ranks, device) -> list[str]:
    """Dtypes of activations and rotary tables as attention gets them under bf16."""
    _, model = sharded_llama(ranks, device)
    seen = []
    model.blocks["1"].attn.register_forward_pre_hook(
        lambda module, inputs: seen.extend(str(t.dtype) for t in (inputs[0], *inputs[1]))
    )
    ids = torch.zeros(1, 8, dtype=torch.int64)
    model(ids, ids).backward()
    return seen


def converted_losses(ranks, device, name: str) -> dict[str, list[float]]:
    """Losses of a few steps under FSDP: of plain blocks, and of Transformer Engine's modules."""
    argv = [f"configs/{name}.json", "--amp", "off", "--seq-len", 16]
    plan = plan_of(argv, "train_fsdp.py", ranks.world, "cpu")
    losses = {}
    for name in ("plain", "converted"):
        fp8 = Fp8()
        with torch.device("meta"):
            model = Transformer(plan.work.config, 16)
        if name == "converted":
            micro = te.convert(model, te_standin, cache_weights=True, primary_recipe="any")
            fp8 = TransformerEngineFp8(te_standin, "any", micro, exact_in_optimizer=True)
        shard(plan, device, model, fp8)
        optimizer = build_optimizer(model, plan.optimizer)
        ids = torch.arange(32).view(2, 16) + ranks.rank
        losses[name] = []
        for _ in range(3):
            loss = model(ids, ids)
            loss.backward()
            optimizer_step(list(model.parameters()), optimizer, 1e-3, 1.0, None)
            model.zero_grad()
            losses[name].append(loss.item())
    return losses


def skips_for_an_overflow_elsewhere(ranks, device) -> bool:
    """Whether this rank's fp16 step leaves the weights alone when a shard of the last one overflows."""
    plan, model = sharded_llama(ranks, device, "--amp", "fp16")
    optimizer, scaler = build_optimizer(model, plan.optimizer), LossScaler(device)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if ranks.rank == ranks.world - 1:
        model.embed.weight.grad.to_local()[0, 0] = float("inf")
    before = [p.to_local().clone() for p in model.parameters()]
    optimizer_step(list(model.parameters()), optimizer, 1e-3, 1.0, scaler)
    after = [p.to_local() for p in model.parameters()]
    return scaler.skipped.item() == 1 and all(map(torch.equal, before, after))


def hsdp_timeouts(ranks, device) -> list[float]:
    """Seconds that the groups of a 2 x n mesh wait for a collective, with --dist-timeout 7.

    Also those of a layout's groups, with --tp 2.
    """
    _, model = sharded_llama(ranks, device, "--dp-replicate", "2", "--dist-timeout", "7")
    mesh = next(model.parameters()).device_mesh
    groups = [mesh.get_group(i) for i in range(mesh.ndim)]
    argv = ["configs/llama-tiny.json", "--tp", "2"]
    layout = RankLayout(plan_of(argv, "train_fsdp.py", ranks.world, "cpu").work.fsdp, ranks.rank)
    layout.connect(device, 7.0)
    groups += layout.groups.values()
    backends = [group._get_backend(device) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def work(ranks, cases, out: Path, gradients: bool = False) -> None:
    """All cases, one after the other, on this rank or alone."""
    for name, script, flags, traced_only, *mutant in cases:
        argv = [*map(str, flags), "--output-dir", str(out), "--run-name", name]
        traffic, calls, states = Traffic(gradients), None, []
        traffic.looking = script == "train_fsdp.py"
        with contextlib.ExitStack() as stack:
            if "--pt-compile" in argv:  # Dynamo compiles nothing while a dispatch mode looks on
                torch._dynamo.reset()
                stack.enter_context(without_inductor() if traced_only else contextlib.nullcontext())
            else:
                calls = stack.enter_context(attention_calls())
                states = stack.enter_context(dropout_states())
                stack.enter_context(traffic)
            for patch in (
                *(mock.patch.object(m, "build_optimizer", traffic.built) for m in OPTIMIZERS),
                mock.patch("llm_train_bench.measure.power.find_sensor", lambda device: Meter()),
                mock.patch("llm_train_bench.measure.matmul_rate.SECONDS", 0.01),
                mock.patch(f"{LOOP}.fullest_expert", traffic.unseen(fullest_expert)),
                mock.patch(f"{LOOP}.validation_loss", traffic.unseen(validation_loss)),
                *(MUTANTS[name]() for name in mutant if name),
            ):
                stack.enter_context(patch)
            train_planned(ENTRYPOINTS[script].train, argv, script, ranks)
        if gradients:
            parameters = wholes(traffic.model, dict(traffic.model.weights()))
            if ranks.main:
                save_file(traffic.gradients, out / name / "gradients.safetensors")
                save_file(parameters, out / name / "parameters.safetensors")
        groups = gather(ranks, traffic.bytes)
        each = len(groups) // (int(argv[argv.index("--pp") + 1]) if "--pp" in argv else 1)
        groups = [groups[i : i + each] for i in range(0, len(groups), each)]
        moved = [g[0] | {"all_to_all": sum(r["all_to_all"] for r in g) / each} for g in groups]
        facts = {
            "traffic": moved if len(moved) > 1 else moved[0],
            "attention": calls and calls | {"kernels": traffic.kernels},
            "draws": gather(ranks, torch.rand(1).item()),  # what dropout would have drawn next
            "dropout": gather(ranks, states),
            "idle": gather(ranks, traffic.calls["exchanges that brought nothing"]),
            "calls": traffic.calls,
            "built": traffic.most_held,
        }
        if ranks.main:
            (out / name / "facts.json").write_text(json.dumps(facts))


def start_ranks(world: int, cases, out: Path, gradients=False, checks=False) -> ProcessContext:
    """Fork ranks that run all cases; `join()` of what comes back raises what one of them raised."""
    if any("--pt-compile" in case[2] for case in cases):
        importlib.import_module("torch._inductor.compile_fx")  # as a first compilation would
    gc.freeze()  # every run collects garbage: spare it what the imports left
    args = world, free_port(), cases, out, gradients, checks
    return start_processes(run_rank, args, world, join=False, start_method="fork")


def run_rank(rank: int, world: int, port: int, cases, out: Path, gradients, checks) -> None:
    torch.set_num_threads(1)  # OpenMP's other threads were not forked
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = Ranks(rank, world, rank)
    with (
        (out / f"rank{rank}of{world}.log").open("a") as log,
        contextlib.redirect_stderr(log),
        contextlib.redirect_stdout(log),
    ):
        join(ranks, CPU, 300.0)
        work(ranks, cases, out, gradients)
        if checks:
            check_shards(ranks, out)
        gc.collect()
        leave()


def differing_after_load(ranks, device, directory: Path) -> list[str]:
    """Names of the tensors that are not, bit for bit, those of a checkpoint after loading it."""
    flags = ["--dp-replicate", "2"] if ranks.world == 4 else []
    plan, model = sharded_llama(ranks, device, "--amp", "off", *flags, seq_len=32, config=SMALL)
    optimizer = build_optimizer(model, plan.optimizer)
    training_state.load(directory, verify(directory), model, optimizer)
    found = {name: whole(t) for name, t in training_state.state_tensors(model, optimizer)}
    stored = whole_state(directory)
    assert stored.keys() == found.keys()
    return [name for name, tensor in stored.items() if not torch.equal(tensor, found[name])]


def check_shards(ranks, out: Path) -> None:
    """What else test_distributed.py asks of sharded models, in checks2.json and checks4.json."""
    saved = out / "save-fsdp2/checkpoints/step-00000002"
    checks = {
        "differing": gather(ranks, differing_after_load(ranks, CPU, saved)),
        "held": gather(ranks, held_bytes(ranks, CPU)),
        "skipped": gather(ranks, skips_for_an_overflow_elsewhere(ranks, CPU)),
        "timeouts": hsdp_timeouts(ranks, CPU),
        "converted": {n: converted_losses(ranks, CPU, n) for n in CONVERTED[ranks.world]},
    }
    if ranks.world == 2:
        checks["dtypes"] = dtypes_in_a_block(ranks, CPU)
        checks["embedding"] = embedding_gradient_error(ranks, CPU)
    if ranks.main:
        (out / f"checks{ranks.world}.json").write_text(json.dumps(checks))
