"""T: bytes moved, against what the declared tile has to move.

A target that counts them has ``traffic() -> (loaded, stored)`` since the last call of it (hardware
counters on a GPU, a load counter elsewhere). For each query tile the keys and values of the tiles
that it sees are loaded once, the queries once in all (FlashAttention-2, section 3).
"""

from __future__ import annotations

from dataclasses import replace

from portattn.conformance import judge
from portattn.conformance.case import Case, Outcome, check
from portattn.conformance.checks.helpers import Rows, call, one, sweep
from portattn.conformance.context import Context
from portattn.conformance.generators import ask
from portattn.conformance.reference import Attention

SLACK = 1.15  # partial tiles, statistics, whatever else is small
_SHAPES: Rows = {
    "smoke": [{"n": 1024, "h": 2, "d": 64}],
    "cpu": [{"n": 2048, "h": 2, "d": 128}],
    "gpu": [{"n": 8192, "h": 16, "d": 128}],
}


def model(asked: Attention, tile: tuple[int, int]) -> tuple[float, float]:
    """Bytes (loaded, stored) of the tiled schedule; causal and window skip whole tiles."""
    block_q, block_k = tile
    (n, d), (m, dv) = asked.q.shape[2:], asked.v.shape[2:]
    left, right = asked.window or (None, None)
    offset = 0 if asked.causal == "top_left" else m - n
    keys = 0
    for q0 in range(0, n, block_q):
        last = min(q0 + block_q, n) - 1 + offset
        high = min(m, last + 1) if asked.causal else m
        high = high if right is None else min(high, last + right + 1)
        low = 0 if left is None else max(0, q0 + offset - left) // block_k * block_k
        keys += max(0, -(-high // block_k) * block_k - low)
    heads = asked.batch * asked.heads[0]
    size = asked.q.itemsize
    loaded = heads * size * (n * d + keys * (d + dv))
    return float(loaded), float(heads * n * (dv * size + 4))


def counted(ctx: Context, asked: Attention) -> tuple[int, int] | Outcome:
    """What one call moved."""
    if ctx.traffic() is None:
        return Outcome.not_supported("the target has no traffic()")
    if ctx.manifest.tile is None:
        return Outcome.not_run("the manifest declares no tile to compare with")
    call(ctx, asked)
    moved = ctx.traffic()
    assert moved is not None
    return moved


def _against_model(ctx: Context, asked: Attention) -> Outcome:
    moved = counted(ctx, asked)
    if isinstance(moved, Outcome):
        return moved
    assert ctx.manifest.tile is not None
    loaded, stored = model(asked, ctx.manifest.tile)
    least = asked.q.nbytes  # every query is read; a counter below that does not count
    numbers = {
        "loaded_over": moved[0] / (SLACK * loaded),
        "stored_over": moved[1] / (SLACK * stored),
        "uncounted_over": least / max(moved[0], 1),
    }
    message = f"loaded {moved[0]} B, stored {moved[1]} B; model {loaded:.0f} and {stored:.0f}"
    return Outcome(numbers, message=message if max(numbers.values()) > 1 else "")


@check("T01", "bytes against the tile model", level=5, cases=sweep("T01", _SHAPES, dtypes=one))
def tiles(ctx: Context, case: Case) -> Outcome:
    """No more than the schedule of the declared tile needs."""
    return _against_model(ctx, ask(case))


@check(
    "T02", "causal skips half", level=5, cases=sweep("T02", _SHAPES, dtypes=one, needs=["causal"])
)
def causal(ctx: Context, case: Case) -> Outcome:
    """Tiles above the diagonal are not even loaded."""
    asked = ask(case)
    found = [_against_model(ctx, asked.having(causal=True))]
    full = counted(ctx, asked)
    half = counted(ctx, asked.having(causal=True))
    if isinstance(full, Outcome) or isinstance(half, Outcome):
        return found[0]
    assert ctx.manifest.tile is not None
    n = asked.q.shape[2]
    allowed = 0.5 + sum(ctx.manifest.tile) / n
    found.append(Outcome({"half_over": half[0] / full[0] / allowed}))
    return judge.all_of(found)


@check(
    "T03",
    "a window reads its keys only",
    level=5,
    cases=sweep("T03", _SHAPES, dtypes=one, needs=["window"]),
)
def window(ctx: Context, case: Case) -> Outcome:
    """Bytes grow with the window, not with the length."""
    n = case.params["n"]
    return _against_model(ctx, replace(ask(case), window=(n // 16, 0)))
