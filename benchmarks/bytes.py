"""Bytes, matmul FLOPs and kernels of a training step on an H200, counted on a machine without a GPU.

    make bytes NANOGPT=CHECKOUT     (python benchmarks/bytes.py [--only SHAPE/FORMAT/NAME ...] [--list])

It needs a CUDA build of torch 2.11. Our step, and those of transformers, nanoGPT and litgpt,
run under PyTorch's fake CUDA tensors, through the real torch.compile for sm_90. What Inductor generates
is executed too, except its Triton kernels, whose bytes are Inductor's own estimate. Every other operator
counts as its inputs and outputs, each once. Models of one block and of two give the rest (docs/SPEED.md).

Limits: nothing is timed; the ms are a roofline's. What one kernel touches twice is a cache hit, and
between kernels nothing stays in the cache. A kernel that reads a part of its input may count as reading
all of it: rotary embeddings have 25 to 150 % too many bytes, a Llama's step 2 %. Autotuning, padding of
matmuls and SDPA patterns are off, since they would measure on a GPU. Attention is cuDNN's for everybody.
"""

# ruff: noqa: E402

import ast
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import types
from collections import namedtuple
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

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
    with tempfile.TemporaryDirectory() as folder:
        for compiler, source, text, library in (
            ("g++", "count.cpp", COUNT, "count.so"),
            ("gcc", "driver.c", DRIVER, "libcuda.so.1"),
        ):
            (Path(folder) / source).write_text(text)
            command = [compiler, "-shared", "-fPIC", "-o", library, source]
            subprocess.run(command, cwd=folder, check=True)
        paths = {"LD_PRELOAD": f"{folder}/count.so", "LD_LIBRARY_PATH": folder}
        environment = os.environ | paths | {"BYTES_LIBRARIES": folder}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)


if __name__ == "__main__":
    with_libraries()

import torch
import torch._dynamo.device_interface
import torch._functorch.config as functorch
import torch._guards
import torch._inductor.config as inductor
import torch._inductor.fx_passes.fuse_attention
import torch._inductor.fx_passes.pad_mm
import torch._subclasses.fake_tensor
import torch.nn.functional as F
import torch.utils._triton
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.common import ROOT, parser_of, show
from benchmarks.peer_models import build_litgpt, build_nanogpt
from llm_train_bench.apply.compile import apply_compile
from llm_train_bench.apply.optimizer import optimizer_of, optimizer_step
from llm_train_bench.model import loss as loss_module
from llm_train_bench.model.chunks import chunk_elements
from llm_train_bench.model.config import load_config
from llm_train_bench.model.options import ModelOptions
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.settings.flags import OptimizerFlags

RESULTS = ROOT / "benchmarks/results/bytes.json"
NANOGPT = os.environ.get("NANOGPT", "")  # a checkout
BANDWIDTH, MATMUL_RATE = 4.1e12, 720e12  # reached on an H200: bytes and bf16 operations per second

H200 = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, warp_size=32, gcnArchName="")
H200.multi_processor_count, H200.max_threads_per_multi_processor = 132, 2048
H200.max_threads_per_block, H200.regs_per_multiprocessor = 1024, 65536
H200.total_memory, H200.L2_cache_size = 141 * 2**30, 60 * 2**20
H200.shared_memory_per_block, H200.shared_memory_per_block_optin = 49152, 232448
SDPA = "scaled_dot_product_attention"


class NoDevice(contextlib.nullcontext):
    def __init__(self, *_):
        super().__init__()


