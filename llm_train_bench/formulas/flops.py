"""Floating-point operations of a model per token, by formula. Needs no torch.

A multiply and an add are two operations. Forward is counted once and backward twice, so that
training takes three forwards. Two conventions for attention, both always reported:

- `palm` (Chowdhery et al. 2022, appendix B): every query meets every key, 6 N + 12 L d T a token;
- `causal`: the masked half is not counted, 6 N + 6 L d T.

N counts the parameters that multiply: the linear layers and the head (also where it is tied to the
embedding), but not the embedding look-up, norms or biases. d is heads x head_dim. A layer with a
window W < T counts W keys a query (palm), or W - W^2 / 2T (causal). Of packed documents each has a T
of its own.

Layers with states in place of attention (Gated DeltaNet, Mamba2) are counted in their chunked form (Yang
et al. 2024, section 3.3; Dao & Gu 2024, section 6): recurrent_flops_per_token. Padded vocabulary rows are
no useful work and are not counted.
"""

import math
from collections.abc import Sequence

from llm_train_bench.formulas.parameters import active_numbers, count_parameters, linear_parameters
from llm_train_bench.formulas.work import PASS_FORWARDS, Work
from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.shapes import present
from llm_train_bench.model.weights import Lora, Weight


def attended_keys(
    lengths: int | Sequence[tuple[int, int]], window: int | None, causal: bool
) -> float:
    """Keys that a query meets on average, in sequences of one length, or of `Batch.lengths`.

    Of documents of l tokens each meets l (palm) or l / 2, so that their mean is over sum l^2 / sum l.
    """
    lengths = ((lengths, 1),) if isinstance(lengths, int) else lengths
    pairs = 0.0
    for length, count in lengths:
        w = min(length, window or length)
        pairs += count * length * (w - w * w / (2 * length) if causal else w)
    return pairs / sum(length * count for length, count in lengths)


def attention_width(config: ModelConfig) -> int:
    """Forward FLOPs of a layer's two attention matmuls per token and key: scores, then values."""
    return 2 * config.num_attention_heads * (config.head_dim + config.value_dim)


def recurrent_flops_per_token(
    config: ModelConfig, lengths: int | Sequence[tuple[int, int]], causal: bool
) -> float:
    """Forward FLOPs per token of a layer with states, without its linear layers and its convolution.

    A chunk of C positions has its C x C pairs, whole (palm) or by half (causal): of queries and keys (N
    elements in each of G groups; by the delta rule of keys and keys too), and of values (P elements in
    each of H heads). The delta rule solves C x C triangular systems for N + P columns. With the state
    (N x P) there are two products a token, by the delta rule three.
    """
    r = present(config.recurrent)
    lengths = ((lengths, 1),) if isinstance(lengths, int) else lengths
    tokens = sum(length * count for length, count in lengths)
    chunk = sum(count * length * min(length, r.chunk) for length, count in lengths) / tokens
    rows = r.groups * r.state * (1 + r.delta) + r.heads * r.head_dim
    rows += r.delta * r.heads * (r.state + r.head_dim)
    states = (2 + r.delta) * r.heads * r.state * r.head_dim
    return 2 * (rows * chunk * (0.5 if causal else 1.0) + states)


# Iterations of Newton-Schulz in Muon (apply/muon.py).
ITERATIONS = 5


def muon_flops(weight: Weight) -> int:
    """FLOPs to orthogonalise a matrix, or that of one expert; each fused layer by itself."""
    # Two products with the smaller square, and that squared.
    sides = (sorted((rows, weight.shape[-1])) for rows in weight.segments)
    return ITERATIONS * sum(4 * small * small * large + 2 * small**3 for small, large in sides)


