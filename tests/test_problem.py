"""A `Problem` exists only if its call is valid: every rule of the contract, one row each."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from portattn import Problem
from portattn.arguments import DTYPE_BYTES


@dataclasses.dataclass(frozen=True)
class Outline:
    """An array described and not made, as `Problem` sees one."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    family: str = "numpy"
    numbers: tuple[Any, ...] | None = None  # what the host reads; None on a device
    steps: tuple[int, ...] | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        row_major = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        return self.steps or tuple(row_major)

    def values(self) -> Any:
        return None if self.numbers is None else np.array(self.numbers, self.dtype)


def ints(*numbers: Any, dtype: str = "int32") -> Outline:
    return Outline(np.shape(numbers), dtype, numbers=numbers)


DENSE = {
    "q": Outline((2, 5, 4, 8)),
    "k": Outline((2, 7, 2, 8)),
    "v": Outline((2, 7, 2, 6)),
}
SQUARE = DENSE | {"k": Outline((2, 5, 2, 8)), "v": Outline((2, 5, 2, 6))}
PACKED = {
    "q": Outline((9, 4, 8)),
    "k": Outline((12, 2, 8)),
    "v": Outline((12, 2, 6)),
    "layout": "thd",
    "cu_seqlens_q": ints(0, 4, 4, 9),
    "cu_seqlens_k": ints(0, 4, 7, 12),
}
PAGED = DENSE | {
    "k": Outline((6, 4, 2, 8)),
    "v": Outline((6, 4, 2, 6)),
    "seqused_k": ints(5, 0),
    "block_table": ints((3, 5), (-1, 99)),
}


def problem(base: dict[str, Any], **changes: Any) -> Problem:
    return Problem.from_arrays(**(base | changes))


