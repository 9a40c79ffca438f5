"""What the machinery costs: train.py against a bare loop over the same model, interleaved.

    python benchmarks/overhead.py [--rounds N]

Wanted: at least 0.98 of the bare loop's tokens per second.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from bench.device import pick_device
from benchmarks.common import interleave, report, time_steps, time_train
from model.config import load_config
from model.init import materialize
from model.transformer import Transformer

# (config, flags, steps a round)
CPU_CASES = [
    ("configs/gpt2-tiny.json", ["--bsz", 8, "--seq-len", 256, "--amp", "off"], 60),
    ("configs/llama-tiny.json", ["--bsz", 8, "--seq-len", 256, "--amp", "off"], 10),
]
GPU_CASES = [
    ("configs/gpt2-125m.json", ["--bsz", 32, "--seq-len", 1024], 30),
    ("configs/gpt2-125m.json", ["--bsz", 2, "--seq-len", 1024], 60),
]


WARMUP = 5


def bare_loop(path: str, bsz: int, T: int, bf16: bool, n: int, device: torch.device) -> float:
    """Seconds per step of the same step in as few lines as PyTorch allows, the model built anew."""
    config = load_config(path)
    with torch.device("meta"):
        model = Transformer(config, T)
    materialize(model, config, device, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step():
        ids = torch.randint(config.vocab_size, (bsz, T + 1), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    time_steps(step, WARMUP, device)
    return time_steps(step, n, device)


def main() -> None:
    """Time all cases and report the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    device = pick_device("auto")
    times, ratios = {}, {}
    for path, flags, n in GPU_CASES if device.type == "cuda" else CPU_CASES:
        name = f"{Path(path).stem} B{flags[1]}"
        bare = (path, flags[1], flags[3], "off" not in flags, n, device)
        argv = [path, *flags, "--n-steps", n, "--warmup-steps", WARMUP]
        times |= interleave(
            {
                f"train.py {name}": lambda argv=argv: time_train(*argv),
                f"bare loop {name}": lambda bare=bare: bare_loop(*bare),
            },
            rounds,
        )
        ratios[f"train.py / bare, {name}"] = (f"train.py {name}", f"bare loop {name}")
    report("overhead", times, ratios, "train.py against a bare loop over the same model")


if __name__ == "__main__":
    main()
