"""The config.yaml of TensorPrimat as an experiment, and what it knows of its models. Needs no torch.

Its file has a layout for each model and platform, one global batch, and prices of eight GPUs.
"""

import re
from collections.abc import Mapping
from typing import Any

from llm_train_bench.base.errors import UsageError
from llm_train_bench.model.json_keys import CONFIGS

# Its names of GPUs' prices and limits, by our platforms.
PRICES = {"nvidia": "nvidia_h100_8gpu_per_hour", "amd": "amd_mi300x_8gpu_per_hour"}
SPECS = {"nvidia": "nvidia_h100", "amd": "amd_mi300x"}
# The optimizer that our scripts have.
OPTIMIZER = {"type": ("adamw", "adam"), "beta1": (0.9,), "beta2": (0.95,)}


def experiment_in(content: Mapping[str, Any], path: object) -> dict[str, Any]:
    """The content of an experiment file of ours; UsageError for what our scripts do not do.

    Its first steps, which it does not count, are our warm-up. FP8 is left out where a layout divides
    heads, with a note: our FP8 needs whole layers.
    """

    def part(*names: str, of: Any = content) -> Any:
        for name in names:
            of = of.get(name) if isinstance(of, dict) else None
        return of

    def need(*names: str) -> Any:
        if (value := part(*names)) is None:
            raise UsageError(f"{path}: {'.'.join(names)} is missing")
        return value

    for name, ours in OPTIMIZER.items():
        if part("training", "optimizer", name) not in (None, *ours):
            raise UsageError(f"{path}: training.optimizer.{name}: ours is {ours[0]}")
    method = need("experiment", "methodology")
    first = part("benchmarking", "warmup", "skip_first_n_steps") or 0
    optimizer, extra = part("training", "optimizer"), part("benchmarking", "enhanced_metrics")
    training = {
        "bsz": need("training", "data", "micro_batch_size"),
        "global_bsz": need("training", "data", "global_batch_size"),
        "seq_len": need("training", "data", "seq_length"),
        "n_steps": need("training", "duration", "max_steps") - first,
        "warmup_steps": first,
        "seed": part("training", "general", "seed"),
        "lr": part("learning_rate", of=optimizer),
        "lr_warmup_steps": part("warmup_steps", of=optimizer),
        "weight_decay": part("weight_decay", of=optimizer),
    }
    hardware, platforms, fp8 = {}, {}, set()
    notes: dict[str, list[str]] = {}
    for platform, machine in need("hardware", "platforms").items():
        gpus = machine.get("num_gpus", 1)
        price = part("cloud_costs", PRICES.get(platform, ""), of=extra)
        watts = part("hardware_specs", SPECS.get(platform, ""), "tdp_watts", of=extra)
        hardware[platform] = {"gpu": machine.get("gpu_model"), "gpus": gpus}
        hardware[platform] |= {"usd_per_hour": price / 8} if price else {}
        hardware[platform] |= {"tdp_w": watts} if watts else {}
        wanted = part("platform_optimizations", platform) or {}
        precision = wanted.get("precision") or part("training", "precision", "default") or "bf16"
        flags = {"amp": {"fp32": "off", "fp8": "bf16"}.get(precision, precision)}
        if precision == "fp8":
            fp8.add(platform)
        again = wanted.get("activation_checkpointing") or False
        if not isinstance(again, bool):
            where = f"platform_optimizations.{platform}.activation_checkpointing"
            raise UsageError(f"{path}: {where}: must be true or false, not {again!r}")
        if again:
            flags["sac_freq"] = "1/1"
        platforms[platform] = flags
    models, layouts = [], {}
    for key, model in need("models").items():
        config = config_named(str(model.get("name") or key), path)
        models.append(config)
        by_platform = layouts[config] = {}
        for platform in hardware:
            sizes = need("parallelism", method, key, platform)
            tp, pp = sizes["tensor_model_parallel_size"], sizes["pipeline_model_parallel_size"]
            gpus, whole = hardware[platform]["gpus"], training["global_bsz"] * tp * pp
            for name, one, all_of_them in (
                ("data_parallel_size", tp * pp, gpus),
                ("gradient_accumulation_steps", training["bsz"] * gpus, whole),
            ):
                if (size := sizes.get(name)) is not None and size * one != all_of_them:
                    where = f"parallelism.{method}.{key}.{platform}.{name}"
                    raise UsageError(
                        f"{path}: {where}: {size} does not fit num_gpus and batch sizes"
                    )
            layout: dict[str, Any] = {"tp": tp} | ({"pp": pp} if pp > 1 else {})
            if platform in fp8 and tp * pp == 1:
                layout["use_fp8"] = True
            elif platform in fp8:
                why = "FP8 is left out; it needs whole layers, and this layout has"
                notes.setdefault(platform, []).append(f"{config}: {why} tp {tp}, pp {pp}")
            by_platform[platform] = layout
    return {
        "experiment": str(need("experiment", "name")),
        "methodology": "identical_config" if method == "identical_config" else "maximum_performance",
        "script": "train_fsdp.py",
        "hardware": hardware,
        "models": models,
        "training": {name: value for name, value in training.items() if value is not None},
        "platforms": platforms,
        "layouts": layouts,
        "repeats": part("benchmarking", "runs", "default_num_runs") or 1,
        "notes": notes,
    }  # fmt: skip


def config_named(name: str, path: object) -> str:
    """Our config of a model, by its name without signs: llama3.1_8b is llama-3.1-8b."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    known = {re.sub(r"[^a-z0-9]", "", p.stem.lower()): p.name for p in CONFIGS.glob("*-*.json")}
    if plain not in known:
        raise UsageError(f"{path}: models: there is no config of {name} in configs/")
    return f"configs/{known[plain]}"


def shapes_in(content: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Parameters, layers and hidden size of its models, by the names that its result files have."""
    keys = ("num_parameters", "num_layers", "hidden_size")
    models = content.get("models")
    models = models.items() if isinstance(models, dict) else ()
    # YAML takes 8.0e9 for a text.
    return {
        name: {k: float(m[k]) for k in keys if k in m} for name, m in models if isinstance(m, dict)
    }
