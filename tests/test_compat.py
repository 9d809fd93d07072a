"""The look-alikes give what the libraries that they look like give, or refuse.

torch's own SDPA is run beside `portattn.compat.sdpa`; transformers' `sdpa` and `eager` beside
`portattn.compat.transformers`, on small random models. flash-attention needs a GPU, so its face is
held to the examples of its documentation and to calls of `portattn.attention` per sequence.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as functional  # noqa: E402

import portattn  # noqa: E402
from portattn.compat.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from portattn.compat.sdpa import scaled_dot_product_attention  # noqa: E402

F64 = torch.float64


def tensors(*shapes: tuple[int, ...], dtype: Any = F64, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=F64).to(dtype) for s in shapes]


def equal(a: Any, b: Any, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def i32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


# ---- torch's SDPA --------------------------------------------------------------------------------
def _mask(*shape: int) -> Any:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[..., 0] = True
    return mask


SDPA_CALLS: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "plain": (((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)), {}),
    "causal": (((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)), {"is_causal": True}),
    "causal with more queries": (
        ((2, 4, 7, 8), (2, 4, 5, 8), (2, 4, 5, 8)),
        {"is_causal": True},
    ),
    "scale": (((1, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8)), {"scale": 0.9}),
    "scale 0": (((1, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8)), {"scale": 0.0}),
    "groups": (
        ((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
        {"enable_gqa": True, "attn_mask": _mask(5, 7)},
    ),
    "one key head without enable_gqa": (((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)), {}),
    "two axes": (((5, 8), (7, 8), (7, 6)), {}),
    "three axes": (((4, 5, 8), (4, 7, 8), (4, 7, 8)), {"attn_mask": _mask(4, 5, 7)}),
    "five axes": (
        ((3, 2, 4, 5, 8), (3, 2, 4, 7, 8), (3, 2, 4, 7, 8)),
        {"attn_mask": _mask(2, 1, 5, 7)},
    ),
    "five axes, mask over the first": (
        ((3, 2, 4, 5, 8), (3, 2, 4, 7, 8), (3, 2, 4, 7, 8)),
        {"attn_mask": _mask(3, 1, 1, 5, 7)},
    ),
    "batch of one query": (((1, 4, 5, 8), (3, 4, 7, 8), (3, 4, 7, 8)), {}),
    "fewer axes of keys": (((2, 4, 5, 8), (4, 7, 8), (4, 7, 8)), {}),
    "bool mask": (
        ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
        {"attn_mask": _mask(2, 1, 5, 7)},
    ),
    "float mask": (
        ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
        {"attn_mask": tensors((4, 5, 7), seed=3)[0]},
    ),
    "float mask with -inf": (
        ((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8)),
        {"attn_mask": torch.zeros(5, 7, dtype=F64).masked_fill(~_mask(5, 7), -torch.inf)},
    ),
}


@pytest.mark.parametrize("name", SDPA_CALLS)
def test_sdpa_agrees_with_torch(name: str) -> None:
    shapes, options = SDPA_CALLS[name]
    q, k, v = tensors(*shapes)
    want = functional.scaled_dot_product_attention(q, k, v, **options)
    got = scaled_dot_product_attention(q, k, v, **options)
    assert got.shape == want.shape
    equal(got, want)


def test_sdpa_empty_rows_are_zero_as_in_torch() -> None:
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    mask = _mask(4, 6)
    mask[1] = False
    got = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    equal(got, functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    assert not got[:, :, 1].any()


@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
def test_sdpa_takes_torchs_causal_biases(variant: str) -> None:
    from torch.nn.attention import bias

    make = getattr(bias, variant)
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    dense = torch.ones(4, 6, dtype=torch.bool).tril(2 if variant == "causal_lower_right" else 0)
    want = functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    equal(scaled_dot_product_attention(q, k, v, attn_mask=make(4, 6)), want)
    with pytest.raises(ValueError, match="attn_mask"):
        scaled_dot_product_attention(q, k, v, attn_mask=make(4, 7))


def test_sdpa_gradients_agree_with_torch() -> None:
    q, k, v, bias = tensors((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), (4, 5, 7))
    grads = []
    for function in (scaled_dot_product_attention, functional.scaled_dot_product_attention):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        out = function(*leaves[:3], attn_mask=leaves[3], enable_gqa=True)
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    for a, b in zip(*grads, strict=True):
        equal(a, b)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dropout_p": 0.5}, portattn.Unsupported),
        ({"dropout_p": -0.5}, ValueError),
        ({"is_causal": True, "attn_mask": _mask(5, 7)}, ValueError),
        ({"attn_mask": torch.ones(5, 7, dtype=torch.int32)}, TypeError),
        ({"attn_mask": _mask(5, 8)}, ValueError),
        ({"attn_mask": _mask(2, 2, 4, 5, 7)}, ValueError),
        ({"scale": float("nan")}, ValueError),
    ],
    ids=lambda x: str(x)[:40],
)
def test_sdpa_refusals(options: dict[str, Any], error: type[Exception]) -> None:
    q, k, v = tensors((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8))
    with pytest.raises(error):
        scaled_dot_product_attention(q, k, v, **options)


def test_sdpa_wants_enable_gqa_for_groups() -> None:
    q, k, v = tensors((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    with pytest.raises(ValueError, match="enable_gqa"):
        scaled_dot_product_attention(q, k, v)


def test_sdpa_has_torchs_signature() -> None:
    names = list(inspect.signature(scaled_dot_product_attention).parameters)
    assert names == [
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
        "backend",
    ]


# ---- flash-attention -----------------------------------------------------------------------------
FLASH_OPTIONS = [
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "alibi_slopes",
    "deterministic",
    "return_attn_probs",
]


def test_flash_attn_has_flash_attentions_signatures() -> None:
    varlen = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    cache = "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx "
    cache += "cache_leftpad block_table softmax_scale causal window_size softcap "
    cache += "rotary_interleaved alibi_slopes num_splits return_softmax_lse"
    for function, names in (
        (flash_attn_func, ["q", "k", "v", *FLASH_OPTIONS]),
        (flash_attn_varlen_func, ["q", "k", "v", *varlen, *FLASH_OPTIONS, "block_table"]),
        (flash_attn_with_kvcache, cache.split()),
    ):
        assert list(inspect.signature(function).parameters) == [*names, "backend"]


@pytest.mark.parametrize(
    ("lengths", "visible"),
    [
        ((2, 5), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        ((5, 2), [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]),
    ],
)
def test_flash_causal_is_the_documented_picture(
    lengths: tuple[int, int], visible: list[list[int]]
) -> None:
    sq, sk = lengths
    q, k = torch.zeros(1, sq, 1, 4), torch.zeros(1, sk, 1, 4)
    v = torch.eye(sk)[None, :, None]
    out, lse, pattern = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    want = torch.tensor(visible, dtype=torch.float32)
    count = want.sum(1, keepdim=True)
    equal(out[0, :, 0], want / count.clamp(min=1), 1e-6)
    equal(lse[0, 0], count[:, 0].log(), 1e-6)
    assert pattern is None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (0, 1), (-1, 1), (3, -1)])
def test_flash_window_is_inclusive_and_bottom_right(causal: bool, window: tuple[int, int]) -> None:
    sq, sk = 4, 7
    q, k = torch.zeros(1, sq, 2, 4), torch.zeros(1, sk, 1, 4)
    v = torch.eye(sk)[None, :, None]
    out = flash_attn_func(q, k, v, causal=causal, window_size=window)
    i, j = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)[None]
    left, right = (sk if side == -1 else side for side in window)
    visible = (j >= i - left) & (j <= i + right) & ((j <= i) | (not causal))
    equal(out[0, :, 1] > 0, visible)


def test_flash_softcap_alibi_and_scale_are_the_contracts() -> None:
    q, k, v = tensors((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    slopes = torch.tensor([[0.5, 1, 2, 4], [0.1, 0.2, 0.3, 0.4]])
    got = flash_attn_func(q, k, v, softmax_scale=0.4, softcap=2.0, alibi_slopes=slopes, causal=True)
    i, j = torch.arange(5)[:, None], torch.arange(7)[None]
    bias = (-slopes[..., None, None] * (i + 2 - j).abs()).float()
    want = portattn.attention(q, k, v, scale=0.4, softcap=2.0, bias=bias, causal="bottom_right")
    equal(got, want, 1e-6)


def test_flash_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in tensors((1, 5, 4, 8), (1, 7, 2, 8), (1, 7, 2, 8)))
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2)
    want = functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    )
    got = flash_attn_func(q, k, v, causal=True)
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), (q, k, v)),
        torch.autograd.grad(want.square().sum(), (q, k, v)),
        strict=True,
    ):
        equal(a, b)


@pytest.mark.parametrize("paged", [False, True])
def test_flash_varlen_is_each_sequence_by_itself(paged: bool) -> None:
    cu_q, cu_k = [0, 4, 4, 9], [0, 6, 9, 14]
    q, k, v = tensors((9, 4, 8), (14, 2, 8), (14, 2, 8))
    tables: dict[str, Any] = {}
    given = (k, v)
    if paged:  # blocks of 4, in an order of their own; block 0 is poison
        pages = torch.full((2, 7, 4, 2, 8), torch.nan, dtype=F64)
        table = torch.tensor([[3, 1], [6, -1], [2, 5]], dtype=torch.int32)
        for b in range(3):
            for n in range(cu_k[b + 1] - cu_k[b]):
                for page, x in zip(pages, given, strict=True):
                    page[table[b, n // 4], n % 4] = x[cu_k[b] + n]
        given, tables = (pages[0], pages[1]), {"block_table": table}
    got, lse, _ = flash_attn_varlen_func(
        q, *given, i32(*cu_q), i32(*cu_k), 5, 6, causal=True, return_attn_probs=True, **tables
    )
    for b in (0, 2):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        want, want_lse, _ = flash_attn_func(
            q[None, rows], k[None, keys], v[None, keys], causal=True, return_attn_probs=True
        )
        equal(got[rows], want[0])
        equal(lse[:, rows], want_lse[0])


def test_flash_varlen_refuses_lengths_beyond_the_stated_maximum() -> None:
    q, k, v = tensors((9, 4, 8), (9, 2, 8), (9, 2, 8))
    with pytest.raises(ValueError, match="max_seqlen_k"):
        flash_attn_varlen_func(q, k, v, i32(0, 9), i32(0, 9), 9, 8)


def _cached(paged: bool, batch: int, capacity: int) -> tuple[Any, Any, dict[str, Any]]:
    """A cache of NaN and a way to write it: what is not in use must never be seen."""
    if not paged:
        cache = torch.full((2, batch, capacity, 2, 8), torch.nan, dtype=F64)
        return cache[0], cache[1], {}
    blocks = -(-capacity // 4)
    cache = torch.full((2, batch * blocks, 4, 2, 8), torch.nan, dtype=F64)
    table = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(4))
    return cache[0], cache[1], {"block_table": table.reshape(batch, blocks).to(torch.int32)}


@pytest.mark.parametrize("paged", [False, True])
def test_flash_kvcache_appends_in_place_and_attends(paged: bool) -> None:
    k, v = tensors((3, 9, 2, 8), (3, 9, 2, 8), seed=1)
    k_cache, v_cache, table = _cached(paged, 3, 12)
    before = i32(0, 2, 5)
    for b, n in enumerate(before.tolist()):  # what lies in the cache already
        if n:
            flash_attn_with_kvcache(
                torch.zeros(1, 1, 2, 8, dtype=F64),
                k_cache if paged else k_cache[b : b + 1],
                v_cache if paged else v_cache[b : b + 1],
                k=k[b : b + 1, :n],
                v=v[b : b + 1, :n],
                cache_seqlens=0,
                **{name: x[b : b + 1] for name, x in table.items()},
            )
    (q,) = tensors((3, 4, 4, 8), seed=2)
    new = [torch.stack([x[b, n : n + 4] for b, n in enumerate(before.tolist())]) for x in (k, v)]
    got, lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        *new,
        cache_seqlens=before,
        causal=True,
        return_softmax_lse=True,
        **table,
    )
    for b, n in enumerate(before.tolist()):
        want, want_lse, _ = flash_attn_func(
            q[b : b + 1],
            k[b : b + 1, : n + 4],
            v[b : b + 1, : n + 4],
            causal=True,
            return_attn_probs=True,
        )
        equal(got[b], want[0])
        equal(lse[b], want_lse[0])
    assert int((~k_cache.isnan()).sum()) == int((before + 4).sum()) * 2 * 8


def test_flash_kvcache_batch_index_and_left_padding() -> None:
    q, k_cache, v_cache = tensors((2, 1, 4, 8), (5, 7, 2, 8), (5, 7, 2, 8))
    rows, used, pad = torch.tensor([4, 1]), i32(6, 3), i32(2, 0)
    got = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=used,
        cache_batch_idx=rows,
        cache_leftpad=pad,
        causal=True,
        window_size=(3, 0),
    )
    for b in range(2):
        keys = (slice(int(rows[b]), int(rows[b]) + 1), slice(int(pad[b]), int(used[b])))
        want = flash_attn_func(q[b : b + 1], k_cache[keys], v_cache[keys], window_size=(3, 0))
        equal(got[b], want[0])


def test_flash_kvcache_whole_cache_and_one_length_for_all() -> None:
    q, k, v = tensors((2, 3, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    equal(flash_attn_with_kvcache(q, k, v), flash_attn_func(q, k, v))
    got = flash_attn_with_kvcache(q, k, v, cache_seqlens=5, causal=True, num_splits=3)
    equal(got, flash_attn_func(q, k[:, :5], v[:, :5], causal=True))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dropout_p": 0.1}, portattn.Unsupported),
        ({"dropout_p": 2.0}, ValueError),
        ({"window_size": (-2, 0)}, ValueError),
        ({"window_size": (1.5, 0)}, TypeError),
        ({"softcap": -1.0}, ValueError),
        ({"alibi_slopes": torch.ones(4, dtype=F64)}, TypeError),
    ],
    ids=lambda x: str(x)[:40],
)
def test_flash_refusals(options: dict[str, Any], error: type[Exception]) -> None:
    q, k, v = tensors((2, 5, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8))
    with pytest.raises(error):
        flash_attn_func(q, k, v, **options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rotary_cos": torch.ones(9, 4)}, portattn.Unsupported),
        ({"k": torch.ones(2, 1, 2, 8, dtype=F64), "cache_seqlens": 1}, ValueError),
        ({"k": torch.ones(2, 1, 2, 8), "v": torch.ones(2, 1, 2, 8)}, ValueError),
        (
            {
                "k": torch.ones(2, 3, 2, 8, dtype=F64),
                "v": torch.ones(2, 3, 2, 8, dtype=F64),
                "cache_seqlens": 5,
            },
            ValueError,
        ),
        ({"cache_seqlens": 8}, ValueError),
        ({"num_splits": -1}, ValueError),
        ({"cache_batch_idx": torch.tensor([0, 1]), "block_table": i32(0, 1)[:, None]}, ValueError),
        (
            {"cache_leftpad": torch.tensor([0, 1]), "block_table": i32(0, 1)[:, None]},
            portattn.Unsupported,
        ),
    ],
    ids=lambda x: str(x)[:30],
)
def test_flash_kvcache_refusals(options: dict[str, Any], error: type[Exception]) -> None:
    q, k_cache, v_cache = tensors((2, 1, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    with pytest.raises(error):
        flash_attn_with_kvcache(q, k_cache, v_cache, **options)
    equal(k_cache, tensors((2, 1, 4, 8), (2, 7, 2, 8))[1])
    with pytest.raises(portattn.Unsupported, match="no_grad"):
        flash_attn_with_kvcache(q.requires_grad_(), k_cache, v_cache)