def pretend() -> None:
    """Let torch take this machine for one with an H200, as far as compiling on fake tensors asks."""
    torch._C._ensureCUDADeviceGuardSet()
    ctypes.CDLL(os.environ["LD_PRELOAD"]).set_count(100)  # more than torch asks about
    always = lambda value: lambda *_, **__: value  # noqa: E731
    both: dict[str, Any] = dict.fromkeys(("is_available", "is_bf16_supported"), True)
    both |= dict(device_count=1, current_device=0, get_device_properties=H200, synchronize=None)
    answers: dict[str, Any] = dict(get_device_capability=(9, 0), get_device_name=H200.name)
    answers["_is_compiled"] = True
    answers |= dict.fromkeys(("_lazy_init", "set_rng_state", "set_device"))
    answers |= dict.fromkeys(("is_initialized", "is_current_stream_capturing"), False)
    answers["get_rng_state"] = torch.zeros(16, dtype=torch.uint8)
    for name, answer in (both | answers).items():
        setattr(torch.cuda, name, always(answer))
    torch.cuda.device = torch.cuda._DeviceGuard = NoDevice
    interface = torch._dynamo.device_interface.CudaInterface
    interface.Worker.get_device_properties = staticmethod(always(H200))
    interface.Worker.current_device = staticmethod(always(0))
    answers = dict(get_compute_capability=90, is_triton_capable=True)
    answers["raise_if_triton_unavailable"] = None
    zeros = "maybe_exchange_device exchange_device get_raw_stream memory_allocated".split()
    for name, answer in (both | answers | dict.fromkeys(zeros, 0)).items():
        setattr(interface, name, staticmethod(always(answer)))
    triton: dict[str, Any] = dict.fromkeys(("has_triton", "has_triton_package"), True)
    hashes = ("triton_hash_with_backend", "triton_hash_to_path_key", "triton_backend")
    triton |= dict.fromkeys(hashes, "none")
    modules = [m for n, m in sys.modules.items() if n.startswith("torch.")]
    patches = [(m, name, triton[name]) for m in modules for name in triton if name in vars(m)]
    patches += [
        (torch.nn.utils.clip_grad, "_has_foreach_support", True),
        (torch.cuda.amp.common, "amp_definitely_not_available", False),
        (torch._subclasses.fake_tensor, "init_gpu_context", None),
        (torch._C, "_cuda_getCurrentRawStream", 0),
        # Both would run kernels to choose.
        (torch._inductor.fx_passes.fuse_attention, "_sfdp_init", None),
        (torch._inductor.fx_passes.pad_mm, "_pad_mm_init", None),
    ]
    for module, name, answer in patches:
        setattr(module, name, always(answer))
    inductor.fx_graph_cache = False
    inductor.joint_graph_constant_folding = False  # it computes on the device
    inductor.compile_threads = 1
    inductor.benchmark_kernel = True  # writes a kernel's bytes into its source
    functorch.enable_autograd_cache = False
    for owner, name, ours in ((F, SDPA, attention), (GraphLowering, "compile_to_module", execute)):
        setattr(owner, name, ours)


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


def count_kernel(name: str, source: str, **_) -> types.SimpleNamespace:
    """A generated Triton kernel, counted in place of launched.

    Inductor counts an input that is read through several indices once for each; here no argument has
    more bytes than it holds.
    """
    estimated = 1e9 * float(re.findall(r"'kernel_num_gb': ([\d.e+-]+)", source)[0])
    signature = ast.literal_eval(re.findall(r"'signature': (\{.*?\})", source)[0])
    pointers = [name for name, kind in signature.items() if kind.startswith("*")]

    def run(*args, **_) -> None:
        tensors = [a for a in args if isinstance(a, Tensor)]
        pairs = zip(pointers, tensors, strict=True)
        held = sum(storage_bytes(t) * (1 + p.startswith("in_out")) for p, t in pairs)
        Counter.current.add("triton", name, min(estimated, float(held)))

    return types.SimpleNamespace(run=run)


