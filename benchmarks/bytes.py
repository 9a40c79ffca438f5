"""Bytes, matmul FLOPs and kernels of a training step on an H200, counted on a machine without a GPU.

    python benchmarks/bytes.py [--only SHAPE/FORMAT/NAME ...] [--list]     (`make bytes`)

It needs a CUDA build of torch 2.11. Our step, and those of transformers, nanoGPT, litgpt and torchtitan,
run under PyTorch's fake CUDA tensors, through the real torch.compile for sm_90. What Inductor generates
is executed too, except its Triton kernels: one program of each is run in numpy, and the distinct
addresses that it loads and stores are counted, times the programs. Every other operator (matmuls,
attention, eager ones) counts as its inputs and outputs, each once. Models of one block and of two give
the rest. docs/SPEED.md has the outcome.

Limits: nothing is timed; the ms are a roofline's. What one kernel touches twice is a cache hit, and
between kernels nothing stays in the cache. Autotuning, padding of matmuls and SDPA patterns are off,
since they would measure on a GPU. Attention is cuDNN's for everybody.
"""

# ruff: noqa: E402

import argparse
import ast
import collections
import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

# Two libraries let autograd believe in a device: torch's own count of them, and the driver.
COUNT = """
#include <cstdint>
static int n = 0;
#define SEEN __attribute__((visibility("default")))
extern "C" SEEN void set_count(int k) { n = k; }
namespace c10 { namespace cuda {
SEEN bool hasPrimaryContext(int8_t) { return false; }
SEEN int8_t device_count() noexcept { return n; }
}}
"""
DRIVER = """
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { if (f) *f = 0; if (a) *a = 0; return 0; }
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
"""


def with_libraries() -> None:
    """Start this script again with both libraries loaded before torch."""
    if "BYTES_LIBRARIES" in os.environ:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source, text, library in (
            ("count.cpp", COUNT, "count.so"),
            ("driver.c", DRIVER, "libcuda.so.1"),
        ):
            (folder / source).write_text(text)
            compiler = "g++" if source.endswith("cpp") else "gcc"
            subprocess.run(
                [compiler, "-shared", "-fPIC", "-o", folder / library, folder / source], check=True
            )
        environment = os.environ | {
            "BYTES_LIBRARIES": name,
            "LD_PRELOAD": f"{folder}/count.so",
            "LD_LIBRARY_PATH": name,
        }
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)


if __name__ == "__main__":
    with_libraries()

import numpy as np
import torch
import torch._dynamo.device_interface
import torch._inductor.fx_passes.fuse_attention
import torch._inductor.fx_passes.pad_mm
import torch._subclasses.fake_tensor
import torch.nn.functional as F
import torch.utils._triton
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/bytes.json"
BANDWIDTH, MATMUL_RATE = 4.1e12, 720e12  # reached on an H200: bytes and bf16 operations per second

# ---------------------------------------------------------------- a device that is not there


H200 = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
    total_memory=141 * 2**30, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    L2_cache_size=60 * 2**20, gcnArchName="",
)  # fmt: skip


class NoDevice(contextlib.nullcontext):
    def __init__(self, *_):
        super().__init__()


