"""The arguments of a call, checked one at a time.

The rule kept here: a message names the argument, what came and what is wanted; a wrong type or
dtype is a `TypeError`, a wrong shape, device or number a `ValueError`. Arrays are only described
(`Described`), so this file knows no framework.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
LAYOUTS = ("bshd", "bhsd", "thd")
ALIGNMENTS = ("top_left", "bottom_right")
PRECISIONS = ("ieee", "tf32")


class Described(Protocol):
    """What validation needs to know of an array."""

    @property
    def family(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    def values(self) -> Any:
        """The numbers as a NumPy array where the host can read them for free, else None."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Shape and dtype of a mask, a bias, slopes or sinks, as the caller gave them."""

    shape: tuple[int, ...]
    dtype: str


# ---- one argument each ---------------------------------------------------------------------------
def wrong(argument: str, got: Any, want: str) -> str:
    """The one form of every message about an argument."""
    return f"{argument}: got {got}; want {want}"


def whole(name: str, value: Any, low: int) -> int:
    """``value`` as an int of at least ``low``; bools and fractions are refused."""
    if isinstance(value, bool):
        raise TypeError(wrong(name, value, f"an integer of at least {low}"))
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(wrong(name, repr(value), f"an integer of at least {low}")) from None
    if number < low:
        raise ValueError(wrong(name, number, f"an integer of at least {low}"))
    return number


def check_layout(layout: Any) -> None:
    """Refuse a layout that does not exist."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(wrong("layout", repr(layout), f"one of {', '.join(LAYOUTS)}"))


def check_rank(name: str, array: Described, rank: int, layout: str) -> None:
    """Refuse an array of another rank than its layout has."""
    if len(array.shape) != rank:
        axes = {
            "bshd": "(B, S, H, D)",
            "bhsd": "(B, H, S, D)",
            "thd": "(T, H, D)",
            "paged": "(num_blocks, block_size, Hk, D)",
        }[layout]
        raise ValueError(
            wrong(name, f"shape {array.shape}", f"{rank} axes, {axes}, for layout {layout!r}")
        )


def check_heads(heads_q: int, heads_k: int) -> None:
    """Refuse head counts of which one does not divide the other."""
    if heads_k == 0 or heads_q == 0 or heads_q % heads_k:
        raise ValueError(
            wrong("q, k", f"{heads_q} and {heads_k} heads", "heads of q a multiple of heads of k")
        )


def check_scale(scale: Any, head_dim: int) -> float:
    """``scale`` as a finite float; None becomes 1/sqrt(head_dim)."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    number = _real("scale", scale, "a finite number or None")
    if not math.isfinite(number):
        raise ValueError(wrong("scale", number, "a finite number or None"))
    return number


def check_softcap(softcap: Any) -> float | None:
    """``softcap`` as a positive finite float or None."""
    if softcap is None:
        return None
    number = _real("softcap", softcap, "a number above 0, or None")
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(wrong("softcap", number, "a finite number above 0, or None"))
    return number


def check_causal(causal: Any, *, same_lengths: bool | None, what: Any = None) -> str | None:
    """The alignment, or None. True is allowed where both alignments agree; ``same_lengths`` None
    means that the lengths are data that the host cannot read."""
    if isinstance(causal, str):
        if causal not in ALIGNMENTS:
            raise ValueError(wrong("causal", repr(causal), "False, True or " + _quoted(ALIGNMENTS)))
        return causal
    if type(causal).__name__ not in ("bool", "bool_") or causal not in (True, False):
        raise TypeError(wrong("causal", repr(causal), "False, True or " + _quoted(ALIGNMENTS)))
    if not causal:
        return None
    if not same_lengths:
        lengths = f" with Sq={what[0]}, Sk={what[1]}" if what and what[0] != what[1] else ""
        raise ValueError(
            wrong(
                "causal",
                f"True{lengths} (query and key lengths differ, or may differ per sequence)",
                'causal="bottom_right" (flash-attention; decode with a cache) or '
                'causal="top_left" (torch SDPA)',
            )
        )
    return "bottom_right"


def check_window(window: Any) -> tuple[int | None, int | None] | None:
    """``(left, right)``, each an integer of at least 0 or None for unlimited."""
    if window is None:
        return None
    want = "(left, right) of integers of at least 0, or None for an unlimited side"
    if not isinstance(window, Sequence) or isinstance(window, str | bytes) or len(window) != 2:
        raise TypeError(wrong("window", repr(window), want))
    sides: list[int | None] = []
    for side in window:
        if side is None:
            sides.append(None)
            continue
        try:
            if isinstance(side, bool):
                raise TypeError
            number = operator.index(side)
        except TypeError:
            raise TypeError(wrong("window", repr(tuple(window)), want)) from None
        if number < 0:
            raise ValueError(wrong("window", repr(tuple(window)), want))
        sides.append(number)
    return None if sides == [None, None] else (sides[0], sides[1])


