"""How many rows of logits the loss makes at a time. Needs no torch."""

# Elements of one chunk's logits: 512 MiB in fp32, and at most four times that where a head is large. Up
# to a vocabulary of 262144, matmuls have 512 rows or more, and so are as fast as the whole.
CHUNK_ELEMENTS = 2**27


def chunk_elements(memory_gib: float | None) -> int:
    """Elements of one chunk's logits on a GPU with so much memory.

    A power of two, so that logits and gradient take about 1/32 of it at most, in 16 bits. Fewer chunks
    launch fewer kernels, and add to the gradient of the head less often.
    """
    most = round(memory_gib or 0) * 2**30 // 128
    return max(CHUNK_ELEMENTS, 2 ** (most.bit_length() - 1) if most else 0)


def chunk_rows(
    n_rows: int, vocab_size: int, hidden_size: int = 0, elements: int = CHUNK_ELEMENTS
) -> int:
    """Rows per chunk: all, or a power of two from 16 on, to stay aligned for tensor cores.

    Where the head is trained, each chunk reads and writes its gradient, V d numbers in fp32. A chunk may
    have twice as many logits in 16 bits, and takes no more memory than that. `hidden_size` is d, or 0.
    Fewer `elements` than CHUNK_ELEMENTS are taken as they are.
    """
    if elements >= CHUNK_ELEMENTS:
        elements = max(elements, min(2 * hidden_size * vocab_size, 4 * CHUNK_ELEMENTS))
    rows = max(16, 2 ** (max(1, elements // vocab_size).bit_length() - 1))
    return min(rows, n_rows)
