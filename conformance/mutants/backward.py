"""Defects of the backward pass."""

# mypy: no-warn-return-any
# (NumPy types many operators as Any)

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from portattn.conformance.mutants.seeds import seeded
from portattn.conformance.mutants.tiled import Array, Head, Options, Tiled


# ---- scores --------------------------------------------------------------------------------------
@seeded(3, "B01")
class DeltaMissing(Tiled):
    """dS = P dP, without the sum of dout * out."""

    def delta(self, out: Array, dout: Array, dlse: Array | None) -> Array:
        return super().delta(out * 0, dout, dlse)


@seeded(3, "B01")
class DeltaAdded(Tiled):
    """dS = P (dP + delta)."""

    def delta(self, out: Array, dout: Array, dlse: Array | None) -> Array:
        return -super().delta(out, dout, None)


@seeded(3, "B01")
class ProbabilitiesUnnormalised(Tiled):
    """P is recomputed from the tile's maximum instead of the LSE."""

    def probabilities(self, s: Array, lse: Array, seen: Array) -> Array:
        return super().probabilities(s, s.max(-1, keepdims=True), seen)


@seeded(3, "B07 B01")
class ProbabilitiesInStorage(Tiled):
    """dS is formed from P as it was rounded for the other product."""

    def probabilities(self, s: Array, lse: Array, seen: Array) -> Array:
        return self.stored(super().probabilities(s, lse, seen), np.float16)


@seeded(3, "B12")
class SoftcapWithoutDerivative(Tiled):
    """The gradient does not pass through the softcap."""

    def through_cap(self, head: Head, ds: Array, x: Array) -> Array:
        return ds


@seeded(3, "B12")
class SoftcapDerivativeOfTheCapped(Tiled):
    """The softcap's derivative is taken at the capped score."""

    def through_cap(self, head: Head, ds: Array, x: Array) -> Array:
        return super().through_cap(head, ds, self.capped(head, x))


@seeded(None, "B13")
class LseGradientIgnored(Tiled):
    """dlse has no effect."""

    def delta(self, out: Array, dout: Array, dlse: Array | None) -> Array:
        return super().delta(out, dout, None)


@seeded(None, "B13")
class LseGradientAdded(Tiled):
    """dlse is added to delta."""

    def delta(self, out: Array, dout: Array, dlse: Array | None) -> Array:
        return super().delta(out, dout, None if dlse is None else -dlse)


# ---- products ------------------------------------------------------------------------------------
@seeded(3, "B01")
class KeyGradientWithoutScale(Tiled):
    """dk lacks the scale."""

    def scale_of_keys(self, head: Head) -> float:
        return 1.0


@seeded(3, "B01")
class QueryGradientScaledTwice(Tiled):
    """dq has the scale twice."""

    def scale_of_queries(self, head: Head) -> float:
        return self.scale(head) ** 2


@seeded(3, "B12 B01")
class GradientScaleOfTheHeadDim(Tiled):
    """dq and dk take the default scale although another was given."""

    def scale_of_keys(self, head: Head) -> float:
        return float(head.problem.head_dim**-0.5)

    def scale_of_queries(self, head: Head) -> float:
        return float(head.problem.head_dim**-0.5)


@seeded(3, "B01 B10")
class TilesOverwritten(Tiled):
    """A later tile's part replaces the earlier ones."""

    def accumulate(self, into: Array, part: Array) -> None:
        into[...] = part


@seeded(3, "H07")
class GradientBeyond128Dropped(Tiled):
    """Columns of gradients from 128 on stay 0 (BUG-040, BUG-041)."""

    def accumulate(self, into: Array, part: Array) -> None:
        into[..., :128] += part[..., :128]


@seeded(3, "B12 B01")
class GradientsCutToTheSmallerHeadDim(Tiled):
    """Gradients have as many columns as the smaller of D and Dv, the rest stays 0."""

    def pull(self, head: Head, *rest: Any) -> None:
        self.width = min(head.q.shape[-1], head.v.shape[-1])
        super().pull(head, *rest)

    def accumulate(self, into: Array, part: Array) -> None:
        into[..., : self.width] += part[..., : self.width]