def check_precision(precision: Any, dtype: str) -> str:
    """``"ieee"`` or ``"tf32"``; tf32 only means something for float32 input."""
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise ValueError(wrong("precision", repr(precision), "one of " + _quoted(PRECISIONS)))
    if precision == "tf32" and dtype != "float32":
        raise ValueError(wrong("precision", f"'tf32' with {dtype} input", "'tf32' with float32"))
    return precision


def check_flag(name: str, value: Any) -> bool:
    """A bool, NumPy's included; nothing that merely looks true."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(wrong(name, repr(value), "True or False"))
    return bool(value)


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether ``shape`` broadcasts to ``to`` without enlarging it."""
    return len(shape) <= len(to) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False)
    )


def check_result(
    name: str, array: Described, q: Described, shape: tuple[int, ...], dtype: str
) -> None:
    """An array that holds or receives a result (out, lse, dout, dlse): shape, dtype, place."""
    if array.shape != shape:
        raise ValueError(wrong(name, f"shape {array.shape}", str(shape)))
    if array.dtype != dtype:
        raise TypeError(wrong(name, f"dtype {array.dtype}", dtype))
    check_same_place(q, {name: array})


def _real(name: str, value: Any, want: str) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(wrong(name, repr(value), want))
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of floats
        raise ValueError(wrong(name, "a number beyond float64", want)) from None


def _quoted(names: Sequence[str]) -> str:
    return " or ".join(f'"{n}"' for n in names)


def check_same_place(q: Described, others: dict[str, Described | None]) -> None:
    for name, array in others.items():
        if array is None:
            continue
        if array.device != q.device:
            raise ValueError(
                wrong(name, f"an array on {array.device}", f"all arrays on {q.device}, as q is")
            )
        if array.family != q.family:
            raise TypeError(
                wrong(name, f"an array of {array.family}", f"an array of {q.family}, as q is")
            )


def check_bias(bias: Described | None, dtype: str, dense: tuple[int, ...]) -> Operand | None:
    if bias is None:
        return None
    if bias.dtype not in (dtype, "float32"):
        hint = "; a bool array goes in as mask=" if bias.dtype == "bool" else ""
        raise TypeError(wrong("bias", f"dtype {bias.dtype}", f"{dtype} or float32{hint}"))
    if not broadcasts(bias.shape, dense):
        raise ValueError(
            wrong(
                "bias", f"shape {bias.shape}", f"one that broadcasts to (B, Hq, Sq, Sk) = {dense}"
            )
        )
    return Operand(bias.shape, bias.dtype)


def check_mask(mask: Described | None, dense: tuple[int, ...]) -> Operand | None:
    if mask is None:
        return None
    if mask.dtype != "bool":
        hint = "; a float array goes in as bias=" if mask.dtype in DTYPE_BYTES else ""
        raise TypeError(wrong("mask", f"dtype {mask.dtype}", f"bool (True = attend){hint}"))
    if not broadcasts(mask.shape, dense):
        raise ValueError(
            wrong(
                "mask", f"shape {mask.shape}", f"one that broadcasts to (B, Hq, Sq, Sk) = {dense}"
            )
        )
    return Operand(mask.shape, "bool")


def check_alibi(slopes: Described | None, batch: int, heads_q: int) -> Operand | None:
    if slopes is None:
        return None
    if slopes.dtype != "float32":
        raise TypeError(wrong("alibi_slopes", f"dtype {slopes.dtype}", "float32"))
    if slopes.shape not in ((heads_q,), (batch, heads_q)):
        raise ValueError(
            wrong("alibi_slopes", f"shape {slopes.shape}", f"({heads_q},) or ({batch}, {heads_q})")
        )
    return Operand(slopes.shape, "float32")


def check_sinks(sinks: Described | None, dtype: str, heads_q: int) -> Operand | None:
    if sinks is None:
        return None
    if sinks.dtype not in (dtype, "float32"):
        raise TypeError(wrong("sinks", f"dtype {sinks.dtype}", f"{dtype} or float32"))
    if sinks.shape != (heads_q,):
        raise ValueError(wrong("sinks", f"shape {sinks.shape}", f"({heads_q},), one a query head"))
    return Operand(sinks.shape, sinks.dtype)


# ---- lengths -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Lengths:
    batch: int
    seq_q: int
    seq_k: int
    same: bool | None  # every sequence has as many keys as queries; None: the host cannot tell


