"""One GPT shape in our train.py and in transformers' GPT-2, eager and compiled, interleaved on a CPU.

    python benchmarks/peers_cpu.py [--rounds N]

6 layers, 6 heads, 384 wide, T 256, B 8, vocabulary 65, fp32, AdamW fused, gradients clipped; no
dropout. transformers runs in the barest loop, ours with all its measuring.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers

from benchmarks.common import interleave, report, time_steps, time_train

SHAPE = dict(
    model_type="gpt2", vocab_size=65, n_positions=256, n_embd=384, n_layer=6, n_head=6,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
B, T, STEPS = 8, 256, 4
CPU = torch.device("cpu")


def peer(compiled: bool):
    """The function of one training step of transformers' model."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if compiled else model

    def step():
        ids = torch.randint(SHAPE["vocab_size"], (B, T))
        forward(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Time all four and report the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    hf_eager, hf_compiled = peer(False), peer(True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(SHAPE))
        argv = [path, "--bsz", B, "--seq-len", T, "--amp", "off", "--device", "cpu",
                "--n-steps", STEPS, "--warmup-steps", 4]  # fmt: skip
        times = interleave(
            {
                "ours eager": lambda: time_train(*argv),
                "transformers eager": lambda: time_steps(hf_eager, STEPS, CPU),
                "ours compiled": lambda: time_train(*argv, "--pt-compile"),
                "transformers compiled": lambda: time_steps(hf_compiled, STEPS, CPU),
            },
            rounds,
        )
    report(
        "peers_cpu",
        times,
        {
            "ours / transformers, eager": ("ours eager", "transformers eager"),
            "ours / transformers, compiled": ("ours compiled", "transformers compiled"),
        },
        "one training step of GPT-2 6 layers, 6 heads, 384 wide, T 256, B 8, V 65, fp32",
    )


if __name__ == "__main__":
    main()