def pretend() -> None:
    """Let torch take this machine for one with an H200, as far as compiling on fake tensors asks."""
    torch._C._ensureCUDADeviceGuardSet()
    ctypes.CDLL(os.environ["LD_PRELOAD"]).set_count(100)  # more than torch asks about
    always = lambda value: lambda *_, **__: value  # noqa: E731
    both = dict(
        is_available=True, device_count=1, current_device=0, get_device_properties=H200,
        is_bf16_supported=True, synchronize=None,
    )  # fmt: skip
    answers = both | dict(
        get_device_capability=(9, 0), get_device_name=H200.name, _is_compiled=True, _lazy_init=None,
        is_initialized=False, get_rng_state=torch.zeros(16, dtype=torch.uint8), set_rng_state=None,
        set_device=None, is_current_stream_capturing=False,
    )  # fmt: skip
    for name, value in answers.items():
        setattr(torch.cuda, name, always(value))
    torch.cuda.device = torch.cuda._DeviceGuard = NoDevice
    interface = torch._dynamo.device_interface.CudaInterface
    interface.Worker.get_device_properties = staticmethod(always(H200))
    interface.Worker.current_device = staticmethod(always(0))
    answers = both | dict(
        get_compute_capability=90, is_triton_capable=True, raise_if_triton_unavailable=None,
        maybe_exchange_device=0, exchange_device=0, get_raw_stream=0, memory_allocated=0,
    )  # fmt: skip
    for name, value in answers.items():
        setattr(interface, name, staticmethod(always(value)))
    torch.nn.utils.clip_grad._has_foreach_support = always(True)
    torch.cuda.amp.common.amp_definitely_not_available = always(False)
    torch._subclasses.fake_tensor.init_gpu_context = always(None)
    for module in [m for n, m in sys.modules.items() if n.startswith("torch.")]:
        for name in ("triton_hash_with_backend", "triton_hash_to_path_key", "triton_backend"):
            if name in vars(module):
                setattr(module, name, always("none"))
        for name in ("has_triton", "has_triton_package"):
            if name in vars(module):
                setattr(module, name, always(True))
    # Both would run kernels to choose.
    torch._inductor.fx_passes.fuse_attention._sfdp_init = always(None)
    torch._inductor.fx_passes.pad_mm._pad_mm_init = always(None)
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.joint_graph_constant_folding = False  # it computes on the device
    torch._inductor.config.compile_threads = 1
    torch._functorch.config.enable_autograd_cache = False
    torch._C._cuda_getCurrentRawStream = always(0)
    F.scaled_dot_product_attention = attention
    GraphLowering.compile_to_module = execute


def attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """cuDNN's causal kernel, which torch 2.11 prefers on an H200; the choice would ask the GPU.

    Until torch 2.14 a compiled model of transformers makes the causal mask of T x T; not so here.
    """
    assert (is_causal or attn_mask is not None) and not dropout_p
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (t.to(torch.bfloat16) for t in (q, k, v))
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    return kernel(q, k, v, None, True, 0.0, True, scale=scale)[0]


# ---------------------------------------------------------------- what a Triton kernel touches


class Value(np.ndarray):
    """A Triton tensor; types and casts do not matter to addresses."""

    def to(self, *_, **__):
        return self

    def broadcast_to(self, *shape):
        return value(np.broadcast_to(self, shape[0] if len(shape) == 1 else shape))


def value(x) -> Value:
    return np.asarray(x).view(Value)


class Pointer:
    """A kernel's argument plus an offset."""

    def __init__(self, name: str, offset=0):
        self.name, self.offset = name, offset

    def __add__(self, offset):
        return Pointer(self.name, self.offset + offset)


def highest(x, axis):  # a reduction's result only has to have its shape
    return value(np.max(x, axis=axis))


# What the kernels call of triton.language, triton_helpers and libdevice, as far as addresses ask.
LANGUAGE = dict(
    program_id=lambda axis: value(0),
    arange=lambda start, end: value(np.arange(start, end)),
    full=lambda shape, x, dtype=None: value(np.full(shape, x)),
    zeros=lambda shape, dtype=None: value(np.zeros(shape)),
    range=lambda start, end, step=1, **_: range(int(start), int(end), int(step)),
    where=lambda condition, a, b: value(np.where(condition, a, b)),
    broadcast_to=lambda x, *shape: value(x).broadcast_to(*shape),
    reshape=lambda x, shape: value(np.reshape(x, shape)),
    expand_dims=lambda x, axis: value(np.expand_dims(x, axis)),
    maximum=lambda a, b: value(np.maximum(a, b)),
    minimum=lambda a, b: value(np.minimum(a, b)),
    online_softmax_combine=lambda high, total, x, _: (value(high + x),) * 2,
    online_softmax_reduce=lambda high, total, axis, _: (highest(high, axis),) * 2,
    welford_reduce=lambda x, mean, m2, weight, first: (value(x + mean),) * 3,
    welford=lambda mean, m2, weight, axis: (highest(mean, axis),) * 3,
    device_assert_then=lambda condition, message, x: x,
) | dict.fromkeys(("sum", "max", "min", "max2", "min2", "any"), highest)


