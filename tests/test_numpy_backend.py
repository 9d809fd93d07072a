"""The NumPy backend against the float64 oracle.

The rule kept here: tiles are forced small where a test is about tiles, so that every path is taken
in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy_kit import TOLERANCE, attend, error, gradients, packed, pages, same_bits

from portattn.backends.numpy_tiled import forward

# ---- right numbers -------------------------------------------------------------------------------
LENGTHS = [(1, 1), (7, 7), (40, 40), (33, 90), (90, 33), (1, 70), (70, 1), (5, 131)]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
@pytest.mark.parametrize("window", [None, (0, 0), (1, 3), (9, None), (None, 20), (30, 30)])
def test_bands(
    inputs: Any, agrees: Any, lengths: tuple[int, int], causal: Any, window: Any
) -> None:
    q, k, v = inputs(1, B=2, Sq=lengths[0], Sk=lengths[1], Hq=4, Hk=2, D=5, Dv=3)
    agrees(q, k, v, causal=causal, window=window, slack=4)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 30, 50), (1, 4, 30, 50), (2, 1, 30, 50), (30, 50), (50,), (1,), (2, 1, 1, 50),
        (4, 1, 1), (2, 4, 30, 1), (30, 1), (1, 1, 1, 1),
    ],
)  # fmt: skip
def test_masks_and_biases_broadcast(inputs: Any, agrees: Any, shape: tuple[int, ...]) -> None:
    q, k, v = inputs(2, B=2, Sq=30, Sk=50, Hq=4, Hk=2, D=6)
    rng = np.random.default_rng(3)
    mask = rng.random(shape) > 0.4
    bias = rng.standard_normal(shape).astype("f4")
    agrees(q, k, v, mask=mask, slack=4)
    agrees(q, k, v, bias=bias, slack=4)
    agrees(q, k, v, bias=np.where(mask, bias, -np.inf).astype("f4"), slack=4)
    agrees(q, k, v, mask=mask[..., ::-1], bias=bias, softcap=1.5, causal="top_left", slack=4)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 1.0},
        {"softcap": 30.0, "causal": "bottom_right"},
        {"softcap": 200.0, "window": (20, 5)},
        {"alibi_slopes": np.array([0.5, 0.0, -0.1, 0.05], "f4")},
        {"alibi_slopes": np.linspace(0, 0.3, 8, dtype="f4").reshape(2, 4), "causal": "top_left"},
        {"sinks": np.array([0.5, -2.0, 30.0, -np.inf], "f4"), "causal": "bottom_right"},
        {"seqused_k": np.array([0, 29], "i4"), "causal": "bottom_right"},
        {"seqused_k": np.array([50, 1], "i4"), "window": (6, 2), "sinks": np.zeros(4, "f4")},
        {"scale": 0.0},
        {"scale": -0.7},
    ],
)
def test_options(inputs: Any, agrees: Any, options: dict[str, Any]) -> None:
    agrees(*inputs(4, B=2, Sq=60, Sk=50, Hq=4, Hk=2, D=8), slack=8, **options)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_dtypes(inputs: Any, agrees: Any, dtype: str, layout: str) -> None:
    q, k, v = inputs(5, B=2, Sq=37, Sk=61, Hq=6, Hk=2, D=7, Dv=9, dtype=dtype, layout=layout)
    rng = np.random.default_rng(6)
    agrees(q, k, v, layout=layout, slack=4)
    agrees(
        q, k, v, layout=layout, causal="bottom_right", softcap=2.0, slack=4,
        bias=rng.standard_normal((6, 37, 61)).astype(q.dtype),
        sinks=rng.standard_normal(6).astype(q.dtype),
    )  # fmt: skip


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom_right"},
        {"causal": "top_left", "window": (9, 2)},
        {"bias": (4, 4, 30, 70)},
        {"bias": (70,)},
        {"bias": (4, 1, 30, 1), "softcap": 1.0},
        {"mask": (4, 1, 30, 70), "sinks": np.ones(4, "f4")},
        {"seqused_k": np.array([2, 0, 33, 70], "i4"), "causal": "bottom_right"},
    ],
)
def test_packed(agrees: Any, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(8)
    q, starts_q = packed(rng, [0, 3, 30, 1], 4, 8)
    k, starts_k = packed(rng, [5, 0, 40, 70], 2, 8)
    v = packed(rng, [5, 0, 40, 70], 2, 6)[0]
    options = dict(options)
    if "bias" in options:
        options["bias"] = rng.standard_normal(options["bias"]).astype("f4")
    if "mask" in options:
        options["mask"] = rng.random(options["mask"]) > 0.5
    agrees(q, k, v, layout="thd", cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, slack=4, **options)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_paged(agrees: Any, causal: Any) -> None:
    agrees(**pages(), causal=causal, slack=4)


@pytest.mark.usefixtures("small_tiles")
def test_paged_and_packed(agrees: Any) -> None:
    made = pages()
    made["q"] = made["q"].reshape(-1, 4, 6)[:30]
    starts = np.array([0, 4, 25, 30], "i4")
    agrees(**made, layout="thd", cu_seqlens_q=starts, window=(11, 4), slack=4)


def test_paged_is_the_gathered_call() -> None:
    made = pages()
    out, lse = attend(**made, causal="bottom_right")
    for b in (1, 2):
        n = int(made["seqused_k"][b])
        rows = made["block_table"][b, : -(-n // 8)]
        k, v = (made[x][rows].reshape(1, -1, 2, made[x].shape[-1])[:, :n] for x in "kv")
        one = attend(made["q"][b : b + 1], k, v, causal="bottom_right")
        assert same_bits(out[b : b + 1], one[0])
        assert same_bits(lse[b : b + 1], one[1])
    unused = sorted(set(range(20)) - {4, 17, 2, 9, 0, 11, 13})
    dout = np.ones_like(out)
    made_gradients = gradients(**made, dout=dout)
    for name in ("dk", "dv"):
        assert not made_gradients[name][unused].any()
        assert np.isfinite(made_gradients[name]).all()


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (6, 1)])
@pytest.mark.parametrize("queries", [1, 5])
def test_split_over_keys(inputs: Any, agrees: Any, heads: tuple[int, int], queries: int) -> None:
    q, k, v = inputs(10, B=1, Sq=queries, Sk=9001, Hq=heads[0], Hk=heads[1], D=16)
    agrees(q, k, v, causal="bottom_right", slack=4)
    mask = np.zeros((queries, 9001), bool)
    mask[:, -3:] = mask[-1:, :5] = True  # whole parts see nothing
    agrees(q, k, v, mask=mask, slack=4)


def test_real_tiles(inputs: Any, agrees: Any) -> None:
    q, k, v = inputs(11, B=1, Sq=1100, Sk=1300, Hq=2, Hk=1, D=64)
    for options in ({}, {"causal": "bottom_right"}, {"window": (200, 100)}, {"softcap": 20.0}):
        agrees(q, k, v, slack=4, **options)
    q, k, v = inputs(11, B=1, Sq=600, Sk=700, Hq=1, D=256, dtype="bfloat16")
    agrees(q, k, v, causal="top_left")


@st.composite
def calls(draw: Any) -> dict[str, Any]:
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    B, Sq, Sk = draw(st.integers(1, 3)), draw(st.integers(1, 45)), draw(st.integers(0, 60))
    Hk, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    D, Dv = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    dtype = draw(st.sampled_from(["f4", "f8"]))
    spread = draw(st.sampled_from([0.3, 1.0, 6.0, 30.0]))
    options: dict[str, Any] = {
        "q": (rng.standard_normal((B, Sq, Hk * group, D)) * spread).astype(dtype),
        "k": rng.standard_normal((B, Sk, Hk, D)).astype(dtype),
        "v": rng.standard_normal((B, Sk, Hk, Dv)).astype(dtype),
        "causal": draw(st.sampled_from([False, "top_left", "bottom_right"])),
        "window": draw(st.none() | st.tuples(*[st.none() | st.integers(0, 30)] * 2)),
        "softcap": draw(st.none() | st.sampled_from([0.5, 5.0, 80.0])),
    }
    shape = tuple(n if draw(st.booleans()) else 1 for n in (B, Hk * group, Sq, Sk))
    if draw(st.booleans()):
        options["mask"] = rng.random(shape) > draw(st.sampled_from([0.1, 0.5, 0.95]))
    if draw(st.booleans()):
        bias = rng.standard_normal(shape).astype(dtype)
        options["bias"] = np.where(rng.random(shape) > 0.8, -np.inf, bias).astype(dtype)
    if draw(st.booleans()):
        options["alibi_slopes"] = rng.random((B, Hk * group)).astype("f4")
    if draw(st.booleans()):
        options["sinks"] = rng.standard_normal(Hk * group).astype(dtype)
    if draw(st.booleans()):
        options["seqused_k"] = rng.integers(0, Sk + 1, B).astype("i4")
    return options


@pytest.mark.usefixtures("small_tiles")
def test_everything_at_once(agrees: Any) -> None:
    @given(calls())
    def check(options: dict[str, Any]) -> None:
        agrees(**options, slack=40)

    check()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom_right", "sinks": np.array([0.3, -0.2])},
        {"softcap": 1.3, "bias": np.linspace(-1, 1, 7 * 9).reshape(7, 9)},
        {
            "bias": np.linspace(-1, 1, 9),
            "window": (3, 1),
            "alibi_slopes": np.array([0.1, 0.2], "f4"),
        },
    ],
)
def test_gradients_are_finite_differences(inputs: Any, options: dict[str, Any]) -> None:
    q, k, v = inputs(12, B=2, Sq=7, Sk=9, Hq=2, Hk=1, D=4, Dv=3, dtype="float64")
    rng = np.random.default_rng(13)
    dout, dlse = rng.standard_normal((2, 7, 2, 3)), rng.standard_normal((2, 2, 7))
    arrays = {"q": q, "k": k, "v": v}
    arrays |= {n: x for n, x in options.items() if n in ("bias", "sinks")}
    rest = {n: x for n, x in options.items() if n not in arrays}

    def value(given_arrays: dict[str, Any]) -> float:
        out, lse = attend(**given_arrays, **rest)
        return float((out * dout).sum() + np.where(np.isinf(lse), 0, lse * dlse).sum())

    made = gradients(**arrays, dout=dout, dlse=dlse, **rest)
    for name, x in arrays.items():
        for at in {tuple(int(rng.integers(n)) for n in x.shape) for _ in range(6)}:
            moved = []
            for step in (1e-6, -1e-6):
                other = x.copy()
                other[at] += step
                moved.append(value({**arrays, name: other}))
            assert made[f"d{name}"][at] == pytest.approx(
                (moved[0] - moved[1]) / 2e-6, rel=1e-6, abs=1e-7
            )


# ---- rows that see nothing, or one key -----------------------------------------------------------
def test_empty_rows(inputs: Any) -> None:
    q, k, v = inputs(14, Sq=5, Sk=2)
    out, lse = attend(q, k, v, causal="bottom_right")
    assert not out[:, :3].any()
    assert (lse[..., :3] == -np.inf).all()
    dout = np.ones_like(out)
    dout[:, :3] = np.nan  # of rows that are 0 whatever the inputs
    made = gradients(q, k, v, dout, causal="bottom_right")
    assert not made["dq"][:, :3].any()
    assert all(np.isfinite(x).all() for x in made.values())
    out, lse = attend(q, k, v, causal="bottom_right", sinks=np.array([1.75], "f4"))
    assert not out[:, :3].any()
    assert (lse[..., :3] == np.float32(1.75)).all()
    out, lse = attend(q, k[:, :0], v[:, :0])
    assert not out.any()
    assert (lse == -np.inf).all()


def test_empty_dimensions(inputs: Any) -> None:
    q, k, _ = inputs(14, B=2, Sq=5, Sk=4)
    for a, b in ((q[:0], k[:0]), (q[:, :0], k), (q, k[:, :0])):
        out, lse = attend(a, b, b)
        assert out.shape == a.shape
        made = gradients(a, b, b, np.ones_like(out), np.ones_like(lse))
        assert made["dq"].shape == a.shape
        assert made["dk"].shape == made["dv"].shape == b.shape
        assert not any(x.any() for x in made.values())


@pytest.mark.parametrize("value", [-np.inf, np.finfo("f4").min, -1e30])
def test_a_finite_bias_is_no_mask(inputs: Any, value: float) -> None:
    q, k, v = inputs(15, Sq=3)
    bias = np.ones((3, 3), "f4")
    bias[0] = value
    out, lse = attend(np.zeros_like(q), k, v, bias=bias)
    if value == -np.inf:
        assert not out[0, 0].any()
        assert lse[0, 0, 0] == -np.inf
    else:
        np.testing.assert_allclose(out[0, 0, 0], v[0, :, 0].mean(0), atol=1e-6)
        assert lse[0, 0, 0] == np.float32(value)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_visible_key_is_copied(inputs: Any, dtype: str) -> None:
    q, k, v = inputs(16, B=1, Sq=300, Sk=300, Hq=2, D=64, dtype=dtype)
    out, _ = attend(q, k, v, window=(0, 0))
    assert same_bits(out, v)
    out, _ = attend(q, k[:, :1], v[:, :1])
    assert same_bits(out, np.repeat(v[:, :1], 300, axis=1))
    out, _ = attend(q, k, v, causal=True)
    assert same_bits(out[:, :1], v[:, :1])


def test_large_scores(inputs: Any) -> None:
    q, k = np.full((1, 64, 1, 128), 50, "f4"), np.full((1, 64, 1, 128), -50, "f4")
    v = np.broadcast_to(np.arange(64, dtype="f4")[None, :, None, None], q.shape)
    out, lse = attend(q, k, v)
    np.testing.assert_allclose(out, 31.5, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(64) - 2500 * np.sqrt(128), rtol=1e-6)
    q, k, v = inputs(17, B=1, Sq=700, D=64)
    for order in (np.argsort(k[0, :, 0, 0]), np.argsort(-k[0, :, 0, 0])):
        out, _ = attend(q, 64 * k[:, order], v[:, order], causal=True)
        assert np.isfinite(out).all()


def test_values_beyond_the_bound(inputs: Any, oracle: Any) -> None:
    """Without a running maximum weights reach e^20: such rows are done again where that is too
    much for float32."""
    q, k, v = inputs(18, B=1, Sq=300, D=64)
    assert np.sqrt((q**2).sum(-1).max() * (k**2).sum(-1).max()) / 8 < forward.BOUND
    for power in (2.0**100, 2.0**-120):
        huge = (v * np.float32(power)).astype("f4")
        out, lse = attend(5 * q, k, huge)
        want, want_lse = oracle(5 * q, k, huge)
        assert np.abs(out - want).max() <= 4e-6 * np.abs(want).max()
        assert error(lse, want_lse) < 1e-6
    one, _ = attend(q, k, v)
    for power in (2.0**40, 2.0**-40):
        assert same_bits(attend(q, k, v * np.float32(power))[0], one * np.float32(power))


@pytest.mark.parametrize("large", [None, 1.0, 40.0, np.nan])
@pytest.mark.parametrize("causal", [False, True])
def test_the_short_way_has_the_bits_of_the_general_one(
    inputs: Any, monkeypatch: pytest.MonkeyPatch, causal: bool, large: float | None
) -> None:
    """A mask that hides nothing sends every tile the general way. One row that needs its maximum,
    or is NaN, moves its tile there and no other row's bits."""
    short = []
    plain = forward._RowTile._plain
    monkeypatch.setattr(
        forward._RowTile, "_plain", lambda self, *at: short.append(at) or plain(self, *at)
    )
    q, k, v = inputs(19, B=1, Sq=1300, Hq=4, Hk=2, D=64)
    q[0, 900, 2] *= 1 if large is None else large
    out, lse = attend(q, k, v, causal=causal)
    assert short
    short.clear()
    masked, masked_lse = attend(q, k, v, causal=causal, mask=np.ones((1300, 1300), bool))
    assert not short
    assert same_bits(out, masked) and same_bits(lse, masked_lse)
    if large is not None:
        q[0, 900, 2] = 0.5
        other, other_lse = attend(q, k, v, causal=causal)
        others = np.ones(q.shape[:3], bool)
        others[0, 900, 2] = False
        assert same_bits(out[others], other[others])
        assert same_bits(lse.swapaxes(1, 2)[others], other_lse.swapaxes(1, 2)[others])