# ---- what is refused -----------------------------------------------------------------------------
nan, inf = float("nan"), float("inf")
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str, dict[str, Any]]] = [
    # argument, base, exception, words of the message, what is wrong
    *(("layout", DENSE, ValueError, "bshd", {"layout": x}) for x in ("bsdh", None, 5, ("bshd",))),
    # rank
    ("q", DENSE, ValueError, "4 axes", {"q": Outline((2, 5, 32))}),
    ("k", DENSE, ValueError, "4 axes", {"k": Outline((2, 7, 2, 8, 1))}),
    ("v", DENSE, ValueError, "4 axes", {"v": Outline(())}),
    ("q", PACKED, ValueError, "3 axes", {"q": DENSE["q"]}),
    ("v", PACKED, ValueError, "3 axes", {"v": DENSE["v"]}),
    ("k", PAGED, ValueError, "num_blocks", {"k": Outline((24, 2, 8))}),
    # dtypes
    *(
        (
            "q",
            DENSE,
            TypeError,
            dtype,
            {n: dataclasses.replace(DENSE[n], dtype=dtype) for n in DENSE},
        )
        for dtype in ("int32", "bool", "complex64", "float8_e4m3fn", "uint8")
    ),
    # heads and dims
    ("q, k", DENSE, ValueError, "multiple", {"q": Outline((2, 5, 3, 8))}),
    ("q, k", DENSE, ValueError, "multiple", {"q": Outline((2, 5, 1, 8))}),
    ("q, k", DENSE, ValueError, "multiple", {"q": Outline((2, 5, 0, 8))}),
    ("q, k", DENSE, ValueError, "multiple", {n: Outline((2, 7, 0, 8)) for n in ("k", "v")}),
    ("k", DENSE, ValueError, "head dim 9", {"k": Outline((2, 7, 2, 9))}),
    ("v", DENSE, ValueError, "as k has", {"v": Outline((2, 8, 2, 6))}),
    ("v", DENSE, ValueError, "as k has", {"v": Outline((2, 7, 4, 6))}),
    ("v", DENSE, ValueError, "as k has", {"v": Outline((1, 7, 2, 6))}),
    ("k", DENSE, ValueError, "batch", {"k": Outline((1, 7, 2, 8)), "v": Outline((1, 7, 2, 6))}),
    ("q", DENSE, ValueError, "head dim", {"q": Outline((2, 5, 4, 0)), "k": Outline((2, 7, 2, 0))}),
    ("v", DENSE, ValueError, "head dim", {"v": Outline((2, 7, 2, 0))}),
    # numbers
    *(("scale", DENSE, ValueError, "finite", {"scale": x}) for x in (nan, inf, -inf, 10**400)),
    *(("scale", DENSE, TypeError, "finite", {"scale": x}) for x in ("1", 1j, [1.0], b"")),
    *(("softcap", DENSE, ValueError, "above 0", {"softcap": x}) for x in (0, -1.0, nan, inf)),
    *(("softcap", DENSE, TypeError, "above 0", {"softcap": x}) for x in ("30", (30,))),
    # causal
    *(("causal", DENSE, TypeError, "top_left", {"causal": x}) for x in (None, 1, 0, 1.0, ())),
    ("causal", DENSE, ValueError, "bottom_right", {"causal": "bottom-right"}),
    ("causal", DENSE, ValueError, "Sq=5, Sk=7", {"causal": True}),
    ("causal", DENSE, ValueError, 'causal="bottom_right".*causal="top_left"', {"causal": True}),
    ("causal", PACKED, ValueError, "bottom_right", {"causal": True}),
    ("causal", SQUARE, ValueError, "top_left", {"causal": True, "seqused_k": ints(5, 5)}),
    ("causal", PAGED, ValueError, "top_left", {"causal": True}),
    # window
    *(
        ("window", DENSE, ValueError, "None for an unlimited side", {"window": x})
        for x in ((-1, 0), (0, -1), (-1, -1), (3, np.int64(-2)))
    ),
    *(
        ("window", DENSE, TypeError, "left, right", {"window": x})
        for x in (3, "12", b"12", (1,), (1, 2, 3), (1.5, 0), (True, 0), ("1", 0), {1, 2}, -1)
    ),
    # mask and bias
    *(
        ("mask", DENSE, ValueError, "broadcasts", {"mask": Outline(shape, "bool")})
        for shape in ((8,), (5, 8), (5, 6), (3, 1, 5, 7), (2, 2, 5, 7), (1, 2, 4, 5, 7), (0,))
    ),
    ("mask", DENSE, TypeError, "bias=", {"mask": Outline((5, 7), "float32")}),
    ("mask", DENSE, TypeError, "bool", {"mask": Outline((5, 7), "int8")}),
    ("bias", DENSE, ValueError, "broadcasts", {"bias": Outline((5, 8))}),
    ("bias", DENSE, ValueError, "broadcasts", {"bias": Outline((1, 1, 1, 5, 7))}),
    ("bias", DENSE, TypeError, "mask=", {"bias": Outline((5, 7), "bool")}),
    *(
        ("bias", DENSE, TypeError, "float32", {"bias": Outline((5, 7), dtype)})
        for dtype in ("float16", "bfloat16", "float64", "int32")
    ),
    # ALiBi and sinks
    ("alibi_slopes", DENSE, TypeError, "float32", {"alibi_slopes": Outline((4,), "float64")}),
    *(
        ("alibi_slopes", DENSE, ValueError, "(4,)", {"alibi_slopes": Outline(shape)})
        for shape in ((2,), (), (1, 4), (4, 2), (2, 4, 1))
    ),
    ("sinks", DENSE, TypeError, "float32", {"sinks": Outline((4,), "float16")}),
    *(
        ("sinks", DENSE, ValueError, "(4,)", {"sinks": Outline(shape)})
        for shape in ((2,), (), (1, 4), (5,))
    ),
    # packed
    ("cu_seqlens_q", PACKED, ValueError, "thd", {"cu_seqlens_q": None}),
    ("cu_seqlens_k", PACKED, ValueError, "thd", {"cu_seqlens_k": None}),
    ("cu_seqlens_q", DENSE, ValueError, "layout='thd'", {"cu_seqlens_q": ints(0, 5)}),
    ("cu_seqlens_k", DENSE, ValueError, "layout='thd'", {"cu_seqlens_k": ints(0, 5)}),
    *(
        ("cu_seqlens_q", PACKED, ValueError, "never decreasing, and 9", {"cu_seqlens_q": x})
        for x in (ints(1, 4, 4, 9), ints(0, 5, 4, 9), ints(0, 4, 4, 8), ints(0, 4, 4, 10))
    ),
    ("cu_seqlens_k", PACKED, ValueError, "and 12", {"cu_seqlens_k": ints(0, 4, 7, 11)}),
    ("cu_seqlens_q", PACKED, ValueError, "(B + 1,)", {"cu_seqlens_q": ints((0, 4, 4, 9))}),
    ("cu_seqlens_q", PACKED, ValueError, "(B + 1,)", {"cu_seqlens_q": Outline((0,), "int32")}),
    ("cu_seqlens_k", PACKED, ValueError, "(4,)", {"cu_seqlens_k": ints(0, 4, 12)}),
    *(
        (name, PACKED, TypeError, "int32", {name: ints(0, 4, 7, 9, dtype=dtype)})
        for name in ("cu_seqlens_q", "cu_seqlens_k")
        for dtype in ("int64", "float32")
    ),
    # lengths in use, pages
    ("seqused_k", DENSE, TypeError, "int32", {"seqused_k": ints(1, 2, dtype="int64")}),
    ("seqused_k", DENSE, ValueError, "(2,)", {"seqused_k": ints(1)}),
    ("seqused_k", DENSE, ValueError, "(2,)", {"seqused_k": ints((1, 2))}),
    ("seqused_k", DENSE, ValueError, "0 to", {"seqused_k": ints(1, -1)}),
    ("seqused_k", DENSE, ValueError, "0 to", {"seqused_k": ints(1, 8)}),
    ("seqused_k", PACKED, ValueError, "0 to", {"seqused_k": ints(4, 4, 5)}),
    ("seqused_k", PAGED, ValueError, "0 to", {"seqused_k": ints(9, 0)}),
    ("seqused_k", PAGED, ValueError, "block_table needs", {"seqused_k": None}),
    (
        "block_table",
        PAGED,
        TypeError,
        "int32",
        {"block_table": ints((3, 5), (0, 0), dtype="int64")},
    ),
    ("block_table", PAGED, ValueError, "(2, max_blocks)", {"block_table": ints(3, 5)}),
    ("block_table", PAGED, ValueError, "(2, max_blocks)", {"block_table": ints((3, 5))}),
    ("block_table", PAGED, ValueError, "0 to 5", {"block_table": ints((3, 6), (0, 0))}),
    ("block_table", PAGED, ValueError, "0 to 5", {"block_table": ints((-1, 5), (0, 0))}),
    (
        "cu_seqlens_k",
        PAGED,
        ValueError,
        "seqused_k",
        {
            "layout": "thd",
            "q": Outline((2, 4, 8)),
            "cu_seqlens_q": ints(0, 1, 2),
            "cu_seqlens_k": ints(0, 1, 2),
        },
    ),
    (
        "k",
        PAGED,
        ValueError,
        "block size",
        {"k": Outline((6, 0, 2, 8)), "v": Outline((6, 0, 2, 6))},
    ),
    # flags
    *(
        (name, DENSE, TypeError, "True or False", {name: x})
        for name in ("return_lse", "deterministic")
        for x in (1, None, "yes")
    ),
    *(("precision", DENSE, ValueError, "tf32", {"precision": x}) for x in ("fp32", None, 32)),
    *(
        (
            "precision",
            DENSE,
            ValueError,
            "float32",
            {"precision": "tf32"} | {n: dataclasses.replace(DENSE[n], dtype=dtype) for n in DENSE},
        )
        for dtype in ("float16", "bfloat16", "float64")
    ),
]


