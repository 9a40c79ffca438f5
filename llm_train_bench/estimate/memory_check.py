"""--fit: a short run here against the memory formula. Needs no torch."""

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import ROOT
from llm_train_bench.base.tables import markdown_table, show_whole
from llm_train_bench.estimate.estimate_flags import EstimateFlags
from llm_train_bench.estimate.predict import BYTES_PER_GIB
from llm_train_bench.formulas.memory_model import estimate_memory
from llm_train_bench.formulas.work import Batch, Work
from llm_train_bench.settings.flags import declared, flag_of


def fit_memory(work_on: Callable[[float | None], Work], argv: list[str]) -> int:
    """Run the same flags here for a moment, and print measured against estimated memory by kind.

    `work_on(memory_gib)` is the step on a device with that memory.
    """
    from llm_train_bench.results.result_files import read_result

    if work_on(None).world != 1:
        raise UsageError("--fit runs train.py on one device; leave out --gpus")
    own = {flag_of(name) for name in declared(EstimateFlags)}
    given = {word.partition("=")[0].replace("_", "-") for word in argv} - {"--fit"}
    if wrong := sorted(own & given):
        raise UsageError(f"{wrong[0]} has no meaning with --fit, which measures on this machine")
    flags = [a for a in argv if a != "--fit"]
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(ROOT / "train.py"), *flags]
        command += [*"--n-steps 1 --warmup-steps 2 --memory-snapshot --output-dir".split(), out]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print((done.stderr.strip() or "train.py ended without a word").splitlines()[-1],
                  file=sys.stderr)  # fmt: skip
            return done.returncode
        (path,) = Path(out).glob("*/result.json")
        result = read_result(path)
    seen, batch = result.memory, Batch(**result.batch.model_dump())
    work = dataclasses.replace(work_on(result.device.memory_gib), batch=batch)
    e = estimate_memory(work, fused_norm=result.device.type == "cuda")
    table = markdown_table("memory", "measured", "estimate", "error")
    # The gradients of the head are made with the loss and kept like activations.
    for name in ("parameters", "gradients", "optimizer", "peak"):
        measured, estimated = getattr(seen, f"{name}_gib"), getattr(e, name) / BYTES_PER_GIB
        error = f"{estimated / measured - 1:+.1%}" if measured else ""
        table.add_row(name, f"{measured:.3f} GiB", f"{estimated:.3f} GiB", error)
    size = f"micro batch {batch.micro_batch} x {batch.seq_len}"
    print(f"{result.model.name} on {result.device.name}: {size}")
    show_whole(table)
    return 0