# ---- what is hidden stays hidden -----------------------------------------------------------------
HIDING: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "causal": lambda i, j: {"causal": "bottom_right"},
    "window": lambda i, j: {"window": (0, 7)},
    "mask": lambda i, j: {"mask": np.arange(j) != 20},
    "mask-rows": lambda i, j: {"mask": (np.arange(j) != 20) | (np.arange(i)[:, None] > i - 5)},
    "bias": lambda i, j: {"bias": np.where(np.arange(j) == 20, -np.inf, 0.5).astype("f4")},
    "seqused": lambda i, j: {"seqused_k": np.array([20], "i4")},
}


def poisoned(i: int, j: int, kind: str) -> tuple[np.ndarray, dict[str, Any]]:
    """(Sq, Sk) bools, True where the row sees the key, and the options that say so."""
    options = HIDING[kind](i, j)
    rows, keys = np.arange(i)[:, None], np.arange(j)[None, :]
    seen = {
        "causal": keys <= rows + j - i,
        "window": (keys >= rows + j - i) & (keys <= rows + j - i + 7),
        "mask": np.broadcast_to(keys != 20, (i, j)),
        "mask-rows": (keys != 20) | (rows > i - 5),
        "bias": np.broadcast_to(keys != 20, (i, j)),
        "seqused": np.broadcast_to(keys < 20, (i, j)),
    }
    return np.ascontiguousarray(seen[kind]), options


