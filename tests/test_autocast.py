"""The formats of a block's tensors under CUDA's autocast, which a CPU's autocast does not have."""

import re
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from llm_train_bench.apply.sharded import materialize
from llm_train_bench.model.experts import Router, Stacked
from llm_train_bench.model.families import FAMILIES as SUPPORTED
from llm_train_bench.model.transformer import Transformer
from tests.helpers import FAMILIES, config

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
# Functions that are made of operators in the lists, or have another name in Python.
MADE_OF = {"square": "pow", "__pow__": "pow", "__rpow__": "pow", "normalize": "norm"}
MADE_OF |= {"cross_entropy": "nll_loss", "softmin": "softmax", "linalg_norm": "norm"}
MADE_OF |= {"__rtruediv__": "reciprocal", "__rdiv__": "reciprocal", "special_expm1": "expm1"}
MADE_OF |= {"special_softmax": "softmax", "special_logsumexp": "logsumexp"}


def autocast_list(name: str) -> set[str]:
    """The operators in one of the lists that PyTorch has for CUDA's autocast."""
    begin = rf"#define AT_FORALL_{name}\(_\)(.*?)\n\n"
    (text,) = re.findall(begin, HEADER.read_text(), re.DOTALL)
    return set(re.findall(r"_\((?:ADD_NS\()?(\w+)", text))


class CudaAutocast(TorchFunctionMode):
    """Applies the lists of CUDA's autocast that a CPU's autocast lacks: fp32, and the widest input."""

    def __init__(self):
        super().__init__()
        self.wide = autocast_list("FP32") | autocast_list("DIFFERENT_REDISPATCH_SIGNATURE")
        self.wide_by_default = autocast_list("FP32_SET_OPT_DTYPE")
        self.widest = autocast_list("PROMOTE")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        name = MADE_OF.get(name, name.removesuffix("_"))
        low = [x for x in (*args, *kwargs.values()) if is_low(x)]
        known = self.wide | self.wide_by_default | self.widest
        if not low or name not in known or not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        floats = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if name in self.widest and all(map(is_low, floats)):
            return func(*args, **kwargs)
        if name in self.wide_by_default and kwargs.get("dtype") is not None:
            return func(*args, **kwargs)
        args = [x.float() if is_low(x) else x for x in args]
        return func(*args, **{k: x.float() if is_low(x) else x for k, x in kwargs.items()})


def is_low(x) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16


def exact_router(module: torch.nn.Module) -> bool:
    return isinstance(module, Router) and module.options.exact_router


def formats(family: str, cuda: bool) -> dict[str, torch.dtype]:
    """Outputs of blocks and the last norm, inputs of linear layers and experts, of one forward pass.

    `cuda` has fp32 parameters under autocast with CUDA's lists, as train.py and train_ddp.py have it;
    otherwise parameters are bf16 and there is no autocast, as in train_fsdp.py.
    """
    c = config(family)
    with torch.device("meta"):
        model = Transformer(c, 16)
    if not cuda:
        for name, parameter in model.named_parameters():
            if not name.endswith(".correction"):
                parameter.data = parameter.data.bfloat16()
    materialize(model, torch.device("cpu"), seed=0)
    seen = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        seen[name] = tensor.dtype

    for name, module in model.blocks.named_modules():
        if isinstance(module, torch.nn.Linear | Stacked) and not exact_router(module):
            module.register_forward_pre_hook(lambda _, x, n=name: note(f"{n} input", x[0]))
    for name, block in (*model.blocks.items(), ("norm", model.norm)):
        block.register_forward_hook(lambda *tensors, n=name: note(n, tensors[-1]))
    tokens = torch.arange(16)[None] % c.vocab_size
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=cuda)
    with CudaAutocast(), autocast:
        model(tokens, tokens).backward()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_stay_in_the_low_format(family):
    """An operator of autocast's fp32 list doubles the bytes of all that follows."""
    under_autocast = formats(family, cuda=True)
    assert under_autocast == formats(family, cuda=False)
    assert set(under_autocast.values()) == {torch.bfloat16}, under_autocast


def test_every_family_is_tested():
    assert {values["model_type"] for values in FAMILIES.values()} >= set(SUPPORTED)