@pytest.mark.parametrize(
    ("argument", "base", "error", "words", "changes"),
    REFUSED,
    ids=[f"{row[0]}-{i}" for i, row in enumerate(REFUSED)],
)
def test_refused(argument: str, base: Any, error: Any, words: str, changes: Any) -> None:
    """The message names the argument, what came and what is wanted."""
    problem(base)  # without the change it is a valid problem
    with pytest.raises(error) as caught:
        problem(base, **changes)
    text = str(caught.value)
    assert text.startswith(f"{argument}: got ")
    assert "; want " in text
    plain = words.replace("(", r"\(").replace(")", r"\)").replace("+", r"\+")
    assert re.search(plain, text), text


DTYPES = ("float16", "bfloat16", "float32")


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=3)), ids="-".join)
def test_q_k_and_v_have_one_dtype(dtypes: tuple[str, str, str]) -> None:
    arrays = {
        name: dataclasses.replace(DENSE[name], dtype=dtype)
        for name, dtype in zip("qkv", dtypes, strict=True)
    }
    if len(set(dtypes)) == 1:
        assert problem(DENSE, **arrays).dtype == dtypes[0]
    else:
        with pytest.raises(TypeError, match="q, k, v: got dtypes " + ", ".join(dtypes)):
            problem(DENSE, **arrays)