def execute(graph: GraphLowering) -> types.SimpleNamespace:
    """In place of compiling what Inductor generated: run it on fake tensors, kernels counted."""
    code: str = graph.codegen()[0].value
    names: dict = {}
    exec(code[: code.index("async_compile = AsyncCompile()")], names)

    def view(tensor, size, stride, offset=0):
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    def empty(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    compiler = types.SimpleNamespace(triton=count_kernel, wait=lambda _: None)
    names |= {"async_compile": compiler, "empty_strided_cuda": empty, "reinterpret_tensor": view}
    names |= {"assert_size_stride": lambda *_: None, "assert_alignment": lambda *_: None}
    rest = code[code.index("async_compile = AsyncCompile()") :].split("\n", 1)[1]
    rest = re.sub(r"(?m)^(reinterpret_tensor|empty_strided_cuda|assert_\w+) = .*$", "", rest)
    exec(rest, names)
    call = names["runner"].call if "runner" in names else names["call"]
    return types.SimpleNamespace(call=call, runner=None, __file__="generated")


aten = torch.ops.aten
FREE = "empty new_empty detach alias _unsafe_view sym_ is_same_size _local_scalar_dense lift_fresh device"
FREE = tuple(FREE.split())


def storage_bytes(t: Tensor) -> int:
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


def tensors_of(x) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


Launch = namedtuple("Launch", "phase kind name bytes flops kernels seconds")


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
        seconds = max(n_bytes / BANDWIDTH, flops / MATMUL_RATE)
        self.launches.append(Launch(self.phase, kind, name, n_bytes, flops, kernels, seconds))

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
        schema = func._schema.arguments
        values = dict(zip([a.name for a in schema], args, strict=False)) | kwargs
        changed = {a.name for a in schema if a.alias_info and a.alias_info.is_write}
        overwrites = {"out"} | ({"self"} if name in ("copy_", "fill_", "zero_") else set())
        inputs = [x for n, x in values.items() if n not in changed & overwrites]
        read, written = tensors_of(inputs), tensors_of([values.get(n) for n in changed])
        known = {id(t) for t in written}
        written += [t for t in tensors_of(out) if id(t) not in known]
        if not any(t.is_cuda for t in read + written):
            return
        reads = sum(map(storage_bytes, {id(t): t for t in read}.values()))
        writes = sum(map(storage_bytes, written))
        kind, kernels, flops = "eager", 1, 0.0
        if name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm"):
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
            if name.startswith("_fused_adam") and values.get("grad_scale") is None:
                writes -= sum(map(storage_bytes, args[1]))  # gradients are written only unscaled
        self.add(kind, name, float(reads + writes), flops, kernels)


Shape = namedtuple("Shape", "config depth B T names")
GPT2 = ("ours", "transformers", "nanogpt")
LLAMA = ("ours", "transformers", "litgpt")
MOE = ("ours",)
SHAPES = {
    "gpt2-125m": Shape("gpt2-125m", 12, 128, 1024, GPT2),
    "gpt2-1.5b": Shape("gpt2-1.5b", 48, 32, 1024, GPT2),
    "llama-8b": Shape("llama-3.1-8b", 32, 5, 4096, LLAMA),
    "moe-0.7b": Shape("moe-0.7b", 12, 64, 1024, MOE),
    "qwen3-30b-a3b, 2 layers": Shape("qwen3-30b-a3b", 2, 2, 4096, MOE),
    "gpt-oss-20b, 2 layers": Shape("gpt-oss-20b", 2, 2, 4096, MOE),
}


def build(name: str, shape: Shape, depth: int, dtype: torch.dtype):
    """Model and loss function."""
    path = ROOT / f"configs/{shape.config}.json"
    config = load_config(path)
    config = dataclasses.replace(config, num_hidden_layers=depth, layers=config.layers[:depth])
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            if name == "ours":
                elements = chunk_elements(H200.total_memory / 2**30)
                model = Transformer(config, shape.T, ModelOptions(chunk_elements=elements))
                torch.set_default_dtype(torch.float32)
                kind = config.layers[0].rope
                if kind is not None:
                    model.rope_for(kind, slice(shape.T), torch.device("cuda"))
                apply_compile(model, "default")
                return model, model
            if name == "transformers":
                import transformers

                raw = json.loads(path.read_text())
                raw["n_layer" if "n_layer" in raw else "num_hidden_layers"] = depth
                made = transformers.AutoConfig.for_model(**raw)
                made._attn_implementation = "sdpa"
                with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.device("meta"):
                    model = transformers.AutoModelForCausalLM.from_config(made, dtype=dtype)
                model = model.to_empty(device="cuda").train()
                model.tie_weights()
                compiled = torch.compile(model)
                return model, lambda x, y: compiled(input_ids=x, labels=y, use_cache=False).loss
            if name == "nanogpt":
                model = build_nanogpt(config, NANOGPT, "cuda")
                compiled = torch.compile(model)
                return model, lambda x, y: compiled(x, y)[1]
            model, loss = build_litgpt(config, shape.T, "cuda")
            return model, functools.partial(loss, torch.compile(model))
    finally:
        torch.set_default_dtype(torch.float32)


def step(name: str, shape: Shape, depth: int, half: bool) -> list[Launch]:
    """Every launch of one training step of a model of `depth` blocks."""
    # Tried on a device; fake tensors do not know it.
    loss_module.adds_wide, loss_module.detect_fake_mode = lambda *_: True, lambda: None
    torch._dynamo.reset()
    counter = Counter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        module, loss_of = build(name, shape, depth, torch.bfloat16 if half else torch.float32)
        tokens = torch.empty(shape.B, shape.T, dtype=torch.int64, device="cuda")
        labels = torch.empty_like(tokens)
        with counter:
            counter.phase = "forward"
            with torch.autocast("cuda", torch.bfloat16, enabled=not half):
                loss = loss_of(tokens, labels)
            counter.phase = "backward"
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
    groups = {kind: [x for x in launches if x.kind == kind] for kind in KINDS}
    groups |= {phase: [x for x in launches if x.phase == phase] for phase in PHASES}
    others = [*groups["triton"], *groups["eager"]]
    groups["elementwise"] = [x for x in others if x.phase != "optimizer"]
    sums = {f"{name}_gb": sum(x.bytes for x in part) / 1e9 for name, part in groups.items()}
    sums["gb"] = sum(x.bytes for x in launches) / 1e9
    for kind in ("matmul", "attention"):
        sums[f"{kind}_tflop"] = sum(x.flops for x in groups[kind]) / 1e12
    for phase in PHASES:
        sums[f"{phase}_ms"] = 1e3 * sum(x.seconds for x in groups[phase])
    sums["kernels"] = sum(x.kernels for x in launches)
    return sums | {"ms": 1e3 * sum(x.seconds for x in launches)}


def counted(name: str, shape: Shape, half: bool, verbose: bool) -> dict:
    """A step at the config's depth, the part of one block in it, and all besides blocks."""
    first, second = (step(name, shape, depth, half) for depth in (1, 2))
    for x in (x for x in second if verbose and x.bytes > 2e7):
        work = f"{x.bytes / 1e9:8.3f} GB {x.flops / 1e12:7.2f} TF"
        print(f"   {x.phase:9} {x.kind:9} {work} {x.name[:100]}")
    one, two = totals(first), totals(second)
    block = {key: two[key] - one[key] for key in one}
    rest = {key: one[key] - block[key] for key in one}
    whole = {key: rest[key] + shape.depth * block[key] for key in one}
    parts = {"step": whole, "block": block, "rest": rest}
    return {part: {k: round(v, 3) for k, v in sums.items()} for part, sums in parts.items()}


COLUMNS = {"elementwise_gb": 1, "gb": 0, "kernels": 0, "ms": 0}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="SHAPE/FORMAT/NAME, or its beginning"
    )
    parser.add_argument("--list", action="store_true", help="show every kernel of 20 MB or more")
    args = parser.parse_args()
    with contextlib.suppress(ImportError):  # --only may name others
        importlib.import_module("litgpt.model")  # while there is no GPU yet
    pretend()
    content = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"steps": {}}
    steps = content["steps"]
    for key, format_ in itertools.product(SHAPES, ("autocast", "bf16")):
        shape = SHAPES[key]
        for name in shape.names:
            label = f"{key}/{format_}/{name}"
            if not label.startswith(tuple(args.only)) or (name == "nanogpt" and not NANOGPT):
                continue
            steps[label] = counted(name, shape, format_ == "bf16", args.list)
            print(label, steps[label]["step"], flush=True)
            about = {"torch": torch.__version__, "roofline": [BANDWIDTH, MATMUL_RATE]}
            RESULTS.write_text(json.dumps(about | {"steps": steps}, indent=1) + "\n")
    rows = []
    for label, parts in steps.items():
        key, _, name = label.rpartition("/")
        s, ours = parts["step"], steps.get(f"{key}/ours", parts)["step"]
        figures = (f"{s[k]:.{digits}f}" for k, digits in COLUMNS.items())
        ratio = ours["elementwise_gb"] / s["elementwise_gb"]
        rows.append((key.replace("/", ", "), name, *figures, f"{ratio:.3f}"))
    figures = ("GB beside matmuls", "all GB", "kernels", "roofline ms", "ours / it")
    show(("shape, format", "model", *figures), rows, left=("model",))


if __name__ == "__main__":
    main()
