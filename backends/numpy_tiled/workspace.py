"""Buffers: those of one thread during a call, and what stays of them for the next.

The rule kept here: a buffer has a name and grows to the largest tile that asked for it, and two
threads never hold the same one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from portattn.backends.numpy_tiled.config import KEPT
from portattn.backends.numpy_tiled.masking import Array, Band, Edge

EDGES = 64  # vectors of a tile's length: a call has a few, and a long-lived thread meets many


class Workspace:
    """Buffers of one thread by name, grown to the largest tile and used again for the next."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self._flat: dict[str, Array] = {}
        self._views: dict[tuple[Any, ...], Array] = {}
        self._edges: dict[tuple[Any, ...], Edge] = {}

    def array(self, name: str, *shape: int) -> Array:
        """The buffer ``name`` in that shape, its contents undefined."""
        key = (name, shape)
        view = self._views.get(key)
        if view is None:
            size = math.prod(shape)
            flat = self._flat.get(name)
            if flat is None:
                view = np.empty(shape, self.dtype)
                self._flat[name] = view.reshape(-1)
            elif flat.size < size:
                del flat, self._flat[name]
                self._views.clear()
                return self.array(name, *shape)
            else:
                view = flat[:size].reshape(shape)
            if len(self._views) > 256:
                self._views.clear()
            self._views[key] = view
        return view

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(x.nbytes for x in self._flat.values())

    def ones(self, n: int) -> Array:
        """n ones."""
        ones = self._flat.get("ones")
        if ones is None or ones.size < n:
            ones = self._flat["ones"] = np.ones(n, self.dtype)
        return ones[:n]

    def edge(self, band: Band, i0: int, i1: int, j0: int, j1: int) -> Edge:
        """How the band cuts a tile; the pattern recurs from tile to tile."""
        key = (band.low, band.high, i1 - i0, j0 - i0, j1 - i0)
        edge = self._edges.get(key)
        if edge is None:
            if len(self._edges) >= EDGES:
                self._edges.clear()
            edge = self._edges[key] = Edge.of(band, i0, i1, j0, j1, self.dtype.itemsize)
        return edge


class Workspaces:
    """Workspaces of one dtype between the calls: fresh memory costs a page fault for every 4 KiB,
    which a short call would feel. At most ``limit`` are kept, and none above `KEPT`; `clear` frees
    them."""

    def __init__(self, dtype: str, limit: int) -> None:
        self._dtype, self._limit = dtype, limit
        self._kept: deque[Workspace] = deque()  # append and pop are atomic

    @contextmanager
    def lend(self) -> Iterator[Workspace]:
        """A workspace that nobody else has. It is not kept if what it was used for failed."""
        try:
            ws = self._kept.pop()
        except IndexError:
            ws = Workspace(self._dtype)
        yield ws
        if len(self._kept) < self._limit and ws.nbytes <= KEPT:
            self._kept.append(ws)

    def clear(self) -> None:
        """Free what is kept."""
        self._kept.clear()
