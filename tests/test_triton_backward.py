"""The portable Triton backward kernels against the oracle, in Triton's interpreter, and compiled
ahead of time.

The rule kept here: Triton decides when it is imported whether it interprets, so that every case
runs in a process of its own and this one never imports it. All cases share one such process.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "torch")),
    reason="needs triton and torch",
)

NAN, INF = np.nan, np.inf
LIMITS = {"float32": 3e-6, "float16": 3e-3}
"""Largest error, relative to the largest gradient where that is above 1."""


@dataclass(frozen=True)
class Case:
    """Shapes, options and what to overwrite: ``poke`` is (array, index, value)."""

    B: int = 1
    Hq: int = 2
    Hk: int = 1
    Sq: int = 21
    Sk: int = 37
    D: int = 20
    Dv: int = 24
    dtype: str = "float32"
    causal: str | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float | None = None
    bias: str | None = None
    mask: str | None = None
    alibi: bool = False
    sinks: bool = False
    dlse: bool = False
    packed: tuple[list[int], list[int]] | None = None
    used: list[int] | None = None
    page: int | None = None
    table: list[list[int]] | None = None
    strided: bool = False
    wanted: tuple[str, ...] = ("dq", "dk", "dv")
    tile: tuple[int, int] = (16, 16)
    poke: list[tuple[str, Any, float]] = field(default_factory=list)


ROWS, ALL = slice(13, None), slice(None)
CASES = {
    "plain": Case(B=2),
    "float16": Case(dtype="float16", D=16, Dv=32, causal="bottom_right"),
    "vectors": Case(dtype="float16", D=24, Dv=40, Sq=40, Sk=40, causal="top_left"),
    "bottom_right": Case(B=2, Hq=4, Hk=2, causal="bottom_right", dlse=True),
    "top_left": Case(causal="top_left", Sq=70, Sk=20),
    "empty rows": Case(causal="bottom_right", Sq=53, Sk=20),
    "window": Case(window=(5, 3), Sq=60, Sk=70),
    "window left": Case(window=(30, None), Sq=70, Sk=70, tile=(32, 16)),
    "wide tile": Case(window=(40, None), causal="top_left", Sq=70, Sk=90, tile=(16, 64)),
    "softcap": Case(softcap=1.5, causal="bottom_right", Sq=50, Sk=50, dlse=True),
    "negative scale": Case(scale=-0.7, causal="bottom_right"),
    "zero scale": Case(scale=0.0),
    "bias whole": Case(bias="BHQK", causal="bottom_right", softcap=2.0),
    "bias heads": Case(B=2, bias="B1QK", causal="bottom_right"),
    "bias batch": Case(B=2, bias="HQK", window=(6, None)),
    "bias of keys": Case(B=2, bias="1K", softcap=2.0),
    "bias of rows": Case(bias="HQ1"),
    "bias alone": Case(B=2, bias="11", wanted=("dk", "dv"), dlse=True),
    "mask": Case(B=2, mask="BHQK"),
    "alibi": Case(alibi=True, causal="top_left"),
    "sinks": Case(sinks=True, causal="bottom_right", Sq=50, Sk=20, dlse=True),
    "used": Case(B=2, used=[13, 0], causal="bottom_right", alibi=True),
    "packed": Case(packed=([5, 0, 33], [20, 7, 0]), Hq=4, Hk=2, dlse=True, sinks=True),
    "packed bias": Case(packed=([5, 30, 17], [20, 35, 9]), bias="H1K", causal="top_left"),
    "packed used": Case(packed=([5, 30], [20, 35]), used=[3, 35], bias="BHQK"),
    "paged": Case(
        B=2, page=16, table=[[3, 1, -1], [0, 4, 2]], used=[20, 48], causal="bottom_right",
        poke=[("k", (1, slice(4, None)), NAN), ("v", (5,), NAN)],
    ),
    "paged shared": Case(B=2, page=20, table=[[3, 1, 1], [3, 3, 2]], used=[50, 40], dlse=True),
    "paged packed": Case(
        packed=([5, 30], [1, 1]), page=5, table=[[3, 1, -1], [0, 4, 2]], used=[7, 15], bias="K"
    ),
    "strided": Case(strided=True, causal="bottom_right"),
    "no queries": Case(Sq=0, sinks=True),
    "no keys": Case(Sk=0, sinks=True, bias="HQ1"),
    "everything": Case(
        B=2, Hq=4, Hk=2, causal="bottom_right", window=(18, None), softcap=3.0, bias="HQK",
        mask="B1QK", alibi=True, sinks=True, dlse=True, used=[30, 37],
    ),
    "hidden poison in rows": Case(
        causal="bottom_right", Sq=50, Sk=20,
        poke=[("q", (0, 1, 3, 3), NAN), ("dout", (0, 0, 4, 1), INF)],
    ),
    "hidden poison in keys": Case(
        B=2, used=[13, 0], bias="H1K",
        poke=[("k", (0, 0, ROWS), NAN), ("v", (0, 0, ROWS), INF), ("k", (1,), NAN)],
    ),
    "hidden by the bias": Case(
        bias="K", poke=[("bias", (7,), -INF), ("k", (0, 0, 7), NAN), ("v", (0, 0, 7), INF)]
    ),
    "visible poison in keys": Case(causal="bottom_right", poke=[("k", (0, 0, 30, 3), -INF)]),
    "visible poison in rows": Case(
        causal="bottom_right", Sq=37, poke=[("dout", (0, 1, 10, 3), NAN), ("q", (0, 0, 9, 0), INF)]
    ),
}  # fmt: skip


# ---- in the child --------------------------------------------------------------------------------
def draw(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays by name, in the oracle's layout, and the oracle's options."""
    rng = np.random.default_rng(0)
    batch, queries, keys = case.B, case.Sq, case.Sk
    options: dict[str, Any] = {}
    rows: tuple[int, ...] = (batch, case.Hq, queries)
    at_keys: tuple[int, ...] = (batch, case.Hk, keys)
    if case.packed:
        starts = [np.cumsum([0, *n]).astype(np.int32) for n in case.packed]
        batch, queries, keys = len(case.packed[0]), max(case.packed[0]), max(case.packed[1])
        options["cu_seqlens_q"] = starts[0]
        rows = (starts[0][-1], case.Hq)
        if not case.page:
            options["cu_seqlens_k"] = starts[1]
            at_keys = (starts[1][-1], case.Hk)
    if case.used is not None:
        options["seqused_k"] = np.asarray(case.used, np.int32)
    if case.page:
        table = options["block_table"] = np.asarray(case.table, np.int32)
        at_keys, keys = (table.max() + 2, case.page, case.Hk), table.shape[1] * case.page
    size = {"B": batch, "H": case.Hq, "Q": queries, "K": keys, "1": 1}
    arrays = {
        name: rng.standard_normal((*shape, dim)).astype(case.dtype)
        for name, shape, dim in (
            ("q", rows, case.D), ("k", at_keys, case.D), ("v", at_keys, case.Dv),
            ("dout", rows, case.Dv),
        )
    }  # fmt: skip
    if case.bias:
        arrays["bias"] = rng.standard_normal([size[c] for c in case.bias]).astype("float32")
    if case.mask:
        arrays["mask"] = rng.random([size[c] for c in case.mask]) < 0.6
    if case.alibi:
        arrays["alibi_slopes"] = rng.random(case.Hq).astype("float32")
    if case.sinks:
        arrays["sinks"] = rng.standard_normal(case.Hq).astype("float32")
    for name, index, value in case.poke:
        arrays[name][index] = value
    for name in ("causal", "window", "softcap", "scale"):
        options[name] = getattr(case, name)
    return arrays, options


