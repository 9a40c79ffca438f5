"""torch.compile, block by block: applying it, counting what it did, and saying what failed."""

import contextlib
import functools
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.compiler.config

from llm_train_bench.base.errors import CompileError
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.operators import OwnFunction
from llm_train_bench.model.transformer import Transformer


def key_compiled_code(work: Work) -> None:
    """Make what PyTorch leaves out a part of each compiler cache's key, beside the user's tag.

    Attention's kernels, emulated FP8 and the library of linear layers change compiled code. Code that
    another process compiled under other ones would be reused (pytorch/pytorch#185449).
    """
    switches = work.attention.causal, bool(work.fp8 and work.fp8.emulated), work.linear
    tag = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    torch.compiler.config.cache_key_tag = f"{tag}{switches}"


def apply_compile(model: Transformer, mode: str | None, exact_casts: bool = False) -> None:
    """Compile every block's forward, and the loss of one chunk of rows; without a mode nothing.

    Block by block, since identical blocks share one compiled graph: compile time does not grow with
    depth. The forward is compiled rather than the call, so that hooks (FSDP's) stay outside.
    `fullgraph` turns a graph break into an error; a block with experts has some. `exact_casts` rounds
    between fused kernels as eager code does, which FP8 scaled by rows needs before torch 2.13.
    """
    if mode is None:
        return
    # Under DDP it would cut block graphs at the buckets' ends, though blocks are apart already.
    torch._dynamo.config.optimize_ddp = False
    if torch.__version__ < "2.13":
        # Recomputed fused norms differ in the last bit and make NaN (pytorch/pytorch#150859).
        asked = os.environ.get("TORCHINDUCTOR_EMULATE_PRECISION_CASTS") == "1"
        from torch._inductor import config

        config.emulate_precision_casts = exact_casts or asked
        # Dynamo would trace them, and then keep what is to be recomputed (seen with 2.11).
        for function in OwnFunction.__subclasses__():
            torch._dynamo.allow_in_graph(function)
    if "TORCH_LOGS" not in os.environ:
        # torch 2.15 logs what it then raises, over twenty lines.
        logging.getLogger("torch._dynamo.convert_frame").setLevel(logging.ERROR)
        # Candidates that do not fit the GPU are logged as errors, each with its traceback.
        logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.CRITICAL)
    for layer, block in model.blocks.items():
        whole = model.config.layers[int(layer)].mlp != "experts"
        if not whole:  # rows are put in order eagerly
            # Ranks that divide experts exchange rows; those of tp gather experts apart, by hooks.
            divided = model.layout.tp * model.layout.ep > 1
            mlp: Any = block.mlp
            mlp.leave_out_of_compilation(torch.compiler.disable, divided)
        compiled = torch.compile(block.forward, mode=mode, fullgraph=whole, dynamic=False)
        block.forward = compile_errors_named(f"blocks.{layer}")(compiled)
    # The loss function hands its chunk's gradient on to eager matmuls. In a CUDA graph the
    # next chunk would overwrite that.
    graphless = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
    mode = graphless.get(mode, mode)
    compiler = functools.partial(torch.compile, mode=mode, fullgraph=True, dynamic=False)
    model.loss.compile_chunks(lambda chunk: compile_errors_named("loss")(compiler(chunk)))


def compile_counts() -> Counter[str]:
    """What torch.compile has done since the process started, and its `seconds` of wall time.

    PyTorch keeps a record of the last 64 compilations; recompilations are counted in it.
    """
    if "torch._dynamo" not in sys.modules:
        return Counter()
    import torch._dynamo.utils as dynamo

    events, inductor = dynamo.get_compilation_metrics(), dynamo.counters["inductor"]
    seconds: Any = dynamo.calculate_time_spent().get("total_wall_time", 0.0)
    return Counter(
        seconds=seconds,
        graphs=dynamo.counters["stats"]["unique_graphs"],
        graph_breaks=sum(dynamo.counters["graph_break"].values()),
        recompilations=sum(bool(event.recompile_reason) for event in events),
        graphs_recorded_again=_graphs_recorded_again(),
        graphs_refused=inductor["cudagraph_skips"],
        from_cache=inductor["fxgraph_cache_hit"],
        generated=inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
    )


def _graphs_recorded_again() -> int:
    """How often a CUDA graph did not fit its inputs any more; recording it anew compiles nothing."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not torch.cuda.is_available():
        return 0
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return getattr(manager, "debug_fail_counter", 0)


def compile_error(error: BaseException, where: str) -> CompileError | torch.OutOfMemoryError:
    """A compiler's exception as one line; out of memory while autotuning stays out of memory."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError):
            return cause
        cause = cause.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A backend's name is on a separate line before its error.
    text = " ".join(lines[:2] if lines and lines[0].endswith("raised:") else lines[:1])
    if type(error).__name__ == "FailOnRecompileLimitHit":
        text = "more different graphs than torch._dynamo.config.recompile_limit allows"
    advice = "leave out --pt-compile, or try another --compile-mode"
    if "InvalidCxxCompiler" in text or "Failed to find C compiler" in text:
        advice = "install one (g++; doctor.py says what is missing), or leave out --pt-compile"
    if "CppCompileError" in text and " " in torch.__file__:
        advice = "PyTorch cannot link from a path with a space; move it, or leave out --pt-compile"
    text = text or type(error).__name__
    return CompileError(f"torch.compile failed in {where}: {text}; {advice}")


@contextlib.contextmanager
def compile_errors_named(where: str) -> Iterator[None]:
    """Turn a compiler's exception in here into a CompileError that names a part of the model.

    As a decorator it costs about a microsecond a call.
    """
    try:
        yield
    except Exception as error:
        if "torch._dynamo.exc" not in {kind.__module__ for kind in type(error).__mro__}:
            raise
        raise compile_error(error, where) from error
