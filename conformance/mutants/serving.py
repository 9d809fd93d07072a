"""Defects of serving: packed and paged indexing, used lengths, split and merge."""

# mypy: no-warn-return-any
# (NumPy types many operators as Any)

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from portattn.conformance.mutants.seeds import seeded
from portattn.conformance.mutants.tiled import Array, Head, Options, State, Tiled
from portattn.problem import Problem


class Altered(Tiled):
    """Sequences are described wrongly; not a mutant itself."""

    def altered(self, head: Head, k: Array, v: Array, options: Options) -> Head:
        return head

    def heads(
        self, problem: Problem, q: Array, k: Array, v: Array, options: Options
    ) -> Iterator[Head]:
        for head in super().heads(problem, q, k, v, options):
            yield self.altered(head, k, v, options)


# ---- packed --------------------------------------------------------------------------------------
@seeded(4, "M12")
class PackedKeysOneTooFar(Altered):
    """Keys of a packed sequence begin one row too late."""

    def altered(self, head: Head, k: Array, v: Array, options: Options) -> Head:
        cu = options.get("cu_seqlens_k")
        if cu is None:
            return head
        rows = np.minimum(np.arange(cu[head.b], cu[head.b + 1]) + 1, max(len(k) - 1, 0))
        return replace(head, k=k[rows, head.key_head], v=v[rows, head.key_head])


@seeded(4, "M12")
class PackedKeysByQueryLengths(Altered):
    """Keys of a packed sequence begin where its queries do."""

    def altered(self, head: Head, k: Array, v: Array, options: Options) -> Head:
        cu, queries = options.get("cu_seqlens_k"), options.get("cu_seqlens_q")
        if cu is None or queries is None:
            return head
        rows = (np.arange(head.n_k) + queries[head.b]) % max(len(k), 1)
        return replace(head, k=k[rows, head.key_head], v=v[rows, head.key_head])


@seeded(4, "M12")
class PackedLongestLength(Altered):
    """Every packed sequence sees as many keys as the longest has, the next one's among them."""

    def altered(self, head: Head, k: Array, v: Array, options: Options) -> Head:
        cu = options.get("cu_seqlens_k")
        if cu is None or "seqused_k" in options:
            return head
        rows = slice(cu[head.b], cu[head.b] + head.problem.seq_k)
        keys, values = (x[rows, head.key_head] for x in (k, v))
        return replace(head, k=keys, v=values, n_k=len(keys))


@seeded(4, "M12")
class PackedAlignedOnTheLongest(Tiled):
    """Causal of packed sequences is aligned on the longest lengths."""

    def diagonal(self, head: Head) -> int:
        p = head.problem
        longest = p.packed and p.causal == "bottom_right"
        return p.seq_k - p.seq_q if longest else super().diagonal(head)


@seeded(4, "M12")
class PackedLastSequenceDropped(Tiled):
    """The last packed sequence is left out."""

    def heads(
        self, problem: Problem, q: Array, k: Array, v: Array, options: Options
    ) -> Iterator[Head]:
        for head in super().heads(problem, q, k, v, options):
            if not problem.packed or head.b < problem.batch - 1:
                yield head


@seeded(4, "M12")
class PackedEmptyShifts(Tiled):
    """A packed sequence without queries shifts those behind it by one (BUG-004)."""

    def rows(self, x: Array, head: Head, options: Options) -> Array:
        cu = options.get("cu_seqlens_q")
        if cu is None or not head.n_q or (np.diff(cu[: head.b + 1]) > 0).all():
            return super().rows(x, head, options)
        start = max(int(cu[head.b]) - 1, 0)
        return x[start : start + head.n_q, head.h]


@seeded(4, "M12")
class PackedLseByToken(Tiled):
    """The LSE of packed rows is laid out (T, H) and returned as (H, T)."""

    def forward(self, *arrays: Array, **options: Any) -> tuple[Array, Array | None]:
        out, lse = super().forward(*arrays, **options)
        if options.get("layout") == "thd" and lse is not None:
            lse = np.ascontiguousarray(lse.T).reshape(lse.shape)
        return out, lse


@seeded(4, "M12")
class PackedMaskByRow(Tiled):
    """A mask or bias of packed sequences is read from the first item's part."""

    def heads(
        self, problem: Problem, q: Array, k: Array, v: Array, options: Options
    ) -> Iterator[Head]:
        for head in super().heads(problem, q, k, v, options):
            if problem.packed:
                head.bias = self.piece(options.get("bias"), 0, head.h)
                head.mask = self.piece(options.get("mask"), 0, head.h)
            yield head


# ---- used lengths --------------------------------------------------------------------------------
@seeded(0, "K11")
class UsedLengthIgnored(Altered):
    """seqused_k has no effect."""

    def altered(self, head: Head, k: Array, v: Array, options: Options) -> Head:
        return head if head.table is not None else replace(head, n_k=len(head.k))


@seeded(0, "K11")
class UsedLengthNotAligned(Tiled):
    """Alignments are measured on Sk although seqused_k was given."""

    def diagonal(self, head: Head) -> int:
        if head.problem.alignment == "top_left" or head.table is not None:
            return super().diagonal(head)
        return len(head.k) - head.n_q


@seeded(0, "K11")
class UsedLengthZeroIsAll(Altered):
    """A used length of 0 counts as not given."""

    def altered(self, head: Head, k: Array, v: Array, options: Options) -> Head:
        return head if head.n_k or head.table is not None else replace(head, n_k=len(head.k))


