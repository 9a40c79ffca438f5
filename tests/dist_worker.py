"""One rank that does several runs in a row: started by torchrun from tests/test_distributed.py.

    torchrun --nproc-per-node N tests/dist_worker.py CASES.json [--checks]

CASES.json lists [name, script, flags, traced only]. Next to each result it leaves, for rank 0:

- traffic.json: the bytes that collectives were really handed, by kind (of all-to-alls the ranks' mean);
  of a pipeline those of each group of ranks,
- attention.json: the calls of attention, by format, and how often a kernel of it ran,
- draws.json: what each rank would draw next,
- dropout.json: the states of each rank's random numbers before its calls of dropout,
- idle.json: how many exchanges of tokens brought each rank nothing,
- calls.json: how often collectives were called, by kind; how many gathers before the first attention,
- built.json, of train_fsdp.py: the most bytes that tensors held until the model was built,
- with --gradients, gradients.safetensors and parameters.safetensors: whole, of the first step (clipped;
  of a resumed run what was loaded), and after the last.
"""

import contextlib
import gc
import hashlib
import importlib
import itertools
import json
import os
import sys
import time
import weakref
from collections import Counter
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
from llm_train_bench.parallel.ranks import find_ranks, gather, join, leave
from llm_train_bench.run.checkpoint import training_state
from llm_train_bench.run.checkpoint.manifest import verify
from llm_train_bench.run.launch import train_planned
from llm_train_bench.run.loop import validation_loss
from llm_train_bench.settings.command_line import parse_args
from tests import te_standin
from tests.faults import whole_state
from tests.helpers import attention_calls, is_attention, plan_of, without_inductor

ENTRYPOINTS = {"train_ddp.py": train_ddp, "train_fsdp.py": train_fsdp, "train_pp.py": train_pp}
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

    def __init__(self):
        super().__init__()
        self.bytes, self.calls = Counter(), Counter()
        self.held, self.kernels = {}, 0
        self.most_held, self.looking = 0, True
        self.model, self.gradients = None, {}

    def built(self, model, *args):
        """Stands in for build_optimizer: by then the model exists."""
        self.looking = False
        optimizer = build_optimizer(model, *args)
        if "--gradients" in sys.argv:
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
        small = "tests/configs/llama-small.json"
        _, model = sharded_llama(ranks, device, "--amp", amp, seq_len=256, config=small)
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


def converted_losses(ranks, device, path: str) -> dict[str, list[float]]:
    """Losses of a few steps under FSDP: of plain blocks, and of Transformer Engine's modules."""
    plan = plan_of([path, "--amp", "off", "--seq-len", 16], "train_fsdp.py", ranks.world, "cpu")
    losses = {}
    for name in ("plain", "converted"):
        fp8 = Fp8()
        with torch.device("meta"):
            model = Transformer(plan.work.config, 16)
        if name == "converted":
            micro = te.convert(model, te_standin, cache_weights=True, primary_recipe="any")
            fp8 = TransformerEngineFp8(te_standin, "any", micro, primary_weights=True)
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