def check_lengths(
    q: Described,
    k: Described,
    head_axis: int,
    layout: str,
    cu_q: Described | None,
    cu_k: Described | None,
    used: Described | None,
    table: Described | None,
) -> Lengths:
    packed, paged = layout == "thd", table is not None
    if packed:
        if cu_q is None:
            raise ValueError(wrong("cu_seqlens_q", None, "int32 (B + 1,) for layout 'thd'"))
        if not paged and cu_k is None:
            raise ValueError(wrong("cu_seqlens_k", None, "int32 (B + 1,) for layout 'thd'"))
    elif cu_q is not None or cu_k is not None:
        name = "cu_seqlens_q" if cu_q is not None else "cu_seqlens_k"
        raise ValueError(wrong(name, f"an array with layout {layout!r}", "None, or layout='thd'"))
    if paged and cu_k is not None:
        raise ValueError(
            wrong("cu_seqlens_k", "an array with block_table", "None; seqused_k has the lengths")
        )
    if paged and used is None:
        raise ValueError(wrong("seqused_k", None, "int32 (B,), which block_table needs"))

    if packed:
        assert cu_q is not None
        lens_q = _check_cu("cu_seqlens_q", cu_q, q.shape[0])
        batch = cu_q.shape[0] - 1
        seq_q = q.shape[0] if lens_q is None else int(lens_q.max(initial=0))
    else:
        lens_q = None
        batch, seq_q = q.shape[0], q.shape[2 if head_axis == 1 else 1]

    lens_k: Any = None
    if paged:
        assert table is not None
        if len(table.shape) != 2 or table.shape[0] != batch:
            raise ValueError(wrong("block_table", f"shape {table.shape}", f"({batch}, max_blocks)"))
        if table.dtype != "int32":
            raise TypeError(wrong("block_table", f"dtype {table.dtype}", "int32"))
        if k.shape[1] == 0:
            raise ValueError(wrong("k", "block_size 0", "a block size of at least 1"))
        seq_k = table.shape[1] * k.shape[1]
    elif packed:
        assert cu_k is not None
        lens_k = _check_cu("cu_seqlens_k", cu_k, k.shape[0])
        if cu_k.shape[0] != batch + 1:
            raise ValueError(
                wrong("cu_seqlens_k", f"shape {cu_k.shape}", f"({batch + 1},), as cu_seqlens_q")
            )
        seq_k = k.shape[0] if lens_k is None else int(lens_k.max(initial=0))
    else:
        if k.shape[0] != batch:
            raise ValueError(wrong("k", f"batch {k.shape[0]}", f"{batch}, the batch of q"))
        seq_k = k.shape[2 if head_axis == 1 else 1]

    if used is not None:
        _check_used(used, batch, seq_k, lens_k)
        if table is not None:
            _check_table(table, used, k.shape[0], k.shape[1])
        return Lengths(batch, seq_q, seq_k, False)
    if packed:
        known = lens_q is not None and lens_k is not None
        return Lengths(batch, seq_q, seq_k, bool((lens_q == lens_k).all()) if known else None)
    return Lengths(batch, seq_q, seq_k, seq_q == seq_k)


def _check_cu(name: str, cu: Described, total: int) -> Any:
    if cu.dtype != "int32":
        raise TypeError(wrong(name, f"dtype {cu.dtype}", "int32"))
    if len(cu.shape) != 1 or cu.shape[0] < 1:
        raise ValueError(wrong(name, f"shape {cu.shape}", "(B + 1,)"))
    values = cu.values()
    if values is None:
        return None
    steps = values[1:] - values[:-1]
    if values[0] != 0 or values[-1] != total or (steps < 0).any():
        shown = values.tolist() if values.size <= 12 else f"{values[:4].tolist()}...{values[-1]}"
        raise ValueError(wrong(name, shown, f"0 first, never decreasing, and {total} (T) last"))
    return steps


def _check_used(used: Described, batch: int, seq_k: int, lens_k: Any) -> None:
    if used.dtype != "int32":
        raise TypeError(wrong("seqused_k", f"dtype {used.dtype}", "int32"))
    if used.shape != (batch,):
        raise ValueError(wrong("seqused_k", f"shape {used.shape}", f"({batch},)"))
    values = used.values()
    if values is None or not batch:
        return
    limit = seq_k if lens_k is None else lens_k
    if (values < 0).any() or (values > limit).any():
        raise ValueError(
            wrong("seqused_k", values.tolist()[:12], f"numbers from 0 to the key length ({seq_k})")
        )


def _check_table(table: Described, used: Described, num_blocks: int, block_size: int) -> None:
    entries, lengths = table.values(), used.values()
    if entries is None or lengths is None or not entries.size:
        return
    blocks = -(-lengths // block_size)
    for row, count in zip(entries, blocks.tolist(), strict=True):
        part = row[:count]
        if part.size and (part.min() < 0 or part.max() >= num_blocks):
            raise ValueError(
                wrong(
                    "block_table",
                    f"a used entry of {part.min() if part.min() < 0 else part.max()}",
                    f"block numbers from 0 to {num_blocks - 1}",
                )
            )