OPERANDS = {
    "k": DENSE["k"],
    "v": DENSE["v"],
    "bias": Outline((5, 7)),
    "mask": Outline((5, 7), "bool"),
    "alibi_slopes": Outline((4,)),
    "sinks": Outline((4,)),
    "seqused_k": ints(1, 2),
}
PLACED = [(DENSE, n, x) for n, x in OPERANDS.items()] + [
    (PACKED, "cu_seqlens_q", PACKED["cu_seqlens_q"]),
    (PACKED, "cu_seqlens_k", PACKED["cu_seqlens_k"]),
    (PAGED, "block_table", PAGED["block_table"]),
]


@pytest.mark.parametrize(("base", "name", "array"), PLACED, ids=[p[1] for p in PLACED])
def test_everything_lies_on_one_device_and_is_of_one_kind(base, name: str, array: Outline) -> None:
    problem(base, **{name: array})
    elsewhere = dataclasses.replace(array, device="cuda:1", numbers=None)
    with pytest.raises(ValueError, match=rf"{name}: got an array on cuda:1; want .* cpu, as q is"):
        problem(base, **{name: elsewhere})
    with pytest.raises(TypeError, match=f"{name}: got an array of torch; want .* numpy, as q is"):
        problem(base, **{name: dataclasses.replace(array, family="torch")})


# ---- what is accepted, and what it becomes -------------------------------------------------------
def test_the_plain_call() -> None:
    made = problem(DENSE)
    assert made == Problem(
        dtype="float32",
        batch=2,
        seq_q=5,
        seq_k=7,
        heads_q=4,
        heads_k=2,
        head_dim=8,
        head_dim_v=6,
        scale=1 / math.sqrt(8),
        device="cpu",
    )
    assert hash(made) == hash(problem(DENSE))
    assert made.features() == ("gqa", "value_head_dim")
    assert made.group == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.seq_q = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("base", "changes", "out_shape", "lse_shape", "batch", "lengths"),
    [
        (DENSE, {}, (2, 5, 4, 6), (2, 4, 5), 2, (5, 7)),
        (
            {
                "q": Outline((2, 4, 5, 8)),
                "k": Outline((2, 2, 7, 8)),
                "v": Outline((2, 2, 7, 6)),
                "layout": "bhsd",
            },
            {},
            (2, 4, 5, 6),
            (2, 4, 5),
            2,
            (5, 7),
        ),
        (PACKED, {}, (9, 4, 6), (4, 9), 3, (5, 5)),
        (PAGED, {}, (2, 5, 4, 6), (2, 4, 5), 2, (5, 8)),
        (
            PAGED,
            {"layout": "thd", "q": Outline((3, 4, 8)), "cu_seqlens_q": ints(0, 1, 3)},
            (3, 4, 6),
            (4, 3),
            2,
            (2, 8),
        ),
    ],
    ids=["bshd", "bhsd", "thd", "paged", "paged thd"],
)
def test_shapes_of_the_results(base, changes, out_shape, lse_shape, batch, lengths) -> None:
    made = problem(base, **changes)
    assert made.out_shape == out_shape
    assert made.lse_shape == lse_shape
    assert made.batch == batch
    assert (made.seq_q, made.seq_k) == lengths
    assert not made.empty


