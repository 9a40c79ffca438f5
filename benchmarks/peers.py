"""One GPT shape in our train.py and in transformers' GPT-2, eager and compiled, interleaved.

    python benchmarks/peers.py [--rounds N]

On a CPU 6 layers, 6 heads, 384 wide, T 256, B 8, vocabulary 65, in fp32; on a GPU GPT-2 124M, T 1024,
B 32, in bf16. AdamW fused, gradients clipped, no dropout. transformers runs in the barest loop, ours
with all its measuring; each in a separate process.
"""

import argparse
import functools
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers

from benchmarks.common import interleave, processes, report, serve, time_steps, time_train

# Not by pick_device, which tunes the process for our own runs.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = DEVICE.type == "cuda"
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
if GPU:
    SHAPE = dict(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12)
    B, T, STEPS, WARMUP = 32, 1024, 30, 10
else:
    SHAPE = dict(vocab_size=65, n_positions=256, n_embd=384, n_layer=6, n_head=6)
    B, T, STEPS, WARMUP = 8, 256, 4, 4
SHAPE |= dict(model_type="gpt2", **NO_DROPOUT)
ABOUT = (
    f"one training step of GPT-2, {SHAPE['n_layer']} layers, {SHAPE['n_head']} heads, "
    f"{SHAPE['n_embd']} wide, T {T}, B {B}, V {SHAPE['vocab_size']}, {'bf16' if GPU else 'fp32'}; "
    f"transformers {transformers.__version__}"
)


def peer(compiled: bool):
    """A function that runs warmed-up training steps of transformers' model: seconds per step."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if compiled else model

    def step():
        ids = torch.randint(SHAPE["vocab_size"], (B, T), device=DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU):
            loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def run() -> float:
        time_steps(step, WARMUP, DEVICE)  # ours warms up as long before each of its rounds
        return time_steps(step, STEPS, DEVICE)

    return run


def ours(*flags: str) -> float:
    """Seconds per step of train.py, model and all built anew."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(SHAPE))
        return time_train(path, "--bsz", B, "--seq-len", T, "--amp", "bf16" if GPU else "off",
                          "--n-steps", STEPS, "--warmup-steps", WARMUP, *flags)  # fmt: skip


CONTESTANTS = {
    "ours eager": lambda: ours,
    "transformers eager": lambda: peer(False),
    "ours compiled": lambda: functools.partial(ours, "--pt-compile"),
    "transformers compiled": lambda: peer(True),
}


def main() -> None:
    """Time all four and report the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        serve(CONTESTANTS[args.contestant]())
        return
    with processes(__file__, list(CONTESTANTS)) as contestants:
        times = interleave(contestants, args.rounds)
    report(
        "peers",
        times,
        {
            "ours / transformers, eager": ("ours eager", "transformers eager"),
            "ours / transformers, compiled": ("ours compiled", "transformers compiled"),
        },
        ABOUT,
    )


if __name__ == "__main__":
    main()