def flops_per_token(
    config: ModelConfig,
    lengths: int | Sequence[tuple[int, int]],
    causal: bool,
    pass_type: str = "step",
) -> float:
    """FLOPs per token of a pass, in the `causal` or (False) the `palm` convention.

    `lengths` is the sequence length, or of packed documents `Batch.lengths`.
    """
    forward = 2 * sum(linear_parameters(config).values())
    width = attention_width(config)
    forward += sum(
        width * attended_keys(lengths, layer.window, causal)
        for layer in config.layers
        if layer.attends
    )
    if "recurrent" in config.parts:
        each = recurrent_flops_per_token(config, lengths, causal)
        forward += each * sum(layer.mixer == "recurrent" for layer in config.layers)
    return PASS_FORWARDS[pass_type] * forward


def step_flops_per_token(work: Work, causal: bool) -> float:
    """Useful FLOPs per token of a step as it is: with adapters, without gradients of frozen weights.

    Frozen layers then cost a forward, and the gradient of their input where an adapter comes before;
    attention and adapters cost as ever.
    """
    config, lora = work.config, work.lora
    lengths, passes = work.batch.lengths, PASS_FORWARDS[work.pass_type]
    if not lora:
        return flops_per_token(config, lengths, causal, work.pass_type)
    forward = flops_per_token(config, lengths, causal, "forward")
    if passes == 1:
        return forward + 2 * lora.numbers()
    frozen = 2 * sum(linear_parameters(config).values())
    whole = 2 * frozen + 3 * (forward - frozen) + 6 * lora.numbers()
    return whole - 2 * _before_adapters(work, lora, causal)


def _before_adapters(work: Work, lora: Lora, causal: bool | None) -> float:
    """Multiply-adds per token that are not needed, since no adapter comes before.

    Without those of attention if `causal` is None.
    """
    config = work.config
    downs = {adapter.frozen: math.prod(adapter.down.shape) for adapter in lora.adapters}
    total = 0.0

    def after(layers: dict[str, Weight], *modules: str, needed: bool = False) -> bool:
        """Whether the last one's output needs a gradient, if the input of the first does or not."""
        nonlocal total
        for module in modules:
            if (layer := layers.get(module)) is None:
                continue
            if not needed:
                total += math.prod(layer.shape) + downs.get(layer, 0)
            needed = needed or layer in downs
        return needed

    for i in work.layers:
        layers = {weight.module: weight for weight in config.linear_layers(i)}
        queries = after(layers, "attn.qkv", "attn.q", "attn.q_down", "attn.q_up")
        values = after(layers, "attn.kv_down", "attn.kv_up")
        if causal is not None and not (queries or values):
            keys = attended_keys(work.batch.lengths, config.layers[i].window, causal)
            total += attention_width(config) * keys
        stream = after(layers, "attn.out", needed=queries or values)
        if not stream:
            after(layers, "mlp.router")
            experts = (weight for weight in config.matrices[i] if weight.of_experts)
            total += sum(active_numbers(config, weight) for weight in experts)
            stream = after(layers, "mlp.gate_up", "mlp.up", "mlp.down")
            stream |= after(layers, "mlp.shared.gate_up", "mlp.shared.up", "mlp.shared.down")
        if stream:
            break
    return total


def nemo_lora_flops_per_token(work: Work) -> float:
    """The same as NeMo Automodel counts it: (2 + adapters / frozen) / 3 of training all, causal.

    Source: nemo_automodel/recipes/llm/benchmark.py of August 2026.
    """
    whole = flops_per_token(work.config, work.batch.lengths, True, work.pass_type)
    adapters = work.lora.numbers() if work.lora else 0
    return whole * (2 + adapters / count_parameters(work.config)) / 3