@seeded(3, "B01 B10")
class GradientAccumulatorInStorage(Tiled):
    """Gradients are kept in bfloat16 between tiles."""

    def accumulate(self, into: Array, part: Array) -> None:
        super().accumulate(into, part)
        bits = np.ascontiguousarray(into, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        into[...] = bits.view(np.float32)


@seeded(3, "B01")
class GradientsInFloat32(Tiled):
    """Gradients of half inputs come back in float32."""

    def backward(self, *arrays: Array, **options: Any) -> Mapping[str, Array]:
        grads = super().backward(*arrays, **options)
        return {name: x.astype(np.float32) for name, x in grads.items()}


# ---- what is reduced -----------------------------------------------------------------------------
@seeded(3, "B03")
class GroupsFirstHeadAlone(Tiled):
    """dk and dv come from the first query head of a group."""

    def gather(self, head: Head, into: Array, part: Array) -> None:
        if head.h % head.problem.group == 0:
            super().gather(head, into, part)


@seeded(3, "B03")
class GroupsOverwritten(Tiled):
    """dk and dv of a group are overwritten by each of its heads instead of summed."""

    def gather(self, head: Head, into: Array, part: Array) -> None:
        into[...] = part


@seeded(3, "B03")
class GroupsAveraged(Tiled):
    """dk and dv of a group are the mean of its heads."""

    def gather(self, head: Head, into: Array, part: Array) -> None:
        super().gather(head, into, part / part.dtype.type(head.problem.group))


@seeded(3, "B03")
class GroupsModulo(Tiled):
    """dk and dv of query head h are added to key head h % Hk."""

    def scatter(self, head: Head, into: Array, options: Options, tile: Array, j0: int) -> None:
        astray = replace(head, key_head=head.h % head.problem.heads_k)
        super().scatter(astray, into, options, tile, j0)


@seeded(3, "B05")
class BiasGradientOfTheLastItem(Tiled):
    """A bias that all items share gets the gradient of the last one (BUG-069)."""

    def pull(self, head: Head, grads: Mapping[str, Array], *rest: Any) -> None:
        if "dbias" in grads and head.h == 0 and len(grads["dbias"]) == 1:
            grads["dbias"][...] = 0
        super().pull(head, grads, *rest)


@seeded(3, "B05")
class BiasGradientOfTheFirstHead(Tiled):
    """A bias that all heads share gets the gradient of the first one."""

    def pull(self, head: Head, grads: Mapping[str, Array], *rest: Any) -> None:
        shared = head.h and "dbias" in grads and grads["dbias"].shape[-3:-2] in ((), (1,))
        given = {n: x for n, x in grads.items() if n != "dbias"} if shared else grads
        super().pull(head, given, *rest)


@seeded(3, "B05")
class BiasGradientScaled(Tiled):
    """The gradient of the bias has the scale in it."""

    def reduce(self, dbias: Array, ds: Array, head: Head, i0: int, j0: int) -> None:
        super().reduce(dbias, ds * ds.dtype.type(self.scale(head)), head, i0, j0)


@seeded(3, "B05")
class BiasGradientRowsAlone(Tiled):
    """A bias of one row gets the gradient of each tile's first row."""

    def reduce(self, dbias: Array, ds: Array, head: Head, i0: int, j0: int) -> None:
        super().reduce(dbias, ds[:1] if len(dbias) == 1 else ds, head, i0, j0)


@seeded(3, "B11")
class SinkGradientMissing(Tiled):
    """The sinks' gradient is 0."""

    def sink_gradient(self, head: Head, lse: Array, delta: Array) -> Array:
        return super().sink_gradient(head, lse, delta) * 0


@seeded(3, "B11")
class SinkGradientWithoutSign(Tiled):
    """The sinks' gradient has the wrong sign."""

    def sink_gradient(self, head: Head, lse: Array, delta: Array) -> Array:
        return -super().sink_gradient(head, lse, delta)


@seeded(3, "B11")
class SinkGradientOfTheLastItem(Tiled):
    """The sinks' gradient is that of the last batch item."""

    def pull(self, head: Head, grads: Mapping[str, Array], *rest: Any) -> None:
        if "dsinks" in grads:
            grads["dsinks"][head.h] = 0
        super().pull(head, grads, *rest)


# ---- what is visible -----------------------------------------------------------------------------
@seeded(3, "B02")
class BackwardDiagonalSkipped(Tiled):
    """Causal gradients leave out the tiles that the diagonal cuts, from the second on."""

    def meets(self, head: Head, i0: int, j0: int) -> bool:
        cut = head.problem.causal and j0 and j0 + self.block_k > i0 + self.diagonal(head)
        return super().meets(head, i0, j0) and not cut


@seeded(3, "B02")
class BackwardCausalIgnored(Tiled):
    """The backward pass forgets causal inside the tiles that it visits."""

    def visible_again(self, head: Head, i0: int, j0: int) -> Array:
        i, j = self.places(i0, j0)
        return super().visible_again(head, i0, j0) | self.inside(head, i, j)


@seeded(3, "B02")
class BackwardTopLeft(Tiled):
    """The backward pass aligns causal top-left."""

    def pull(self, head: Head, *rest: Any) -> None:
        self.backwards = True
        super().pull(head, *rest)
        self.backwards = False

    def diagonal(self, head: Head) -> int:
        return 0 if getattr(self, "backwards", False) else super().diagonal(head)


@seeded(3, "B10")
class BackwardTailUnmasked(Tiled):
    """Columns behind the last key score 0 in the backward pass: exp(0 - lse) (BUG-002)."""

    def visible_again(self, head: Head, i0: int, j0: int) -> Array:
        i, j = self.places(i0, j0)
        return super().visible_again(head, i0, j0) | ((i < head.n_q) & (j >= head.n_k))


@seeded(3, "B10")
class BackwardQueryTailSkipped(Tiled):
    """The last tile of rows gives nothing where it is not whole."""

    def meets(self, head: Head, i0: int, j0: int) -> bool:
        return super().meets(head, i0, j0) and i0 + self.block_q <= head.n_q


@seeded(3, "B10")
class BackwardKeyTailSkipped(Tiled):
    """The last tile of keys gets and gives nothing where it is not whole."""

    def meets(self, head: Head, i0: int, j0: int) -> bool:
        return super().meets(head, i0, j0) and j0 + self.block_k <= head.n_k


@seeded(3, "B04 E15")
class EmptyRowsNan(Tiled):
    """exp(-inf - -inf): rows that see nothing make NaN of their tile (BUG-018)."""

    def probabilities(self, s: Array, lse: Array, seen: Array) -> Array:
        return self.exp(s - lse)

    def score_gradient(self, p: Array, dp: Array, delta: Array, seen: Array) -> Array:
        return p * (dp - delta)


@seeded(3, "E15")
class HiddenValuesInGradients(Tiled):
    """dP of hidden keys is multiplied by 0: NaN in hidden values reaches the gradients."""

    def score_gradient(self, p: Array, dp: Array, delta: Array, seen: Array) -> Array:
        return p * (dp - delta)


@seeded(3, "E15")
class HiddenKeysInGradients(Tiled):
    """dS of hidden keys, 0, meets their NaN in dq."""

    def spread(self, p: Array, x: Array, seen: Array) -> Array:
        return p @ x


@seeded(3, "E15 B04 B02")
class HiddenPositionsGetGradients(Tiled):
    """P of hidden keys is 0, but dS is formed from what it would have been."""

    def score_gradient(self, p: Array, dp: Array, delta: Array, seen: Array) -> Array:
        return super().score_gradient(np.where(seen, p, 1e-3), dp, delta, np.ones_like(seen))


@seeded(3, "D01")
class GradientsInAnyOrder(Tiled):
    """Rows add to dk and dv in the order in which blocks happen to finish: atomics."""

    def query_tiles(self, head: Head) -> Iterable[int]:
        tiles = list(super().query_tiles(head))
        return random.SystemRandom().sample(tiles, len(tiles))