class Language:
    """triton.language, its helpers and libdevice, for program 0 of `programs`; notes every address."""

    def __init__(self, programs: float, integers: set[str]):
        self.num_programs, self.integers = lambda axis: value(int(programs)), integers
        self.touched = collections.defaultdict(list)

    def __getattr__(self, name):  # one of the table, or else a function of elements, or a type
        def elementwise(*args, **_):
            arrays = [a for a in args if isinstance(a, np.ndarray)]
            return value(functools.reduce(np.add, arrays)) if arrays else value(0.0)

        return LANGUAGE.get(name, elementwise)

    def touch(self, pointer, mask, kind):
        index, mask = np.broadcast_arrays(pointer.offset, True if mask is None else mask)
        self.touched[pointer.name, kind].append(np.unique(index[mask]))
        return index

    def load(self, pointer, mask=None, other=None, **_):
        index = self.touch(pointer, mask, "read")
        # An index that was loaded is taken for all different rows.
        return value(index if pointer.name in self.integers else np.zeros(index.shape))

    def store(self, pointer, x, mask=None, **_):
        self.touch(pointer, mask, "write")

    def atomic_add(self, pointer, x, mask=None, **_):
        self.load(pointer, mask)
        self.store(pointer, x, mask)


ITEM_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "i64": 8, "i32": 4, "i16": 2, "i8": 1,
              "u64": 8, "u32": 4, "u16": 2, "u8": 1, "i1": 1, "fp8e4nv": 1, "fp8e5": 1}  # fmt: skip


def divided(n: int, most: int) -> int:
    """n, halved as often as it can be until it is at most `most`."""
    while n > most and n % 2 == 0:
        n //= 2
    return n