@seeded(0, "K11")
class UsedLengthOneTooMany(Altered):
    """The key behind the last used one is visible."""

    def altered(self, head: Head, k: Array, v: Array, options: Options) -> Head:
        if head.table is not None or "seqused_k" not in options:
            return head
        return replace(head, n_k=min(head.n_k + 1, len(head.k)))


# ---- paged ---------------------------------------------------------------------------------------
@seeded(4, "M13")
class PageOneTooFar(Altered):
    """The block table is read one entry too far on."""

    def altered(self, head: Head, k: Array, v: Array, options: Options) -> Head:
        return head if head.table is None else replace(head, table=np.roll(head.table, -1))


@seeded(4, "M13")
class PagesOfTheFirstItem(Altered):
    """Every sequence reads the first one's block table."""

    def altered(self, head: Head, k: Array, v: Array, options: Options) -> Head:
        return head if head.table is None else replace(head, table=options["block_table"][0])


@seeded(4, "M13")
class PagesInOrder(Altered):
    """The block table is not looked at: pages are taken to lie in order."""

    def altered(self, head: Head, k: Array, v: Array, options: Options) -> Head:
        if head.table is None:
            return head
        start = head.b * len(head.table)
        return replace(head, table=(np.arange(len(head.table)) + start) % len(k))


@seeded(4, "M13")
class PageSizeAssumed(Tiled):
    """Pages are taken to hold 16 keys."""

    def slots(self, head: Head, x: Array, j0: int, j1: int) -> tuple[Array, Array]:
        assert head.table is not None
        page, place = np.divmod(np.arange(j0, j1), 16)
        return head.table[np.minimum(page, len(head.table) - 1)], place % x.shape[1]


@seeded(4, "M13")
class LastPageWhole(Altered):
    """All of the last page in use is read."""

    def altered(self, head: Head, k: Array, v: Array, options: Options) -> Head:
        size = k.shape[1]
        return head if head.table is None else replace(head, n_k=-(-head.n_k // size) * size)


@seeded(4, "M13")
class PagesBeyondTheUsedOnes(Tiled):
    """Table entries behind the used pages are followed."""

    def heads(
        self, problem: Problem, q: Array, k: Array, v: Array, options: Options
    ) -> Iterator[Head]:
        table = options.get("block_table")
        if table is not None and table.size and not 0 <= table.min() <= table.max() < len(k):
            raise IndexError(f"page {table.min()} of {len(k)}")
        return super().heads(problem, q, k, v, options)


@seeded(4, "M13")
class PagedAlignedOnTheTable(Tiled):
    """Alignments of paged sequences are measured on the table's capacity."""

    def diagonal(self, head: Head) -> int:
        if head.table is None or head.problem.alignment == "top_left":
            return super().diagonal(head)
        return head.problem.seq_k - head.n_q


# ---- split and merge -----------------------------------------------------------------------------
@seeded(0, "F12 E04")
class MergeInBaseTwo(Tiled):
    """Parts are merged with weights in base 2 (BUG-064)."""

    def merge(self, a: State, b: State) -> State:
        top = np.maximum(a.top, b.top)
        x, y = (np.exp2(s.top - self.finite(top)) for s in (a, b))
        return State(a.acc * x + b.acc * y, a.total * x + b.total * y, top)


@seeded(0, "K16 E03")
class MergeOfEmptyPartsNan(Tiled):
    """Two parts without a visible key merge to NaN: -inf minus -inf (BUG-064)."""

    def merge(self, a: State, b: State) -> State:
        top = np.maximum(a.top, b.top)
        x, y = self.exp(a.top - top), self.exp(b.top - top)
        return State(a.acc * x + b.acc * y, a.total * x + b.total * y, top)


@seeded(0, "E04 F12")
class MergeUnweighted(Tiled):
    """Parts are averaged by their number of keys, not by their sums."""

    def merge(self, a: State, b: State) -> State:
        merged = super().merge(a, b)
        mean = (self.divided(a) + self.divided(b)) / 2
        first = (a.total == 0) | (b.total == 0)
        return State(np.where(first, merged.acc, mean * merged.total), merged.total, merged.top)


@seeded(0, "E04 F12")
class MergeWithoutRescale(Tiled):
    """Parts are added as they are, each relative to its own maximum."""

    def merge(self, a: State, b: State) -> State:
        return State(a.acc + b.acc, a.total + b.total, np.maximum(a.top, b.top))


@seeded(0, "E04 F12")
class LseOfTheLastPart(Tiled):
    """The output is merged, the LSE is that of the last part."""

    def merge(self, a: State, b: State) -> State:
        self.last = b
        return super().merge(a, b)

    def finish(self, head: Head, state: State, i0: int, out: Array, lse: Array) -> None:
        super().finish(head, state, i0, out, lse)
        low, high = self.reach(head, i0)
        if high - low > self.split:
            rows = lse[i0 : i0 + self.block_q]
            rows[...] = self.logarithm(self.last)[: len(rows), 0]


@seeded(0, "E04 F12")
class FirstKeyOfAPartLost(Tiled):
    """Parts but the first read their second key twice and their first one never."""

    def fetch(self, head: Head, x: Array, j0: int, j1: int) -> Array:
        x = super().fetch(head, x, j0, j1)
        if j0 and j0 % self.split == 0 and len(x) > 1:
            x = np.concatenate([x[1:2], x[1:]])
        return x


@seeded(0, "E04 F12")
class LastPartLost(Tiled):
    """A last part that is not whole is not merged."""

    def key_tiles(self, head: Head, i0: int) -> Iterable[int]:
        whole = head.n_k // self.split * self.split or head.n_k
        return [j0 for j0 in super().key_tiles(head, i0) if j0 < whole]
