"""A training step of other trainers beside ours: one model, weights, data and precision.

benchmarks/on_gpu.py peers runs them in turn. The others are the real packages (peer_models.py), each as
its users run it, in the barest loop. Before anything is timed, each must give the loss and the gradient
norm of ours for one sample; who does not is out. nanoGPT does so with GPT-2's GELU, and is timed with its
own, the exact one.
"""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import common
from benchmarks.peer_models import Contestant, load, peers_of, set_gelu  # noqa: F401
from llm_train_bench.apply.precision import autocast
from llm_train_bench.measure.device import time_steps
from llm_train_bench.model.hf import save_pretrained
from llm_train_bench.run.loop import uncollected

DEVICE = common.device_of_runs()
AMPS = ["off", "bf16"]
SMALL = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"model_type": "gpt2", "n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 256}
GPT2 |= SMALL | NO_DROPOUT
LLAMA = {"model_type": "llama", "hidden_size": 384, "intermediate_size": 1024, "rms_norm_eps": 1e-5}
LLAMA |= SMALL | {"num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 6}
LLAMA |= {"max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": False}
TOLERANCES = {"off": 1e-4, "bf16": 2e-2}  # of loss and norm, relative


class Shape(NamedTuple):
    """A model's config, and the micro batch and steps with which it is timed."""

    config: dict[str, Any]
    B: int
    T: int
    warmup: int
    steps: int

    def draw(self) -> Tensor:
        """(B, T + 1) ids: inputs and labels."""
        return torch.randint(self.config["vocab_size"], (self.B, self.T + 1), device=DEVICE)


# For a CPU: 6 layers, 384 wide.
SHAPES = {"gpt2, small": Shape(GPT2, 8, 256, 3, 4), "llama, small": Shape(LLAMA, 8, 256, 3, 4)}


def first_sample(shape: Shape) -> Tensor:
    """The ids (1, T + 1) that all are compared on."""
    generator, size = torch.Generator().manual_seed(1), (1, shape.T + 1)
    return torch.randint(shape.config["vocab_size"], size, generator=generator).to(DEVICE)


def write_checkpoint(shape: Shape, directory: Path) -> None:
    """Our own fresh weights as a Hugging Face checkpoint; our loss and norm of the first sample."""
    for name in ("config.json", "plain.json"):  # the first becomes the checkpoint's
        (directory / name).write_text(json.dumps(shape.config))
    model, ids = common.fresh_model(directory / "config.json", shape.T, DEVICE), first_sample(shape)
    save_pretrained(model, directory)
    ours = {}
    for amp in AMPS if DEVICE.type == "cpu" else ["bf16"]:
        with autocast(amp, DEVICE):
            loss = model(ids[:, :-1], ids[:, 1:])
        ours[amp] = agreement(loss, model)
    (directory / "ours.json").write_text(json.dumps(ours))


def loss_of(c: Contestant, called: Callable[..., Any], ids: Tensor) -> Tensor:
    """The mean loss of (B, T + 1) ids; inputs and labels apart, as data loaders give them."""
    return c.loss(called, ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def agreement(loss: Tensor, module: nn.Module) -> tuple[float, float]:
    """Loss and gradient norm, gradients freed again."""
    loss.backward()
    norm: Any = nn.utils.get_total_norm(p.grad for p in module.parameters() if p.grad is not None)
    module.zero_grad(set_to_none=True)
    return float(loss.detach()), float(getattr(norm, "full_tensor", lambda: norm)())


def time_peer(peer: str, compiled: bool, amp: str, shape: Shape, directory: Path) -> float:
    """Seconds of a peer's step after its warm-up; its loss and norm are held against ours first.

    common.ContestantEnded if they are others.
    """
    c = load(peer, directory, shape.T, DEVICE, compiled, amp)
    ours, limit = json.loads((directory / "ours.json").read_text())[amp], TOLERANCES[amp]
    amp = "off" if c.sharded else amp
    with autocast(amp, DEVICE):
        loss = loss_of(c, c.module, first_sample(shape))
    theirs = agreement(loss, c.module)
    if not all(abs(a / b - 1) < limit for a, b in zip(theirs, ours, strict=True)):
        raise common.ContestantEnded(f"loss and gradient norm are {theirs}, ours {ours}; not timed")
    print(f"{peer}: loss and gradient norm {theirs}, ours {ours}", file=sys.stderr)
    set_gelu(c.module, "none")
    called = c.compile(c.module) if compiled else c.module
    step = common.bare_step(c.module, functools.partial(loss_of, c, called), shape.draw, amp)
    with uncollected():
        time_steps(step, shape.warmup, DEVICE)
        return time_steps(step, shape.steps, DEVICE)


def our_flags(shape: Shape, directory: Path, compiled: bool, amp: str) -> list[str]:
    """The command line of the same steps by our own scripts."""
    flags = f"--bsz {shape.B} --seq-len {shape.T} --amp {amp} --lr {common.LR} --warmup-seconds 0 "
    flags += f"--n-steps {shape.steps} --warmup-steps {shape.warmup}" + " --pt-compile" * compiled
    return [str(directory / "plain.json"), *flags.split()]