def recomputed_flops_per_token(work: Work, causal: bool = False) -> float:
    """FLOPs per token that activation checkpointing computes a second time.

    A checkpointed block repeats all up to the input of its last matmul, such as `mlp.down`, whose output
    nobody needs. It is repeated too before a norm, a gate or a dropout, and where the checkpoint does
    not stop early: in eager FP8. The `op` policy repeats no matmul, attention only where it drops out
    (model.transformer.saved_ops), and of recurrent layers the products with the state.
    """
    config, recompute = work.config, work.recompute
    kept = recompute.policy == "op" and not config.attention_dropout
    width = 0 if kept else attention_width(config)
    total = 0.0
    for i in recompute.blocks:
        layer = config.layers[i]
        if layer.attends:
            total += width * attended_keys(work.batch.lengths, layer.window, causal)
        elif layer.mixer == "recurrent":
            if recompute.policy == "block":
                total += recurrent_flops_per_token(config, work.batch.lengths, causal)
            else:
                r = present(config.recurrent)
                total += 2 * (1 + r.delta) * r.heads * r.state * r.head_dim
        total += 2 * sum(active_numbers(config, w) for w in repeated_matrices(work, i))
    return total


def repeated_matrices(work: Work, layer: int) -> list[Weight]:
    """The matrices of a block that a recomputation multiplies by again."""
    config, spec = work.config, work.config.layers[layer]
    if layer not in work.recompute.blocks or work.recompute.policy != "block":
        return []
    # A compiler repeats only what is needed.
    fp8_down = work.fp8 and "mlp.down" in work.fp8.layers
    stops_early = work.compiled or not (fp8_down or config.residual_dropout)
    last = ["attn.out" if spec.mlp is None else "mlp.down"]
    gated = spec.mlp == "experts" and present(config.experts).shared_gate
    last += [] if gated else ["mlp.latent_up"]
    skipped = last if stops_early and not spec.post_norm else ()
    return [weight for weight in config.matrices[layer] if weight.module not in skipped]


def matmul_flops(work: Work) -> tuple[float, float, float]:
    """FLOPs of rank 0's matmuls in a step, how many are in a low format, and bytes of inputs and outputs.

    Attention is left out, and of bytes those of adapters. Recomputed blocks and padded vocabulary rows
    count. Experts are taken to get equal numbers of rows. An input in a low format is read for its scale,
    read and written to cast it, and read; where kernels before it write FP8, half of that.
    """
    config, lora, total, low, moved = work.config, work.lora, 0.0, 0.0, 0.0
    passes = PASS_FORWARDS[work.pass_type] - bool(lora and work.trains)  # frozen: no gradients
    for layer in work.layers_of(0):
        repeated = repeated_matrices(work, layer)
        for weight in config.matrices[layer]:
            rows = work.own_tokens if weight.split is None else work.gathered_tokens
            rows = work.expert_rows if weight.of_experts else rows
            *experts, n, k = weight.shard(work.parallelism).sizes
            one = 2 * rows * n * k
            times = passes + (weight in repeated)
            total += one * times
            in_low = bool(work.fp8 and weight.module in work.fp8.layers)
            inputs = rows * k + math.prod(experts) * n * k
            width = (3 if work.trainer.modules else 6) if in_low else work.matmul_bytes
            moved += times * (width * inputs + work.matmul_bytes * rows * n)
            if work.fp8 and in_low:
                in_bf16 = passes == 3 and work.fp8.recipe == "rowwise_with_gw_hp"
                low += one * (times - in_bf16)
    if work.parallelism.pp == 1:
        words = -(
            -config.padded_vocab_size // work.parallelism.tp
        )  # rank 0 has one more, if any has
        total += 2 * passes * work.gathered_tokens * words * config.hidden_size
        sides = work.gathered_tokens * (words + config.hidden_size) + words * config.hidden_size
        moved += passes * work.matmul_bytes * sides
    if lora:
        again = {weight for layer in work.layers for weight in repeated_matrices(work, layer)}
        for adapter in lora.adapters:
            numbers = math.prod(adapter.down.shape) + math.prod(adapter.up.shape)
            times = PASS_FORWARDS[work.pass_type] + (adapter.frozen in again)
            total += 2 * work.own_tokens * numbers * times
        total -= 2 * work.own_tokens * work.trains * _before_adapters(work, lora, None)
    micro_steps = work.batch.grad_acc_steps
    return micro_steps * total, micro_steps * low, micro_steps * moved