@pytest.mark.parametrize("tiles", ["small", "real"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("kind", HIDING)
def test_poison_stays_out(
    request: pytest.FixtureRequest, inputs: Any, tiles: str, poison: float, kind: str
) -> None:
    """The bits of rows that do not see a key are those of the call with zeros there."""
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    i, j = (41, 61) if tiles == "small" else (330, 400)
    q, k, v = inputs(19, B=1, Sq=i, Sk=j, Hq=2, Hk=1, D=16)
    seen, options = poisoned(i, j, kind)
    bad_key = j - 1 if kind in ("causal", "window") else 20
    blind = ~seen[:, bad_key]
    assert blind.any()
    results = []
    for value in (0.0, poison):
        k[:, bad_key] = v[:, bad_key] = value
        results.append(attend(q, k, v, **options))
    (clean, clean_lse), (got, got_lse) = results
    assert same_bits(got[:, blind], clean[:, blind])
    assert same_bits(got_lse[..., blind], clean_lse[..., blind])
    if not np.isfinite(poison) and not blind.all():
        assert np.isnan(got[:, ~blind]).all()

    # gradients: rows that do not see the key, and keys that no poisoned row sees
    dout = np.random.default_rng(20).standard_normal(clean.shape).astype("f4")
    grads = []
    for value in (0.0, poison):
        k[:, bad_key] = v[:, bad_key] = value
        grads.append(gradients(q, k, v, dout, **options))
    assert same_bits(grads[0]["dq"][:, blind], grads[1]["dq"][:, blind])
    untouched = ~seen[~blind].any(axis=0)
    for name in ("dk", "dv"):
        assert same_bits(grads[0][name][:, untouched], grads[1][name][:, untouched])
        if blind.all():
            assert not grads[1][name][:, bad_key].any()


@pytest.mark.parametrize("tiles", ["small", "real"])
@pytest.mark.parametrize("where", ["q", "dout", "dlse"])
@pytest.mark.parametrize("kind", HIDING)
def test_a_bad_row_stays_a_row(
    request: pytest.FixtureRequest, inputs: Any, tiles: str, where: str, kind: str
) -> None:
    """A NaN in one query, or its gradient, reaches that row and the keys that it sees."""
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    i, j = (41, 61) if tiles == "small" else (330, 400)
    q, k, v = inputs(21, B=1, Sq=i, Sk=j, Hq=2, Hk=1, D=16)
    seen, options = poisoned(i, j, kind)
    bad, others = i // 3, np.arange(i) != i // 3
    rng = np.random.default_rng(22)
    arrays = {
        "q": q,
        "dout": rng.standard_normal(q.shape).astype("f4"),
        "dlse": rng.standard_normal((1, 2, i)).astype("f4"),
    }
    grads, outs = [], []
    for value in (0.0, np.nan):
        (arrays[where].swapaxes(1, 2) if where == "dlse" else arrays[where])[:, bad] = value
        outs.append(attend(arrays["q"], k, v, **options))
        grads.append(gradients(k=k, v=v, **arrays, **options))
    assert same_bits(outs[0][0][:, others], outs[1][0][:, others])
    assert same_bits(outs[0][1][..., others], outs[1][1][..., others])
    assert same_bits(grads[0]["dq"][:, others], grads[1]["dq"][:, others])
    assert np.isnan(grads[1]["dq"][:, bad]).all()
    for name in ("dk", "dv"):
        assert same_bits(grads[0][name][:, ~seen[bad]], grads[1][name][:, ~seen[bad]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout_heads", [(1, 1), (8, 2)])
def test_the_future_does_not_leak(inputs: Any, dtype: str, layout_heads: tuple[int, int]) -> None:
    """Other keys behind t, huge ones too, leave the rows before t with their bits, although the
    norms of these keys decide how later rows are computed."""
    for length, cuts in ((9, (1, 3)), (1100, (1, 33, 300, 513, 1000))):
        q, k, v = inputs(
            23, B=1, Sq=length, Hq=layout_heads[0], Hk=layout_heads[1], D=64, dtype=dtype
        )
        before = attend(q, k, v, causal=True)
        for t in cuts:
            other = k.copy(), v.copy()
            other[0][:, t:] *= 100
            other[1][:, t:] = -3
            after = attend(q, *other, causal=True)
            assert same_bits(before[0][:, :t], after[0][:, :t])
            assert same_bits(before[1][..., :t], after[1][..., :t])


def test_an_unbounded_row_leaves_its_neighbours(inputs: Any, oracle: Any) -> None:
    q, k, v = inputs(24, B=1, Sq=512, Sk=1500, D=64)
    before = attend(q, k, v)
    for rows in (slice(100, 101), slice(0, 300)):  # few: by index; many: all at once
        other = q.copy()
        other[:, rows] *= 40
        after = attend(other, k, v)
        keep = np.ones(512, bool)
        keep[rows] = False
        assert same_bits(before[0][:, keep], after[0][:, keep])
        assert same_bits(before[1][..., keep], after[1][..., keep])
        want, want_lse = oracle(other, k, v)
        assert error(after[0], want) < 2e-5
        assert error(after[1], want_lse) < 1e-6