def main() -> None:
    ranks = find_ranks(os.environ)
    cases = json.loads(Path(sys.argv[1]).read_text())
    if any("--pt-compile" in flags for _, _, flags, *_ in cases):
        importlib.import_module("torch._inductor.compile_fx")  # as a first compilation would
    gc.freeze()  # every run collects garbage: spare it what the imports left
    # One process group serves all runs.
    join(ranks, torch.device("cpu"), 60.0)
    out = Path(sys.argv[1]).parent
    for name, script, flags, traced_only, *mutant in cases:
        argv = [*flags, "--output-dir", str(out), "--run-name", name]
        args = parse_args(argv, script)
        torch._dynamo.reset()
        # Dynamo compiles nothing while a dispatch mode looks on.
        traffic = Traffic()
        looking = contextlib.nullcontext() if args.pt_compile else traffic
        train_fsdp.build_optimizer = train_pp.build_optimizer = traffic.built
        with (
            looking,
            without_inductor() if traced_only else contextlib.nullcontext(),
            contextlib.nullcontext() if args.pt_compile else attention_calls() as calls,
            contextlib.nullcontext() if args.pt_compile else dropout_states() as states,
            mock.patch("llm_train_bench.measure.power.find_sensor", lambda device: Meter()),
            mock.patch("llm_train_bench.run.loop.fullest_expert", traffic.unseen(fullest_expert)),
            mock.patch("llm_train_bench.run.loop.validation_loss", traffic.unseen(validation_loss)),
            MUTANTS[mutant[0]]() if mutant and mutant[0] else contextlib.nullcontext(),
        ):
            train_planned(ENTRYPOINTS[script].train, argv, script, ranks)
        if "--gradients" in sys.argv:
            model = traffic.model
            parameters = wholes(model, dict(model.weights()))
            if ranks.main:
                save_file(traffic.gradients, out / name / "gradients.safetensors")
                save_file(parameters, out / name / "parameters.safetensors")
        groups = gather(ranks, traffic.bytes)
        each = len(groups) // (args.pp if script == "train_pp.py" else 1)
        groups = [groups[i : i + each] for i in range(0, len(groups), each)]
        moved = [
            group[0] | {"all_to_all": sum(g["all_to_all"] for g in group) / each}
            for group in groups
        ]
        draws = gather(ranks, torch.rand(1).item())  # what dropout would have drawn next
        dropout = gather(ranks, states or [])
        idle = gather(ranks, traffic.calls["exchanges that brought nothing"])
        if ranks.main:
            (out / name / "dropout.json").write_text(json.dumps(dropout))
            (out / name / "idle.json").write_text(json.dumps(idle))
            (out / name / "draws.json").write_text(json.dumps(draws))
            (out / name / "calls.json").write_text(json.dumps(traffic.calls))
            (out / name / "traffic.json").write_text(
                json.dumps(moved if each < ranks.world else moved[0])
            )
            calls = calls and calls | {"kernels": traffic.kernels}
            (out / name / "attention.json").write_text(json.dumps(calls))
            if script == "train_fsdp.py":
                (out / name / "built.json").write_text(json.dumps(traffic.most_held))
    if "--checks" in sys.argv:
        check_shards(ranks, out)
    gc.collect()
    leave()


def differing_after_load(ranks, device, directory: Path) -> list[str]:
    """Names of the tensors that are not, bit for bit, those of a checkpoint after loading it."""
    flags = ["--dp-replicate", "2"] if ranks.world == 4 else []
    small = "tests/configs/llama-small.json"
    plan, model = sharded_llama(ranks, device, "--amp", "off", *flags, seq_len=32, config=small)
    optimizer = build_optimizer(model, plan.optimizer)
    training_state.load(directory, verify(directory), model, optimizer)
    found = {name: whole(t) for name, t in training_state.state_tensors(model, optimizer)}
    stored = whole_state(directory)
    assert stored.keys() == found.keys()
    return [name for name, tensor in stored.items() if not torch.equal(tensor, found[name])]


def check_shards(ranks, out: Path) -> None:
    """What else test_distributed.py asks of sharded models, as one file each."""
    saved = out / "save-fsdp2/checkpoints/step-00000004"
    differing = gather(ranks, differing_after_load(ranks, torch.device("cpu"), saved))
    if ranks.main:
        names = [name for found in differing for name in found]
        (out / f"loaded{ranks.world}.json").write_text(json.dumps(names))
    held = gather(ranks, held_bytes(ranks, torch.device("cpu")))
    skipped = gather(ranks, skips_for_an_overflow_elsewhere(ranks, torch.device("cpu")))
    timeouts = hsdp_timeouts(ranks, torch.device("cpu"))
    if ranks.main:
        (out / f"held{ranks.world}.json").write_text(json.dumps(held))
        (out / f"skipped{ranks.world}.json").write_text(json.dumps(skipped))
        (out / f"timeouts{ranks.world}.json").write_text(json.dumps(timeouts))
    for path in ("configs/gpt2-tiny.json", "configs/llama-tiny.json"):
        losses = converted_losses(ranks, torch.device("cpu"), path)
        if ranks.main:
            (out / f"converted{ranks.world}-{Path(path).name}").write_text(json.dumps(losses))
    if ranks.world == 2:
        dtypes = dtypes_in_a_block(ranks, torch.device("cpu"))
        error = embedding_gradient_error(ranks, torch.device("cpu"))
        if ranks.main:
            (out / "dtypes2.json").write_text(json.dumps(dtypes))
            (out / "embedding2.json").write_text(json.dumps(error))


if __name__ == "__main__":
    main()