def faults(case: Case) -> list[str]:
    """What is wrong with the kernels' gradients."""
    import torch

    from portattn.backends.triton_jit.backward_plan import BackwardTiles, Tile
    from portattn.backends.triton_jit.launch_backward import Backward, run
    from portattn.conformance import reference

    arrays, options = draw(case)
    dout = arrays.pop("dout")
    asked = reference.Attention(**arrays, **options)
    out, lse = reference.forward(asked)
    dlse = None
    if case.dlse:
        dlse = np.random.default_rng(1).standard_normal(lse.shape).astype("float32")
    want = reference.backward(asked, dout, dlse)

    def tensor(x: Any) -> Any:
        return None if x is None else torch.from_numpy(np.ascontiguousarray(x))

    def of_rows(x: Any) -> Any:
        return x if x is None or not case.packed else x.movedim(-2, 0)[None]

    def of_keys(x: Any) -> Any:
        return x.transpose(1, 2) if case.page else of_rows(x)

    def placed(x: Any) -> Any:
        x = tensor(x)
        if not case.strided:
            return x
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), NAN, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]

    def of_rank_4(x: Any) -> Any:
        return None if x is None else tensor(x).reshape((1,) * (4 - x.ndim) + x.shape)

    def row_numbers(x: Any) -> Any:
        return None if x is None else tensor(x.astype("float32"))[... if x.ndim == 3 else None]

    given = {name: placed(arrays[name]) for name in ("q", "k", "v")}
    got = {n: torch.full_like(given[n[1:]], NAN) for n in case.wanted}
    bias, slopes = of_rank_4(arrays.get("bias")), arrays.get("alibi_slopes")
    if bias is not None:
        got["dbias"] = torch.full_like(bias, NAN)
    if case.sinks:
        got["dsinks"] = torch.full((case.Hq,), NAN)
    left, right = case.window or (None, None)
    if case.causal:
        right = min(right or 0, 0)
    table = asked.block_table
    lengths = case.packed or ([case.Sq], [case.Sk])
    call = Backward(
        q=of_rows(given["q"]), k=of_keys(given["k"]), v=of_keys(given["v"]),
        out=of_rows(placed(out.astype(case.dtype))), dout=of_rows(placed(dout)),
        lse=row_numbers(lse), dlse=row_numbers(dlse), scale=asked.factor, batch=asked.batch,
        seq_q=max(lengths[0]), seq_k=max(lengths[1]) if table is None else table.size
        // len(table) * (case.page or 1),
        dq=of_rows(got.get("dq")), dk=of_keys(got["dk"]), dv=of_keys(got["dv"]),
        bias=bias, dbias=got.get("dbias"), mask=of_rank_4(arrays.get("mask")),
        slopes=None if slopes is None else tensor(slopes)[None],
        sinks=tensor(arrays.get("sinks")), dsinks=got.get("dsinks"),
        cu_q=tensor(asked.cu_seqlens_q), cu_k=tensor(asked.cu_seqlens_k),
        used=tensor(asked.seqused_k), table=tensor(table), softcap=case.softcap,
        left=left, right=right, bottom_right=case.causal != "top_left",
    )  # fmt: skip
    tile = Tile(*case.tile, 4, 1)
    run(call, BackwardTiles(tile, tile, tile, tile))

    found = []
    stray = visible_poison(case, asked)
    for name, result in got.items():
        x, w = result.double().numpy().reshape(want[name].shape), want[name]
        sound = np.isfinite(x) & np.isfinite(w)
        if not (np.isfinite(x) | stray.get(name, np.zeros(w.shape, bool))).all():
            found.append(f"{name}: not finite where no poison is seen")
        error = np.abs(x - w)[sound].max(initial=0) / max(1, np.abs(w[sound]).max(initial=0))
        if error > LIMITS[case.dtype]:
            found.append(f"{name}: error {error:.2e}")
    return found


