"""The cells of the CPU suite: shapes, and what each one must reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """One problem to time, float32. ``kind`` is prefill, decode or overhead."""

    kind: str
    head_dim: int
    seq_q: int
    seq_k: int
    causal: bool
    heads_q: int
    heads_k: int
    batch: int = 1

    @property
    def name(self) -> str:
        """As the table shows it."""
        mask = "causal" if self.causal else "full"
        heads = (
            f"{self.heads_q}"
            if self.heads_q == self.heads_k
            else (f"{self.heads_q}/{self.heads_k}")
        )
        length = f"{self.seq_q}" if self.seq_q == self.seq_k else f"{self.seq_q}x{self.seq_k}"
        return f"{self.kind} D={self.head_dim} N={length} H={heads} {mask}"

    @property
    def flops(self) -> float:
        """Two products of 2·Sq·Sk·D each; half of it where causal hides half."""
        work = 4.0 * self.batch * self.heads_q * self.seq_q * self.seq_k * self.head_dim
        return work / 2 if self.causal else work


def cpu_suite() -> tuple[Cell, ...]:
    """Prefill over head dims, lengths and masks; decode over a long cache; a tiny call."""
    prefill = [
        Cell("prefill", d, n, n, causal, heads, heads)
        for d in (64, 128, 256)
        for n, heads in ((1024, 8), (4096, 4))
        for causal in (False, True)
    ]
    decode = [
        Cell("decode", 128, 1, 131_072, False, 4, 4),
        Cell("decode", 128, 1, 131_072, False, 8, 2),
        Cell("decode", 64, 1, 131_072, False, 8, 8),
        Cell("decode", 256, 1, 131_072, False, 4, 2),
    ]
    return (*prefill, *decode, Cell("overhead", 64, 8, 8, False, 1, 1))
