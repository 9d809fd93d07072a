"""The cells of the GPU suite, bfloat16: shapes, and what each one must reach, as data.

The rule kept here: a must names a number that the run measures, and the number that it has to
reach; whether it holds follows from the record alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from portattn.bench.cells import Cell

GROUPS = {
    "forward": "16,384 tokens in all, 2048/D heads",
    "backward": "the same problems; out and LSE made before, 2.5 times the forward work",
    "decode": "one query row over 131,072 keys",
    "few-rows": "2 to 16 query rows over 131,072 keys, batch 1",
    "short-decode": "one query row over a short cache, batch 1; the L2 is not reused",
    "long": "one layer of 262,144 tokens",
    "host": "a tiny call, the device not waited for",
    "first-call": "the first call of a fresh process, after imports, with a CUDA context",
}
MEMORY_BOUND = ("decode", "few-rows", "short-decode")  # what K and V weigh decides
AGAINST_COPY = ("decode", "few-rows")

TOKENS = 16_384
KEYS = 131_072
_DECODE_HEADS = ((128, 32, 8), (256, 24, 4))  # head dim, query heads, key heads

# The numbers that musts are about, as a row of the record has them.
OVER_CUDNN = "over torch-cudnn"
PORTABLE_OVER_FLASH = "portable over torch-flash"
OF_COPY = "of copy"
OVER_BEST = "over best peer"
EXTRA_MIB = "MiB beyond out and LSE"
HOST_MICROSECONDS = "microseconds a call"
COLD_SECONDS = "seconds, cold"
CACHED_SECONDS = "seconds, disk cache"


@dataclass(frozen=True)
class Must:
    """``measure`` is at least ``limit``, or at most."""

    measure: str
    limit: float
    at_most: bool = False

    def holds(self, got: float) -> bool:
        """Whether a measured value is good enough."""
        return got <= self.limit if self.at_most else got >= self.limit

    def __str__(self) -> str:
        return f"{self.measure} {'≤' if self.at_most else '≥'} {self.limit:g}"


@dataclass(frozen=True)
class GpuCell(Cell):
    """One problem to time, bfloat16. ``kind`` is one of `GROUPS`."""

    musts: tuple[Must, ...] = ()

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"{super().name} B={self.batch}"

    @property
    def flops(self) -> float:
        """Five products in the backward pass, two in the forward pass."""
        return super().flops * (2.5 if self.kind == "backward" else 1.0)

    @property
    def kv_bytes(self) -> int:
        """What a pass over the keys and values reads at least."""
        return 2 * 2 * self.batch * self.heads_k * self.seq_k * self.head_dim

    @property
    def q_bytes(self) -> int:
        """The queries; the result weighs the same."""
        return 2 * self.batch * self.heads_q * self.seq_q * self.head_dim


def h200_suite() -> tuple[GpuCell, ...]:
    """Every cell, in the order in which they run."""
    return (
        *_layers("forward"),
        *_layers("backward"),
        *_decode(),
        GpuCell(
            "long", 256, 262_144, 262_144, True, 24, 4,
            musts=(Must(OVER_CUDNN, 1.2), Must(EXTRA_MIB, 64, at_most=True)),
        ),
        GpuCell(
            "host", 64, 128, 128, False, 8, 8, musts=(Must(HOST_MICROSECONDS, 60, at_most=True),)
        ),
        GpuCell(
            "first-call", 128, 512, 512, True, 8, 8,
            musts=(
                Must(COLD_SECONDS, 3, at_most=True),
                Must(CACHED_SECONDS, 0.2, at_most=True),
            ),
        ),
    )  # fmt: skip


def _layers(kind: str) -> Iterator[GpuCell]:
    for dim in (64, 128, 256):
        heads = 2048 // dim
        for n in (1024, 4096, 16_384):
            for causal in (False, True):
                musts = _backward_musts(dim) if kind == "backward" else _musts(dim, n, causal)
                yield GpuCell(kind, dim, n, n, causal, heads, heads, TOKENS // n, musts)


def _musts(dim: int, n: int, causal: bool) -> tuple[Must, ...]:
    if dim == 64:
        return (Must(OVER_CUDNN, 0.90),)
    if n < 4096:
        least = 0.85
    else:
        least = 1.08 if causal and n == 16_384 else 0.97
    return Must(OVER_CUDNN, least), Must(PORTABLE_OVER_FLASH, 1.3)


def _backward_musts(dim: int) -> tuple[Must, ...]:
    return (Must(OVER_CUDNN, 1.10 if dim == 256 else 0.75),)


def _decode() -> Iterator[GpuCell]:
    for dim, heads_q, heads_k in _DECODE_HEADS:
        for batch in (1, 16):
            musts = (Must(OF_COPY, 0.92),)
            yield GpuCell("decode", dim, 1, KEYS, False, heads_q, heads_k, batch, musts)
    for dim, heads_q, heads_k in _DECODE_HEADS:
        for rows in (2, 4, 8, 16):
            packed = rows * heads_q // heads_k  # query rows that share a key head
            musts = (Must(OF_COPY, 0.70 if dim == 256 and packed == 96 else 0.85),)
            yield GpuCell("few-rows", dim, rows, KEYS, False, heads_q, heads_k, musts=musts)
    for dim, heads_q, heads_k in _DECODE_HEADS:
        for keys in (2048, 8192, 32_768):
            musts = (Must(OVER_BEST, 1.0),)
            yield GpuCell("short-decode", dim, 1, keys, False, heads_q, heads_k, musts=musts)
