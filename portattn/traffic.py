"""The IO model: bytes that attention moves through slow memory, in closed form.

The rule kept here: plain arithmetic on shapes, no measurement, so that what a counter or a load
probe reads can be held against it. Bytes are of one batch entry and one query head unless said;
``element`` is the storage size (2 for float16 and bfloat16).

Sources: Dao et al., FlashAttention (2022), theorem 2 and appendix B; Dao, FlashAttention-2 (2023),
section 3.1, which moved the loop over query tiles outside.
"""

from __future__ import annotations

from dataclasses import dataclass

STATISTIC = 4  # bytes of a row maximum, a row sum or an LSE in float32


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes loaded from and stored to slow memory."""

    loaded: int
    stored: int

    @property
    def total(self) -> int:
        """Both directions."""
        return self.loaded + self.stored


def score_matrix(seq_q: int, seq_k: int, element: int = 2) -> int:
    """Bytes of the scores of one head, if they were stored."""
    return seq_q * seq_k * element


def tile(rows: int, head_dim: int, element: int = 2) -> int:
    """Bytes of a tile of ``rows`` queries, keys or values."""
    return rows * head_dim * element


def visible_pairs(seq_q: int, seq_k: int, causal: bool = False) -> int:
    """Query-key pairs that are computed; causal aligns bottom-right."""
    if not causal:
        return seq_q * seq_k
    offset = seq_k - seq_q
    first = max(0, -offset)  # rows before it see no key
    count = seq_q - first
    low, high = first + offset + 1, seq_k
    return (low + high) * count // 2 if count > 0 else 0


def standard(seq_q: int, seq_k: int, head_dim: int, head_dim_v: int, element: int = 2) -> Traffic:
    """Three separate operations: scores written, read by the softmax, written again, read by the
    product with v."""
    scores = score_matrix(seq_q, seq_k, element)
    q, k = tile(seq_q, head_dim, element), tile(seq_k, head_dim, element)
    v, out = tile(seq_k, head_dim_v, element), tile(seq_q, head_dim_v, element)
    return Traffic(loaded=q + k + 2 * scores + v, stored=2 * scores + out)


def flash_v1(
    seq_q: int, seq_k: int, head_dim: int, head_dim_v: int, block_k: int, element: int = 2
) -> Traffic:
    """Key tiles outside: k and v read once; q, out, m and l read, and out, m and l written, once
    per key tile."""
    rounds = -(-seq_k // block_k)
    k, v = tile(seq_k, head_dim, element), tile(seq_k, head_dim_v, element)
    q, out = tile(seq_q, head_dim, element), tile(seq_q, head_dim_v, element)
    row_state = out + 2 * seq_q * STATISTIC
    return Traffic(loaded=k + v + rounds * (q + row_state), stored=rounds * row_state)


def flash_v2(
    seq_q: int,
    seq_k: int,
    head_dim: int,
    head_dim_v: int,
    block_q: int,
    element: int = 2,
    causal: bool = False,
    block_k: int = 1,
) -> Traffic:
    """Query tiles outside: q read and out and LSE written once; the key tiles that a query tile
    sees are read once for it. Causal (bottom-right) skips what lies above the diagonal."""
    q, out = tile(seq_q, head_dim, element), tile(seq_q, head_dim_v, element)
    keys = 0
    for start in range(0, seq_q, block_q):
        last = min(start + block_q, seq_q)
        seen = min(seq_k, max(0, last + seq_k - seq_q)) if causal else seq_k
        keys += min(seq_k, -(-seen // block_k) * block_k)
    return Traffic(
        loaded=q + keys * (head_dim + head_dim_v) * element,
        stored=out + seq_q * STATISTIC,
    )


def decode(seq_k: int, head_dim: int, head_dim_v: int, heads_k: int = 1, element: int = 2) -> int:
    """Bytes of keys and values that a decode step must read, whatever the number of query heads
    that share them."""
    return seq_k * heads_k * (head_dim + head_dim_v) * element


def arithmetic_intensity(seq: int, head_dim: int, traffic: Traffic) -> float:
    """Floating-point operations per byte of one head, forward."""
    return 4.0 * seq * seq * head_dim / traffic.total
