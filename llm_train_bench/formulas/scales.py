"""What torchao's FP8 recipes scale together, and which ranks share that. Needs no torch.

A product sums over one dimension of its operands: N tokens, K inputs or M outputs of a linear layer.
`tensor` is one scale for an operand, `rows` one for each of its vectors along the dimension that is
summed over, None no FP8. Blocks of 32 numbers (mxfp8, of other trainers) never span ranks.
"""

from collections.abc import Iterator

from llm_train_bench.model.weights import ROWS, Weight

# The operands of each product by their dimensions, and the dimension that is summed over.
PRODUCTS = {
    "output": (("x", "NK"), ("weight", "KM"), "K"),
    "of_input": (("grad", "NM"), ("weight", "KM"), "M"),
    "of_weight": (("grad", "NM"), ("x", "NK"), "N"),
}
# Scales of the two operands of each product (torchao.float8.config, Float8LinearConfig).
SCALES: dict[str, dict[str, tuple[str | None, str | None]]] = {
    "tensorwise": dict.fromkeys(PRODUCTS, ("tensor", "tensor")),
    "rowwise": dict.fromkeys(PRODUCTS, ("rows", "rows")),
    "rowwise_with_gw_hp": {
        "output": ("rows", "rows"),
        "of_input": ("rows", "tensor"),
        "of_weight": (None, None),
    },
}


def shared_dimensions(weight: Weight) -> dict[str, tuple[str, ...]]:
    """The kinds of ranks, tp and cp, that divide each dimension of a linear layer."""
    if weight.split is None:  # every tp rank has it whole, for its own tokens
        return {"N": ("tp", "cp"), "K": (), "M": ()}
    by_rows = weight.split == ROWS
    return {"N": ("cp",), "K": () if by_rows else ("tp",), "M": ("tp",) if by_rows else ()}


def reductions(
    recipe: str, shared: dict[str, tuple[str, ...]], sizes: dict[str, int]
) -> Iterator[tuple[bool, int, str]]:
    """All-reduces of the largest magnitudes: whether in backward, how many numbers, by which ranks.

    `sizes` are of a rank's own operands.
    """
    for product, (*operands, over) in PRODUCTS.items():
        for (_, dims), scale in zip(
            operands, SCALES.get(recipe, {}).get(product, ()), strict=False
        ):
            reduced = over if scale == "rows" else dims
            number = sizes[dims.replace(over, "")] if scale == "rows" else 1
            for dim in reduced if scale else "":
                for kind in shared[dim]:
                    yield product != "output", number, kind