@pytest.mark.parametrize(
    ("base", "changes", "field", "value"),
    [
        (DENSE, {"scale": 0}, "scale", 0.0),
        (DENSE, {"scale": -2}, "scale", -2.0),
        (DENSE, {"scale": Fraction(1, 4)}, "scale", 0.25),
        (DENSE, {"scale": np.float32(0.5)}, "scale", 0.5),
        (DENSE, {"scale": np.int64(3)}, "scale", 3.0),
        (DENSE, {"softcap": 30}, "softcap", 30.0),
        (DENSE, {"causal": False}, "causal", None),
        (DENSE, {"causal": np.False_}, "causal", None),
        (DENSE, {"causal": "top_left"}, "causal", "top_left"),
        (DENSE, {"causal": "bottom_right"}, "causal", "bottom_right"),
        (SQUARE, {"causal": True}, "causal", "bottom_right"),
        (SQUARE, {"causal": np.True_}, "causal", "bottom_right"),
        (PACKED, {"causal": "top_left"}, "causal", "top_left"),
        (DENSE, {"window": None}, "window", None),
        (DENSE, {"window": (None, None)}, "window", None),
        (DENSE, {"window": (0, 0)}, "window", (0, 0)),
        (DENSE, {"window": [3, None]}, "window", (3, None)),
        (DENSE, {"window": (None, np.int32(4))}, "window", (None, 4)),
        (DENSE, {"window": (10**12, 0)}, "window", (10**12, 0)),
        (DENSE, {"return_lse": np.True_}, "return_lse", True),
        (DENSE, {"deterministic": True}, "deterministic", True),
        (DENSE, {"precision": "tf32"}, "precision", "tf32"),
        (DENSE, {"seqused_k": ints(0, 7)}, "seqused_k", True),
        (PACKED, {"seqused_k": ints(4, 0, 5)}, "seqused_k", True),
        (PACKED, {}, "total_k", 12),
        (PAGED, {}, "total_k", None),
        (PAGED, {}, "block_size", 4),
        (PAGED, {}, "num_blocks", 6),
        # on a device the numbers are not read: the lengths are then the most that they could be
        (PACKED, {"cu_seqlens_q": Outline((4,), "int32")}, "seq_q", 9),
        (PACKED, {"cu_seqlens_k": Outline((4,), "int32")}, "seq_k", 12),
    ],
)
def test_accepted(base, changes, field: str, value: Any) -> None:
    assert getattr(problem(base, **changes), field) == value


def test_causal_true_is_allowed_where_all_packed_lengths_agree() -> None:
    same = PACKED | {"k": Outline((9, 2, 8)), "v": Outline((9, 2, 6))}
    same["cu_seqlens_k"] = same["cu_seqlens_q"]
    assert problem(same, causal=True).causal == "bottom_right"
    with pytest.raises(ValueError, match="may differ per sequence"):  # unreadable on a device
        problem(same, causal=True, cu_seqlens_k=Outline((4,), "int32"))