class Kernel:
    """A generated Triton kernel, counted in place of launched."""

    def __init__(self, name: str, source: str, counter: "Counter"):
        self.name, self.source, self.counter = name, source, counter
        self.signature = ast.literal_eval(re.search(r"'signature': (\{.*?\})", source)[1])
        # Its helpers and itself, without decorators.
        code = re.sub(r"^@triton_heuristics.*?^\)\n", "", source, flags=re.M | re.S)
        self.code = code[code.index("@triton.jit") :].replace("@triton.jit", "")

    def run(self, *args, stream=None):
        pointers = [name for name, kind in self.signature.items() if kind.startswith("*")]
        tensors = [a for a in args if isinstance(a, Tensor)]
        # No buffer is touched beyond its storage, and one that is given twice counts once.
        known: dict = {}
        buffers = tuple(
            (p, known.setdefault((s._cdata, t.storage_offset()), p), s.nbytes())
            for p, t in zip(pointers, tensors, strict=True)
            for s in [t.untyped_storage()]
        )
        self.counter.add("triton", self.name, self.bytes(buffers))

    def __hash__(self):
        return hash(self.source)

    def __eq__(self, other):
        return self.source == other.source

    @functools.cache  # noqa: B019
    def bytes(self, buffers: tuple[tuple[str, str, int], ...]) -> float:
        """Bytes read and written; `buffers`: an argument's name, that of its buffer, its bytes."""
        sizes = {
            name: int(n)
            for name, n in re.findall(r"^    ([xyr]\d?_?numel) = (\d+)$", self.code, re.M)
        }
        x, y, r = (sizes.get(name, 1) for name in ("xnumel", "ynumel", "r0_numel"))
        y_block = divided(y, 256)
        x_block = divided(x, max(1, 2**17 // r // y_block))
        blocks = {"XBLOCK": x_block, "YBLOCK": y_block, "R0_BLOCK": r, "NUM_STAGES": 1}
        constants = {name for name, kind in self.signature.items() if kind == "constexpr"}
        if "RSPLIT_SIZE" in constants:  # a program has several rows, one after the other
            x_block = int(re.search(r"'RSPLIT_SIZE': (\d+)", self.source)[1])
            blocks |= {"RSPLIT_SIZE": x_block, "XBLOCK": 1}
        elif "XBLOCK" not in constants:
            x_block = 1
        programs = x / x_block * y / (y_block if "YBLOCK" in constants else 1)
        integers = {name for name, kind in self.signature.items() if kind in ("*i64", "*i32")}
        tl = Language(programs, integers)
        names = dict.fromkeys(("tl", "triton_helpers", "libdevice", "tl_math"), tl)
        names |= {"min": min, "max": max}
        with np.errstate(all="ignore"):
            exec(self.code, names)
            names[self.name](
                *(
                    Pointer(name) if kind.startswith("*") else blocks.get(name, sizes.get(name, 0))
                    for name, kind in self.signature.items()
                )
            )
        total = 0.0
        item = {name: ITEM_SIZES[self.signature[name][1:]] for name, _, _ in buffers}
        most = {(same, kind): n for _, same, n in buffers for kind in ("read", "write")}
        touched = collections.defaultdict(list)
        for name, same, _ in buffers:
            written = tl.touched[name, "write"]
            # What a kernel itself wrote just before is in the cache.
            read = [] if written and name.startswith("out_ptr") else tl.touched[name, "read"]
            touched[same, "read"] += [item[name] * i for i in read]
            touched[same, "write"] += [item[name] * i for i in written]
        for key, addresses in touched.items():
            distinct = len(np.unique(np.concatenate(addresses))) if addresses else 0
            total += min(distinct * programs * item[key[0]], most[key])
        return total


def execute(graph: GraphLowering) -> types.SimpleNamespace:
    """In place of compiling what Inductor generated: run it on fake tensors, kernels counted."""
    code, _ = graph.codegen()
    code = getattr(code, "value", code)
    if folder := os.environ.get("BYTES_CODE"):
        n = len(list(Path(folder).iterdir()))
        (Path(folder) / f"{n:03}.py").write_text(code)
    counter = Counter.current
    names: dict = {}
    exec(code[: code.index("async_compile = AsyncCompile()")], names)

    def view(tensor, size, stride, offset=0):
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    def empty(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    compiler = types.SimpleNamespace(
        triton=lambda name, source, **_: Kernel(name, source, counter), wait=lambda _: None
    )
    names |= {"async_compile": compiler, "empty_strided_cuda": empty, "reinterpret_tensor": view}
    names |= {"assert_size_stride": lambda *_: None, "assert_alignment": lambda *_: None}
    rest = code[code.index("async_compile = AsyncCompile()") :].split("\n", 1)[1]
    rest = re.sub(
        r"^(reinterpret_tensor|empty_strided_cuda|assert_\w+) = .*$", "", rest, flags=re.M
    )
    exec(rest, names)
    runner = names.get("runner")
    call = runner.call if runner is not None else names["call"]
    return types.SimpleNamespace(call=call, runner=None, __file__="generated")


# ---------------------------------------------------------------- every other operator

aten = torch.ops.aten
FREE = ("empty", "detach", "alias", "_unsafe_view", "sym_", "is_same_size",
        "_local_scalar_dense", "lift_fresh", "device")  # fmt: skip


def storage_bytes(t: Tensor) -> int:
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


def tensors_of(x) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, list | tuple):
        return [t for part in x for t in tensors_of(part)]
    return []


@dataclasses.dataclass
class Launch:
    phase: str
    kind: str
    name: str
    bytes: float
    flops: float = 0.0
    kernels: int = 1

    @property
    def seconds(self) -> float:
        return max(self.bytes / BANDWIDTH, self.flops / MATMUL_RATE)


class Counter(TorchDispatchMode):
    """Notes what every operator outside of tracing reads, writes and computes."""

    current: "Counter"

    def __init__(self):
        super().__init__()
        self.launches: list[Launch] = []
        self.phase = ""
        Counter.current = self

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def add(self, kind, name, n_bytes, flops=0.0, kernels=1):
        self.launches.append(Launch(self.phase, kind, name, n_bytes, flops, kernels))

    def __torch_dispatch__(self, func, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Fake tensors do not know this overload (torch 2.11).
        known = func is not aten.addmm.dtype_out
        out = func(*args, **kwargs) if known else kwargs["out"]
        if torch._guards.TracingContext.try_get() is None:
            self.count(func, args, kwargs, out)
        return out

    def count(self, func, args, kwargs, out) -> None:
        """Inputs and outputs of one operator, each once, unless it is known to touch less or more."""
        name = func._schema.name.split("::")[1]
        if name.startswith(FREE) or func.is_view:
            return
        given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
        changed = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
        overwrites = {"out"} | ({"self"} if name in ("copy_", "fill_", "zero_") else set())
        read = [t for n, x in given.items() if n not in changed & overwrites for t in tensors_of(x)]
        written = [t for n in changed for t in tensors_of(given.get(n))]
        known = {id(t) for t in written}
        written += [t for t in tensors_of(out) if id(t) not in known]
        if not any(t.is_cuda for t in read + written):
            return
        reads = sum(map(storage_bytes, {id(t): t for t in read}.values()))
        writes = sum(map(storage_bytes, written))
        kind, kernels, flops = "eager", 1, 0.0
        if name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"):
            kind = "matmul"
            a, b = (args[1], args[2]) if "add" in name else (args[0], args[1])
            flops = 2.0 * a.numel() * b.shape[-1]
            if name == "addmm" and args[0].dim() == 2 and 0 not in args[0].stride():
                c = args[0].untyped_storage()._cdata
                if all(t.untyped_storage()._cdata != c for t in written):
                    self.add("eager", "copy of C", 2 * storage_bytes(args[0]))
        elif "attention" in name:
            # Two matmuls of half of T x T, five in the backward; grad_out is its first argument.
            kind, backward = "attention", "backward" in name
            q, v = (args[1], args[3]) if backward else (args[0], args[2])
            size = q[..., 0].numel() * q.shape[2] * (q.shape[3] + v.shape[3])
            flops = size * (2.5 if backward else 1.0)
        elif name.startswith(("new_", "zeros", "ones", "full")):
            reads = 0
        elif name == "embedding":
            reads = storage_bytes(args[1]) + storage_bytes(out)
        elif name in ("gather", "index_select", "nll_loss_forward"):
            reads = writes
        elif name == "embedding_dense_backward":
            # Sorted by row; the table is filled with zeros, then each row used is written.
            rows = min(args[1].numel(), out.shape[0]) * out.shape[1] * out.element_size()
            reads, writes, kernels = storage_bytes(args[0]), writes + rows, 8
        elif name == "nll_loss_backward":  # filled with zeros, then one element of a row
            reads, kernels = 0, 2
        elif name in ("native_layer_norm_backward", "_fused_rms_norm_backward"):
            # One kernel for the input's gradient, one for the weights'.
            reads, kernels = reads + sum(map(storage_bytes, args[:2])), 2
        elif name.startswith(("_foreach", "_fused_adam")):
            # A launch has at most 320 blocks of 65536 elements.
            blocks = sum(math.ceil(t.numel() / 65536) for t in args[0])
            kernels = max(1, math.ceil(blocks / 320)) + (name == "_foreach_norm")
            if name.startswith("_fused_adam") and given.get("grad_scale") is None:
                writes -= sum(map(storage_bytes, args[1]))  # gradients are written only unscaled
        self.add(kind, name, float(reads + writes), flops, kernels)


# ---------------------------------------------------------------- the models


def summed_loss(logits, labels):
    return F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=-100)


def peer_loss(model: nn.Module, kind: str):
    """A function of tokens and labels to the loss, compiled as the peer's own training script does."""
    if kind == "nanogpt":
        return torch.compile(model)
    if kind == "litgpt":
        compiled = torch.compile(lambda tokens: model.head(model.hidden(tokens)))

        def loss(tokens, labels):  # chunks of 128 rows, of logits that exist
            rows = compiled(tokens).flatten(0, 1).split(128)
            parts = zip(rows, labels.flatten().split(128), strict=True)
            losses = [F.cross_entropy(a, b, ignore_index=-100, reduction="none") for a, b in parts]
            count = (labels != -100).sum()
            return torch.cat(losses).sum() / count.maximum(torch.ones_like(count))

        return loss
    for block in model.blocks:
        block.compile(fullgraph=True)
    compiled = torch.compile(summed_loss)

    def chunked(tokens, labels):  # eight chunks, each with its backward at once
        hidden = model.hidden(tokens)
        whole = torch.zeros_like(hidden, dtype=torch.float32).flatten(0, 1)
        rows = whole.shape[0] // 8
        parts = hidden.detach().flatten(0, 1).split(rows), whole.split(rows)
        for part, into, label in zip(*parts, labels.flatten().split(rows), strict=True):
            part = part.detach().requires_grad_()
            loss = compiled(model.head(part), label) / labels.numel()
            loss.backward()
            into.copy_(part.grad)
        return (hidden, whole.view_as(hidden).to(hidden.dtype))

    return chunked


@dataclasses.dataclass(frozen=True)
class Shape:
    config: str
    B: int
    T: int
    peers: tuple[str, ...]


SHAPES = {
    "gpt2-125m": Shape("configs/gpt2-125m.json", 128, 1024, ("transformers", "nanogpt")),
    "gpt2-1.5b": Shape("configs/gpt2-1.5b.json", 32, 1024, ("transformers", "nanogpt")),
    "llama-8b": Shape(
        "configs/llama-3.1-8b.json", 5, 4096, ("transformers", "litgpt", "torchtitan")
    ),
}


def build(name, shape, depth, dtype):
    """Model and loss function."""
    from benchmarks.peer_models import Peer
    from llm_train_bench.model.config import load_config

    config = load_config(ROOT / shape.config)
    config = dataclasses.replace(config, num_hidden_layers=depth, windows=config.windows[:depth])
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            if name == "ours":
                from llm_train_bench.apply.compile import apply_compile
                from llm_train_bench.model.transformer import Transformer

                model = Transformer(config, shape.T)
                torch.set_default_dtype(torch.float32)
                model.rope = model.rope_for(shape.T, torch.device("cuda"))
                apply_compile(model, "default")
                return model, model
            if name == "transformers":
                import transformers

                raw = json.loads((ROOT / shape.config).read_text())
                raw["n_layer" if "n_layer" in raw else "num_hidden_layers"] = depth
                made = transformers.AutoConfig.for_model(**raw)
                made._attn_implementation = "sdpa"
                with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.device("meta"):
                    model = transformers.AutoModelForCausalLM.from_config(made, dtype=dtype)
                model = model.to_empty(device="cuda").train()
                model.tie_weights()
                compiled = torch.compile(model)
                return model, lambda x, y: compiled(input_ids=x, labels=y, use_cache=False).loss
            model = Peer(config, name, shape.T)
            return model, peer_loss(model, name)
    finally:
        torch.set_default_dtype(torch.float32)


def step(name: str, shape: Shape, depth: int, half: bool) -> list[Launch]:
    """Every launch of one training step of a model of `depth` blocks."""
    from llm_train_bench.apply.optimizer import optimizer_of, optimizer_step
    from llm_train_bench.model import loss as loss_module
    from llm_train_bench.settings.flags import OptimizerFlags

    # Tried on a device; fake tensors do not know it.
    loss_module.adds_wide, loss_module.detect_fake_mode = lambda *_: True, lambda: None
    torch._dynamo.reset()
    counter, fake = Counter(), FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        module, loss_of = build(name, shape, depth, torch.bfloat16 if half else torch.float32)
        tokens = torch.empty(shape.B, shape.T, dtype=torch.int64, device="cuda")
        labels = torch.empty_like(tokens)
        with counter:
            counter.phase = "forward"
            with torch.autocast("cuda", torch.bfloat16, enabled=not half):
                loss = loss_of(tokens, labels)
            counter.phase = "backward"
            if isinstance(loss, tuple):
                torch.autograd.backward(*loss)
            else:
                loss.backward()
            parameters = list(module.parameters())
            optimizer = optimizer_of(dict(module.named_parameters()), OptimizerFlags())
            optimizer._cuda_graph_capture_health_check = lambda: None
            for parameter in parameters:
                if parameter.requires_grad:
                    zeros = {k: torch.zeros_like(parameter) for k in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[parameter] = zeros | {"step": torch.zeros((), device="cuda")}
            counter.phase = "optimizer"
            if name == "ours":
                optimizer_step(parameters, optimizer, 1e-4, 1.0, None)
            else:
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
    return [launch for launch in counter.launches if not launch.name.startswith("zeros")]


KINDS = ("triton", "matmul", "attention", "eager")
PHASES = ("forward", "backward", "optimizer")


def totals(launches: list[Launch]) -> dict[str, float]:
    """Sums over the launches, all linear in the depth."""

    def gb(some: list[Launch]) -> float:
        return sum(x.bytes for x in some) / 1e9

    kinds = {kind: [x for x in launches if x.kind == kind] for kind in KINDS}
    found = {f"{k}_tflop": sum(x.flops for x in kinds[k]) / 1e12 for k in ("matmul", "attention")}
    found |= {f"{kind}_gb": gb(some) for kind, some in kinds.items()}
    for phase in PHASES:
        some = [x for x in launches if x.phase == phase]
        found[f"{phase}_gb"] = gb(some)
        found[f"{phase}_ms"] = 1e3 * sum(x.seconds for x in some)
    # What is neither a matmul nor attention nor the optimizer.
    others = [x for x in launches if x.kind in ("triton", "eager") and x.phase != "optimizer"]
    found["elementwise_gb"] = gb(others)
    found["gb"] = gb(launches)
    found["kernels"] = sum(x.kernels for x in launches)
    found["ms"] = 1e3 * sum(x.seconds for x in launches)
    return found


def counted(name: str, shape: Shape, half: bool, show: bool = False) -> dict:
    """A step at the config's depth, the part of one block in it, and all besides blocks."""
    first, second = (step(name, shape, depth, half) for depth in (1, 2))
    for x in second if show else ():
        if x.bytes > 2e7:
            print(
                f"   {x.phase:9} {x.kind:9} {x.bytes / 1e9:8.3f} GB {x.flops / 1e12:7.2f} TF "
                f"{x.name[:100]}"
            )
    one, two = totals(first), totals(second)
    raw = json.loads((ROOT / shape.config).read_text())
    depth = raw.get("n_layer") or raw["num_hidden_layers"]
    block = {key: two[key] - one[key] for key in one}
    rest = {key: one[key] - block[key] for key in one}
    step_ = {key: rest[key] + depth * block[key] for key in one}
    parts = {"step": step_, "block": block, "rest": rest}
    return {part: {k: round(v, 3) for k, v in found.items()} for part, found in parts.items()}


def main() -> None:
    """Count what is asked for, print it side by side, keep it in benchmarks/results/bytes.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="SHAPE/FORMAT/NAME, or its beginning")
    parser.add_argument("--list", action="store_true", help="show every kernel of 20 MB or more")
    args = parser.parse_args()
    pretend()
    content = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"steps": {}}
    steps = content["steps"]
    for key, shape in SHAPES.items():
        for format_ in ("autocast", "bf16"):
            for name in ("ours", *shape.peers):
                what = f"{key}/{format_}/{name}"
                if args.only and not any(what.startswith(o) for o in args.only):
                    continue
                steps[what] = counted(name, shape, format_ == "bf16", args.list)
                print(what, steps[what]["step"], flush=True)
                about = {"torch": torch.__version__, "roofline": [BANDWIDTH, MATMUL_RATE]}
                RESULTS.write_text(json.dumps(about | {"steps": steps}, indent=1) + "\n")
    print(table(steps))


def elementwise(step_: dict[str, float]) -> float:
    """GB that kernels other than matmuls and attention move in forward and backward."""
    return step_["triton_gb"] + step_["eager_gb"] - step_["optimizer_gb"]


def table(steps: dict[str, dict]) -> str:
    """A Markdown table of the steps, each against ours."""
    lines = ["| shape, format | model | GB beside matmuls | all GB | kernels | roofline ms | ours / it |",
             "|---|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    for what, found in steps.items():
        key, _, name = what.rpartition("/")
        s, ours = found["step"], steps.get(f"{key}/ours", found)["step"]
        lines.append(
            f"| {key.replace('/', ', ')} | {name} | {elementwise(s):.1f} | {s['gb']:.0f} | "
            f"{s['kernels']:.0f} | {s['ms']:.0f} | {elementwise(ours) / elementwise(s):.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
