"""The rates of this process's device, measured in a process that ends before the workloads begin.

python -m llm_train_bench.check.probe FILE.json auto|cuda|cpu SECONDS
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from llm_train_bench.base.files import write_whole
from llm_train_bench.check.findings import pcie_gb_per_s
from llm_train_bench.check.rates import (
    attention_rates,
    best_rates,
    copy_rates,
    cpu_entry,
    formats_of,
    launch_seconds,
    memory_rate,
    square_rate,
)
from llm_train_bench.measure.device import device_memory_gib, device_name, pick_device
from llm_train_bench.measure.matmul_rate import heat
from llm_train_bench.measure.power import PowerMeter

SIDES = (4096, 8192)
ATTENTION = (4, 32, 4096, 128)
HEAT_S = 10.0


def measure_rates(device: torch.device, seconds: float) -> dict[str, Any]:
    """Rates by their names, `entry` for estimates on a CPU, and what the sensors said meanwhile.

    Matmuls and attention in TFLOP/s, memory in TB/s, copies in GB/s, launches in microseconds.
    """
    cuda = device.type == "cuda"
    if cuda:
        heat(device, HEAT_S)
    power = PowerMeter(device)
    power.begin()
    rates: dict[str, Any] = {}
    if cuda:
        medians = {
            kind: [square_rate(make, side, device, seconds) for side in SIDES]
            for kind, make in formats_of(device).items()
        }
        best = best_rates(medians)
        rates |= {f"matmul {k.removesuffix('_tflops')}": v for k, v in best.items()}
        rates["memory"] = memory_rate(device, seconds) / 1e12
        forward, both = attention_rates(ATTENTION, torch.bfloat16, device, seconds)
        # A backward counts as two forwards.
        rates |= {"attention forward": forward, "attention with backward": 3 * both}
        rates["launch"] = 1e6 * launch_seconds(device, seconds)
        to, back = copy_rates(device, seconds)
        rates |= {"host to device": to / 1e9, "device to host": back / 1e9}
        rates["link_gb_per_s"] = pcie_gb_per_s(device.index or 0)
    else:
        entry = cpu_entry(device, seconds)
        rates |= {"matmul bf16": entry["measured_bf16_tflops"], "matmul fp32": entry["fp32_tflops"]}
        rates["memory"] = entry["memory_tb_per_s"]
        fitted = entry["fitted"]
        rates["attention forward"] = fitted["attention_forward"] * entry["fp32_tflops"]
        rates |= {"launch": 1e6 * fitted["launch_s"], "entry": entry}
    use = power.end(rank=0)
    name, memory = device_name(device), device_memory_gib(device)
    return {"device": name, "memory_gib": memory, "rates": rates, "use": use.model_dump()}


if __name__ == "__main__":
    content = measure_rates(pick_device(sys.argv[2]), float(sys.argv[3]))
    write_whole(Path(sys.argv[1]), json.dumps(content, indent=1) + "\n")