@pytest.mark.parametrize("shape", [(), (7,), (1,), (5, 1), (4, 1, 7), (2, 1, 1, 7), (2, 4, 5, 7)])
@pytest.mark.parametrize(("name", "dtype"), [("mask", "bool"), ("bias", "float32")])
def test_masks_and_biases_broadcast(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    operand = getattr(problem(DENSE, **{name: Outline(shape, dtype)}), name)
    assert (operand.shape, operand.dtype) == (shape, dtype)


@pytest.mark.parametrize("name", ["bias", "sinks"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_sinks_may_be_float32(name: str, dtype: str) -> None:
    arrays = {n: dataclasses.replace(DENSE[n], dtype=dtype) for n in DENSE}
    for own in (dtype, "float32"):
        made = problem(DENSE, **arrays, **{name: Outline((4,) if name == "sinks" else (7,), own)})
        assert getattr(made, name).dtype == own


def test_packed_masks_broadcast_to_the_longest_sequences() -> None:
    made = problem(PACKED, mask=Outline((3, 1, 5, 5), "bool"))
    assert made.mask is not None and made.mask.shape == (3, 1, 5, 5)


@pytest.mark.parametrize(
    ("changes", "empty"),
    [
        ({"q": Outline((2, 0, 4, 8))}, True),
        ({n: Outline((0, *DENSE[n].shape[1:])) for n in DENSE}, True),
        ({"k": Outline((2, 0, 2, 8)), "v": Outline((2, 0, 2, 6))}, False),  # zeros and -inf
    ],
)
def test_empty_axes_are_valid(changes, empty: bool) -> None:
    assert problem(DENSE, **changes).empty == empty


@pytest.mark.parametrize(
    ("shape", "steps", "strided"),
    [
        ((2, 5, 4, 8), None, False),
        ((2, 5, 4, 8), (320, 64, 16, 2), True),
        ((2, 5, 4, 8), (160, 32, 8, -1), True),
        ((2, 5, 4, 8), (0, 0, 0, 1), False),
        ((2, 5, 4, 1), (20, 4, 1, 99), False),  # an axis of one element has no stride to speak of
        ((2, 0, 4, 8), (0, 0, 0, 3), False),
    ],
)
def test_the_inner_stride_is_part_of_the_problem(shape, steps, strided: bool) -> None:
    arrays = DENSE if shape[-1] == 8 else {"k": Outline((2, 7, 2, 1)), "v": Outline((2, 7, 2, 6))}
    assert problem(DENSE | arrays | {"q": Outline(shape, steps=steps)}).inner_strided == strided


def test_negative_strides_are_part_of_the_problem() -> None:
    """By the names of their arguments, so that a backend without them can refuse."""
    turned = Outline((2, 7, 2, 8), steps=(112, -16, 8, 1))
    made = problem(DENSE)
    assert made.negative_strides == ()
    found = problem(DENSE, k=turned, mask=Outline((5, 7), "bool", steps=(7, -1)))
    assert found.negative_strides == ("k", "mask")
    assert found.as_backward().negative_strides == ("k", "mask")
    assert made.with_results(out=Outline(made.out_shape), lse=None) is made
    out = Outline(made.out_shape, steps=(120, 24, -6, 1))
    assert found.with_results(out=out).negative_strides == ("k", "mask", "out")


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_the_accumulator(dtype: str) -> None:
    made = Problem.from_numbers(head_dim=8, dtype=dtype)
    assert made.accumulator == ("float64" if dtype == "float64" else "float32")


def test_backward_keeps_all_but_the_direction() -> None:
    made = problem(DENSE, return_lse=True, window=(3, 0))
    back = made.as_backward()
    assert back.backward and not back.return_lse
    assert dataclasses.replace(back, backward=False, return_lse=True) == made


# ---- problems without arrays ---------------------------------------------------------------------
FEATURES: list[tuple[str, dict[str, Any]]] = [
    ("causal", {"causal": True}),
    ("causal", {"causal": "top_left", "seq_k": 9}),
    ("window", {"window": (3, None)}),
    ("softcap", {"softcap": 30}),
    ("bias", {"bias": True}),
    ("mask", {"mask": True}),
    ("alibi_slopes", {"alibi": True}),
    ("sinks", {"sinks": True}),
    ("gqa", {"heads_q": 8, "heads_k": 2}),
    ("value_head_dim", {"head_dim_v": 32}),
    ("packed", {"layout": "thd"}),
    ("paged", {"block_size": 16}),
    ("seqused_k", {"seqused_k": True}),
    ("return_lse", {"return_lse": True}),
    ("deterministic", {"deterministic": True}),
    ("tf32", {"precision": "tf32"}),
    ("backward", {"backward": True}),
]


@pytest.mark.parametrize(("feature", "options"), FEATURES)
def test_from_numbers_has_every_feature(feature: str, options: dict[str, Any]) -> None:
    assert Problem.from_numbers(head_dim=64).features() == ()
    made = Problem.from_numbers(head_dim=64, **options)
    assert feature in made.features()
    assert feature in made.describe()


def test_from_numbers_fills_in_from_what_is_given() -> None:
    made = Problem.from_numbers(head_dim=128, seq_q=3, heads_q=4)
    assert (made.seq_k, made.heads_k, made.head_dim_v) == (3, 4, 128)
    assert made.scale == 1 / math.sqrt(128)
    packed = Problem.from_numbers(head_dim=8, batch=3, seq_q=5, seq_k=6, layout="thd")
    assert (packed.total_q, packed.total_k) == (15, 18)
    paged = Problem.from_numbers(head_dim=8, batch=3, seq_k=33, block_size=16)
    assert (paged.block_size, paged.num_blocks) == (16, 9)
    assert paged.seq_k % 16 == 0 and paged.seq_k >= 33, "the capacity, in whole blocks"


NUMBERS_REFUSED: list[tuple[str, dict[str, Any], type[Exception]]] = [
    ("dtype", {"dtype": "int8"}, ValueError),
    ("dtype", {"dtype": None}, ValueError),
    ("head_dim", {"head_dim": 0}, ValueError),
    ("head_dim", {"head_dim": 64.0}, TypeError),
    ("head_dim", {"head_dim": True}, TypeError),
    ("head_dim_v", {"head_dim_v": 0}, ValueError),
    ("batch", {"batch": -1}, ValueError),
    ("seq_q", {"seq_q": "8"}, TypeError),
    ("seq_k", {"seq_k": -8}, ValueError),
    ("heads_q", {"heads_q": 0}, ValueError),
    ("heads_k", {"heads_k": 0}, ValueError),
    ("q, k", {"heads_q": 6, "heads_k": 4}, ValueError),
    ("layout", {"layout": "sbhd"}, ValueError),
    ("scale", {"scale": nan}, ValueError),
    ("causal", {"causal": "left"}, ValueError),
    ("causal", {"causal": True, "seq_k": 9}, ValueError),
    ("window", {"window": (-1, 0)}, ValueError),
    ("softcap", {"softcap": 0}, ValueError),
    ("block_size", {"block_size": 0}, ValueError),
    ("block_size", {"block_size": 1.5}, TypeError),
    ("precision", {"precision": "tf32", "dtype": "float16"}, ValueError),
    *(
        (name, {name: 1}, TypeError)
        for name in (
            "bias", "mask", "alibi", "sinks", "seqused_k", "return_lse", "deterministic",
            "backward",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "options", "error"), NUMBERS_REFUSED)
def test_from_numbers_refuses(argument: str, options: dict[str, Any], error: Any) -> None:
    with pytest.raises(error, match=f"^{argument}: got .*; want "):
        Problem.from_numbers(**({"head_dim": 64} | options))


def test_the_tables_cover_every_parameter() -> None:
    """A parameter that is new in a signature must have its row here."""
    arrays = set(inspect.signature(Problem.from_arrays).parameters)
    assert arrays == {name for row in REFUSED for name in row[4]}
    numbers = set(inspect.signature(Problem.from_numbers).parameters) - {"device"}
    assert numbers == {name for row in NUMBERS_REFUSED for name in row[1]}
