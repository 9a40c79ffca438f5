"""How many rows of logits the loss makes at a time. Needs no torch."""

# Elements of one chunk's logits: 512 MiB in fp32, and at most four times that where a head is large. Up
# to a vocabulary of 262144, matmuls have 512 rows or more, and so are as fast as the whole.
CHUNK_ELEMENTS = 2**27


def chunk_rows(
    n_rows: int, vocab_size: int, hidden_size: int = 0, elements: int = CHUNK_ELEMENTS
) -> int:
    """Rows per chunk: all, or a power of two from 16 on, to stay aligned for tensor cores.

    Where the head is trained, each chunk reads and writes its gradient, V d numbers in fp32. A chunk may
    have twice as many logits in 16 bits, and takes no more memory than that. `hidden_size` is d, or 0.
    """
    elements = max(elements, min(2 * hidden_size * vocab_size, 4 * elements))
    rows = max(16, 2 ** (max(1, elements // vocab_size).bit_length() - 1))
    return min(rows, n_rows)