def visible_poison(case: Case, asked: Any) -> dict[str, Any]:
    """Where gradients may be NaN: rows and keys that see a poisoned one, or a row that does."""
    if not any("visible" in name and case is other for name, other in CASES.items()):
        return {}
    from portattn.conformance.reference import visibility

    dq, dk = np.zeros(asked.q.shape, bool), np.zeros(asked.k.shape, bool)
    dv = np.zeros(asked.v.shape, bool)
    for head in range(case.Hq):
        seen = visibility(asked, 0, head, np.arange(case.Sq), case.Sk)
        rows = np.zeros(case.Sq, bool)
        for name, index, _ in case.poke:
            if name in ("k", "v"):
                rows |= seen[:, index[2]]
            elif index[1] == head:
                rows[index[2]] = True
        dq[0, head, rows] = True
        dk[0, 0, seen[rows].any(0)] = dv[0, 0, seen[rows].any(0)] = True
    return {"dq": dq, "dk": dk, "dv": dv}


def report() -> None:
    """Run every case and print {name: faults} as JSON."""
    from portattn.backends.triton_jit import interpreted

    interpreted.mend()
    with np.errstate(all="ignore"):
        print(json.dumps({name: faults(case) for name, case in CASES.items()}))


def compile_ahead(arch: int) -> None:
    """Compile the two long kernels for an architecture that need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from portattn.backends.triton_jit.backward import dq_kernel
    from portattn.backends.triton_jit.backward_keys import dkdv_kernel
    from portattn.backends.triton_jit.backward_plan import Tile, candidates, shared_bytes

    tiles = candidates(64, 64, 2)[0]
    for name, kernel, tile in (("dq", dq_kernel, tiles.dq), ("dkdv", dkdv_kernel, tiles.dkdv)):
        assert isinstance(tile, Tile)
        pointers = dict.fromkeys(("q", "k", "v", "dout", "dq", "dk", "dv"), "*bf16")
        pointers |= {"lse": "*fp32", "delta": "*fp32", "poison": "*i32"}
        fixed: dict[str, Any] = {
            "RIGHT": True, "INNER": True, "VEC": 8, "PRECISION": "ieee", "EVEN_D": True,
            "EVEN_DV": True, "BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k,
            "BLOCK_D": 64, "BLOCK_DV": 64,
        }  # fmt: skip
        types, constants = {}, {}
        for n, parameter in enumerate(kernel.params):
            kind = parameter.annotation_type or pointers.get(parameter.name, "constexpr")
            if parameter.is_constexpr or kind == "constexpr":
                kind = "constexpr"
                unset = False if parameter.is_constexpr else None
                constants[(n,)] = fixed.get(parameter.name, unset)
            types[parameter.name] = kind
        compiled = triton.compile(
            ASTSource(kernel, types, constexprs=constants),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        )
        assert compiled.metadata.shared <= shared_bytes(name, tile, 64, 64, 2)
        assert compiled.asm["cubin"]


# ---- here ----------------------------------------------------------------------------------------
def _in_child(call: str) -> str:
    here = Path(__file__)
    path = f"import sys; sys.path.insert(0, {str(here.parent)!r})"
    return f"{path}; import {here.stem} as t; t.{call}"


@pytest.fixture(scope="module")
def outcome(fresh: Callable[..., Any]) -> dict[str, list[str]]:
    done = fresh(_in_child("report()"), timeout=600, TRITON_INTERPRET="1")
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_oracle(name: str, outcome: dict[str, list[str]]) -> None:
    assert outcome[name] == []


@pytest.mark.parametrize("arch", [80, 90])
def test_the_kernels_compile_ahead_of_time(
    arch: int, fresh: Callable[..., Any], tmp_path: Path
) -> None:
    fresh(
        _in_child(f"compile_ahead({arch})"),
        timeout=300,
        TRITON_INTERPRET=None,
        TRITON_CACHE_DIR=str(tmp_path),
    )


def test_every_head_dim_has_a_tile_within_the_least_shared_memory() -> None:
    from portattn.backends.triton_jit.backward_plan import candidates, largest_shared

    for size in (2, 4):
        for block in (16, 32, 64, 128, 256, 512):
            needed = [
                largest_shared(tiles, block, block, size, masked=True)
                for tiles in candidates(block, block, size)
            ]
            assert min(needed) <= 101_376 + 2048 * (block == 512), (size, block, needed)
