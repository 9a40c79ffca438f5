"""Which flags say what is trained, how fast, how long, or where. Needs no torch."""

import dataclasses
from typing import Any

from bench.settings.flags import Args

FLAGS = {f.name for f in dataclasses.fields(Args)} - {"config", "output_dir", "run_name"}
# Flags that say where a run happens or what is looked at, and nothing of the training itself.
NOT_HYPERPARAMETERS = {
    "device", "nproc", "n_workers", "dist_timeout", "max_restarts", "no_tensorboard", "export",
    "profile", "profile_start", "profile_steps", "profile_shapes", "profile_stacks", "nsys_start",
    "nsys_end", "memory_snapshot", "peak_tflops", "peak_fp8_tflops", "usd_per_hour",
    "output_dir", "run_name",
}  # fmt: skip
# Arguments of ours that say how fast and for how long a training is computed, and not what is trained.
SPEED_SETTINGS = {
    "config", "bsz", "grad_acc_steps", "global_bsz", "amp", "tf32", "use_fp8", "fp8_backend",
    "fp8_recipe", "fp8_emulate", "fp8_all_gather", "fp8_primary_weights", "attention",
    "pt_compile", "compile_mode", "sac_freq", "sac_policy", "pad_vocab", "bucket_cap_mb",
    "grad_compression", "reshard_after_forward", "reduce_dtype", "prefetch", "dp_replicate",
    "cpu_offload", "n_steps", "warmup_steps", "val_data", "val_batches",
}  # fmt: skip
# How long a run was, and what it was checked on.
LENGTH = {"config", "n_steps", "warmup_steps", "val_data", "val_batches", "global_bsz"}


def differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Names of arguments that both sides have with different values, but for NOT_HYPERPARAMETERS."""
    names = [n for n in left if n in right and n not in NOT_HYPERPARAMETERS]
    return [n for n in names if left[n] != right[n]]
