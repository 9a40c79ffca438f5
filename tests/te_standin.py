"""Names, parameters and results of Transformer Engine's modules in plain PyTorch: no FP8, no GPU.

It follows the documentation of version 2.20. It shows that our use of the modules is consistent,
and nothing about the library itself; tests/test_gpu.py does that.
"""

import contextlib
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint  # noqa: F401

quantization = mock.Mock()


def autocast(enabled, recipe):
    """High precision under any recipe."""
    assert enabled and recipe
    return contextlib.nullcontext()


class Module(nn.Module):
    """Parameters on the meta device."""

    def __init__(self, size, device, params_dtype, normalization=None, eps=None):
        super().__init__()
        assert device == "meta" and params_dtype == torch.float32
        self.casts, self.n_reused = {}, 0
        self.size, self.normalization, self.eps = size, normalization, eps
        if normalization:
            self.add("layer_norm_weight", size)
        if normalization == "LayerNorm":
            self.add("layer_norm_bias", size)

    def norm(self, x):
        if self.normalization == "RMSNorm":
            return F.rms_norm(x, (self.size,), self.layer_norm_weight, self.eps)
        weights = [getattr(self, f"layer_norm_{kind}", None) for kind in ("weight", "bias")]
        return F.layer_norm(x, (self.size,), *weights, self.eps) if self.normalization else x

    def cast(self, name, first):
        """A weight as it was at a step's first micro batch, when it would be cast to FP8."""
        weight = getattr(self, name)
        if first is None:
            return weight
        if first:
            self.casts[name] = weight.detach().clone()
        self.n_reused += not first
        return weight + (self.casts[name] - weight).detach()

    def add(self, name, *shape):
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))


class Linear(Module):
    def __init__(self, inputs, outputs, bias, **rest):
        super().__init__(inputs, **rest)
        self.add("weight", outputs, inputs)
        if bias:
            self.add("bias", outputs)

    def forward(self, x, is_first_microbatch=None):
        weight = self.cast("weight", is_first_microbatch)
        return F.linear(self.norm(x), weight, getattr(self, "bias", None))


LayerNormLinear = Linear


class LayerNormMLP(Module):
    def __init__(self, size, inner, bias, activation, **rest):
        super().__init__(size, **rest)
        self.activation = activation
        self.add("fc1_weight", inner * (2 if activation == "swiglu" else 1), size)
        self.add("fc2_weight", size, inner)
        if bias:
            self.add("fc1_bias", self.fc1_weight.shape[0])
            self.add("fc2_bias", size)

    def forward(self, x, is_first_microbatch=None):
        first, second = (self.cast(f"fc{i}_weight", is_first_microbatch) for i in (1, 2))
        x = F.linear(self.norm(x), first, getattr(self, "fc1_bias", None))
        if self.activation == "swiglu":
            gate, up = x.chunk(2, -1)
            x = F.silu(gate) * up
        else:
            x = F.gelu(x, approximate="tanh")
        return F.linear(x, second, getattr(self, "fc2_bias", None))
