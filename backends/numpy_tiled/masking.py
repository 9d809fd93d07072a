"""Which keys a row sees by its position: causal masks and windows as one band.

The rule kept here: query i sees key j where ``low <= j - i <= high``; every alignment is in the
two numbers. A piece of the band has one value per diagonal, so it is read from a vector through
strides and never built element by element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Band:
    """``low <= j - i <= high`` for ``rows`` queries i and ``keys`` keys j; None: no limit."""

    rows: int
    keys: int
    low: int | None = None
    high: int | None = None

    @staticmethod
    def of(
        rows: int,
        keys: int,
        causal: str | None,
        window: tuple[int | None, int | None] | None,
    ) -> Band:
        """The band of a sequence: causal caps the window's right side at the query's own key."""
        offset = 0 if causal == "top_left" else keys - rows
        left, right = window or (None, None)
        if causal is not None:
            right = 0
        # A side that reaches over every key is no limit.
        low = None if left is None or left >= rows + keys else offset - left
        high = None if right is None or right >= rows + keys else offset + right
        return Band(rows, keys, low, high)

    def seen(self, i0: int, i1: int) -> tuple[int, int]:
        """Keys [j0, j1) outside of which no row of [i0, i1) sees one."""
        j0 = 0 if self.low is None else min(max(i0 + self.low, 0), self.keys)
        j1 = self.keys if self.high is None else min(max(i1 + self.high, 0), self.keys)
        return j0, max(j0, j1)

    def shared(self, i0: int, i1: int) -> tuple[int, int]:
        """Keys [j0, j1) that every row of [i0, i1) sees."""
        j0 = 0 if self.low is None else min(max(i1 - 1 + self.low, 0), self.keys)
        j1 = self.keys if self.high is None else min(max(i0 + self.high + 1, 0), self.keys)
        return j0, max(j0, j1)

    def seeing(self, j0: int, j1: int) -> tuple[int, int]:
        """Rows [i0, i1) outside of which none sees a key of [j0, j1)."""
        i0 = 0 if self.high is None else min(max(j0 - self.high, 0), self.rows)
        i1 = self.rows if self.low is None else min(max(j1 - self.low, 0), self.rows)
        return i0, max(i0, i1)

    def covers(self, i0: int, i1: int, j0: int, j1: int) -> bool:
        """Whether each row of [i0, i1) sees each key of [j0, j1)."""
        return (self.low is None or j0 >= i1 - 1 + self.low) and (
            self.high is None or j1 - 1 <= i0 + self.high
        )

    def hidden(self, i0: int, i1: int, j0: int, j1: int) -> Bools:
        """(i1 - i0, j1 - j0) bools, True where the row does not see the key; a view."""
        return toeplitz(self.hidden_diagonals(i0, i1, j0, j1), i1 - i0, j1 - j0)

    def hidden_diagonals(self, i0: int, i1: int, j0: int, j1: int) -> Bools:
        """One bool for each of the tile's `diagonals`."""
        steps = diagonals(i0, i1, j0, j1)
        out = np.zeros(len(steps), bool)
        if self.low is not None:
            out |= steps < self.low
        if self.high is not None:
            out |= steps > self.high
        return out

    def fewest(self, i0: int, i1: int) -> int:
        """The fewest keys that one row of [i0, i1) sees."""
        # From row to row the count rises, stays and falls: the fewest is at an end.
        counts = (last - first for first, last in (self.seen(i, i + 1) for i in (i0, i1 - 1)))
        return min(counts)

    def counts(self, i0: int, i1: int) -> NDArray[np.int64]:
        """How many keys each row of [i0, i1) sees."""
        rows = np.arange(i0, i1)
        first = 0 if self.low is None else np.clip(rows + self.low, 0, self.keys)
        last = self.keys if self.high is None else np.clip(rows + self.high + 1, 0, self.keys)
        count: NDArray[np.int64] = np.maximum(np.broadcast_to(last - first, rows.shape), 0)
        return count


@dataclass(frozen=True, slots=True)
class Edge:
    """How a band cuts a tile. ``hidden`` (rows, keys), and ``keep``: the same as bits, all 1 where
    the row sees the key, to be anded to the weights; both are views of one value per diagonal.
    Where ``single``, one edge of the band alone is in the tile: on the right, keys behind ``last``
    (a row's index within the tile) are hidden; on the left, those before it.
    ``sees_any`` tells rows that see no key."""

    hidden: Bools
    keep: Array
    single: bool
    cuts_right: bool
    last: NDArray[np.int64]
    sees_any: Bools

    @staticmethod
    def of(band: Band, i0: int, i1: int, j0: int, j1: int, itemsize: int) -> Edge:
        """The edge in rows [i0, i1) and keys [j0, j1) of scores of ``itemsize`` bytes."""
        hidden = band.hidden_diagonals(i0, i1, j0, j1)
        keep = hidden.astype(f"u{itemsize}")
        keep -= 1  # 0 becomes all ones
        shape = i1 - i0, j1 - j0
        right = band.high is not None and j1 - 1 > i0 + band.high
        left = band.low is not None and j0 < i1 - 1 + band.low
        shift = (band.high if right else band.low) or 0
        index = np.arange(i0, i1) + (shift - j0)
        sees_any = index >= 0 if right else index < j1 - j0
        last = np.clip(index, 0, j1 - j0 - 1)
        return Edge(
            toeplitz(hidden, *shape), toeplitz(keep, *shape), left != right, right, last, sees_any
        )


def diagonals(i0: int, i1: int, j0: int, j1: int) -> NDArray[np.int64]:
    """j - i of every diagonal of a tile, from its lower left corner to its upper right one."""
    return np.arange(j0 - (i1 - 1), j1 - i0)


def toeplitz(values: Array, rows: int, columns: int) -> Array:
    """The (rows, columns) matrix with ``values[n]`` on its n-th diagonal from the lower left;
    a view."""
    step = values.itemsize
    return np.ndarray((rows, columns), values.dtype, values, (rows - 1) * step, (-step, step))


def key_tiles(
    band: Band, i0: int, i1: int, first: int, last: int, width: int, edge: int
) -> Iterator[tuple[int, int]]:
    """Tiles [j0, j1) over the keys of [first, last) that some row of [i0, i1) sees, in order:
    ``width`` keys where every row sees every key, narrower ones of ``edge`` keys, of which less
    is wasted, where the band's edge cuts."""
    j0, j1 = band.seen(i0, i1)
    j0, j1 = max(j0, first), min(j1, last)
    if 4 * (i1 - i0) <= edge or band.covers(i0, i1, j0, j1):  # there is little to waste
        return _even(j0, j1, width)
    a, b = band.shared(i0, i1)
    a, b = max(a, j0), min(b, j1)
    # The last row's edge lies one key behind a round number where lengths are round.
    a, b = (a if a == j0 else a + -a % 16), (b if b == j1 else b - b % 16)
    if a >= b:
        return _even(j0, j1, edge)
    return chain(_even(j0, a, edge), _even(a, b, width), _even(b, j1, edge))


def _even(j0: int, j1: int, width: int) -> Iterator[tuple[int, int]]:
    # As few tiles as `width` allows, and all about as wide: a sliver wastes a tile's overhead.
    length = j1 - j0
    if length > 0:
        step = -(-length // -(-length // width))
        step += -step % 16 if length > width else 0
        for j in range(j0, j1, step):
            yield j, min(j + step, j1)
