"""transformers with ``attn_implementation="portattn"`` computes what sdpa or eager compute.

The models are small and random, in float64 where the peer computes in float64, so that a mask that
is wrong at one place shows. Rows of padding have no meaning and are left out.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import portattn  # noqa: E402
import portattn.compat.transformers as face  # noqa: E402

face.register()

# what a model's forward calls its KV cache, by version of transformers
CACHE = (
    "cache"
    if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters
    else "past_key_values"
)

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def decoder(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**SMALL)
    elif kind == "mistral":  # every layer has a window
        config = transformers.MistralConfig(**SMALL, sliding_window=5)
    elif kind == "gemma2":  # soft cap; every other layer has a window
        config = transformers.Gemma2Config(**SMALL, sliding_window=5, attn_logit_softcapping=3.0)
    elif kind == "gpt_oss":  # attention sinks; every other layer has a window
        config = transformers.GptOssConfig(
            **SMALL, sliding_window=5, num_local_experts=2, num_experts_per_tok=1
        )
    else:  # one chunk of 6 after another, every other layer
        config = transformers.Llama4TextConfig(
            **SMALL,
            intermediate_size_mlp=48,
            attention_chunk_size=6,
            num_local_experts=2,
            layer_types=["chunked_attention", "full_attention"],
        )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


# sdpa refuses a soft cap and sinks; eager computes its softmax in float32
PEERS = {
    "llama": "sdpa",
    "mistral": "sdpa",
    "llama4": "sdpa",
    "gemma2": "eager",
    "gpt_oss": "eager",
}
KINDS = tuple(PEERS)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    made = decoder(request.param)
    made.peer = PEERS[request.param]
    return made.double() if made.peer == "sdpa" else made


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The mask argument of every call of `portattn.attention`."""
    seen: list[Any] = []

    def spy(*args: Any, mask: Any = None, **options: Any) -> Any:
        seen.append(None if mask is None else tuple(mask.shape))
        return portattn.attention(*args, mask=mask, **options)

    monkeypatch.setattr(face, "attention", spy)
    return seen


def tokens(batch: int, length: int, pad: tuple[int, ...] = (), side: str = "left") -> Any:
    """Token ids and their 2-D mask; ``pad[b]`` of row b are padding."""
    ids = torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for b, n in enumerate(pad):
        if n:
            where = slice(0, n) if side == "left" else slice(length - n, length)
            ids[b, where], mask[b, where] = 0, 0
    return ids, mask


def run(model: Any, implementation: str, steps: Any) -> list[Any]:
    """Logits of every call in ``steps(model)`` under an implementation."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return [out.logits for out in steps(model)]


def agree(model: Any, steps: Any, visible: Any = None) -> None:
    atol = 1e-10 if model.peer == "sdpa" else 2e-5
    got, want = run(model, "portattn", steps), run(model, model.peer, steps)
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        seen = torch.ones(a.shape[:2], dtype=torch.bool) if visible is None else visible[n]
        torch.testing.assert_close(a[seen], b[seen], rtol=0, atol=atol)


def test_prefill(model: Any) -> None:
    ids, _ = tokens(2, 11)
    agree(model, lambda m: [m(ids)])


@pytest.mark.parametrize("side", ["left", "right"])
def test_prefill_with_padding(model: Any, side: str) -> None:
    ids, mask = tokens(3, 11, (4, 0, 7), side)
    agree(model, lambda m: [m(ids, attention_mask=mask)], [mask.bool()])


def cached(ids: Any, mask: Any, pieces: tuple[int, ...], make_cache: Any) -> Any:
    """Feeds ``ids`` in pieces through a cache, as generate() does with positions of real tokens."""

    def steps(model: Any) -> Any:
        cache, start = make_cache(model), 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        for n in pieces:
            rows = slice(start, start + n)
            yield model(
                ids[:, rows],
                attention_mask=mask[:, : start + n],
                position_ids=positions[:, rows],
                use_cache=True,
                **{CACHE: cache},
            )
            start += n

    return steps


def split(mask: Any, pieces: tuple[int, ...]) -> list[Any]:
    return list(mask.bool().split(list(pieces), dim=1))


def dynamic(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config)


def static(model: Any) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=20)


@pytest.mark.parametrize("cache", [dynamic, static])
@pytest.mark.parametrize("pad", [(), (3, 0)], ids=str)
@pytest.mark.parametrize("pieces", [(9, 1, 1, 1), (4, 5, 1, 2), (1, 1, 8)], ids=str)
def test_cache_in_pieces(model: Any, cache: Any, pad: tuple[int, ...], pieces: Any) -> None:
    ids, mask = tokens(2, sum(pieces), pad)
    agree(model, cached(ids, mask, pieces, cache), split(mask, pieces))


@pytest.mark.parametrize("static_cache", [False, True])
def test_generate(model: Any, static_cache: bool) -> None:
    ids, mask = tokens(3, 7, (3, 0, 5))
    results = []
    for implementation in ("portattn", model.peer):
        model.set_attn_implementation(implementation)
        results.append(
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=12,
                do_sample=False,
                disable_compile=True,
                cache_implementation="static" if static_cache else None,
            )
        )
    assert torch.equal(*results)


# ---- what crosses the mask interface -------------------------------------------------------------
@pytest.fixture(scope="module")
def llama() -> Any:
    made = decoder("llama").double()
    made.peer = "sdpa"
    return made


def test_no_mask_tensor_without_padding(llama: Any, masks: list[Any]) -> None:
    ids, mask = tokens(2, 12)
    run(llama, "portattn", lambda m: [m(ids), m(ids, attention_mask=mask)])
    run(llama, "portattn", cached(ids, mask, (6, 4, 1, 1), dynamic))
    assert masks == [None] * 12  # 6 calls of 2 layers


@pytest.mark.parametrize("cache", [dynamic, static])
def test_padding_and_static_caches_cost_linear_masks(
    llama: Any, masks: list[Any], cache: Any
) -> None:
    ids, mask = tokens(2, 12, (3, 0))
    run(llama, "portattn", cached(ids, mask, (6, 4, 1, 1), cache))
    model = llama.model
    # transformers wants one shape for each decoded token of a static cache: all of it
    decoded = (11, 12) if cache is dynamic else (20, 20)
    assert masks == [(2, 1, 1, keys) for keys in (6, 10, *decoded) for _ in model.layers]


def test_keys_not_yet_written_are_never_read(llama: Any) -> None:
    ids, _ = tokens(2, 8)

    def poisoned(model: Any) -> Any:
        cache = static(model)
        with torch.no_grad():
            model(ids, use_cache=True, **{CACHE: cache})
        for layer in cache.layers:
            layer.keys[:, :, 8:], layer.values[:, :, 8:] = torch.nan, torch.nan
        return cache

    def steps(model: Any) -> Any:
        cache = poisoned(model)
        yield model(ids[:, :3], attention_mask=torch.ones(2, 11), **{CACHE: cache})

    (logits,) = run(llama, "portattn", steps)
    assert torch.isfinite(logits).all()


def test_compiled_decoding_with_a_static_cache(llama: Any) -> None:
    ids, mask = tokens(2, 9, (3, 0))
    torch._dynamo.reset()

    def steps(model: Any, forward: Any) -> Any:
        prefix = cached(ids, mask, (7,), lambda m: caches.append(static(m)) or caches[-1])
        caches: list[Any] = []
        yield from prefix(model)
        for n in (7, 8):
            yield forward(
                ids[:, n : n + 1],
                attention_mask=mask[:, : n + 1],
                position_ids=(mask.cumsum(1) - 1)[:, n : n + 1],
                use_cache=True,
                **{CACHE: caches[0]},
            )

    llama.set_attn_implementation("portattn")
    compiled = torch.compile(llama.forward, fullgraph=True, backend="aot_eager", dynamic=False)
    got = run(llama, "portattn", lambda m: steps(m, compiled))
    want = run(llama, "sdpa", lambda m: steps(m, m))
    torch._dynamo.reset()
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_encoder_with_padding_attends_both_ways(masks: list[Any]) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = transformers.BertModel(config).eval().double()
    for pad in ((), (4, 0, 7)):
        ids, mask = tokens(3, 11, pad, "right")
        states = []
        for implementation in ("portattn", "sdpa"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                states.append(model(ids, attention_mask=mask).last_hidden_state[mask.bool()])
        torch.testing.assert_close(*states, rtol=0, atol=1e-10)
    assert masks == [None, None, (3, 1, 11, 11), (3, 1, 11, 11)]


def test_encoder_decoder_with_a_padded_source() -> None:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
    )
    model = transformers.BartModel(config).eval().double()
    ids, mask = tokens(2, 9, (4, 0), "right")
    target, _ = tokens(2, 12)
    states = []
    for implementation in ("portattn", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            states.append(model(ids, attention_mask=mask, decoder_input_ids=target)[0])
    torch.testing.assert_close(*states, rtol=0, atol=1e-10)


def test_packed_sequences_are_apart(llama: Any) -> None:
    ids, _ = tokens(1, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    agree(llama, lambda m: [m(ids, position_ids=positions)])
    apart = run(llama, "sdpa", lambda m: [m(ids[:, :5]), m(ids[:, 5:])])
    cu = torch.tensor([0, 5, 12])
    (together,) = run(
        llama,
        "portattn",
        lambda m: [
            m(
                ids,
                attention_mask=torch.ones_like(ids),
                position_ids=positions,
                cu_seq_lens_q=cu,
                cu_seq_lens_k=cu,
            )
        ],
    )
    torch.testing.assert_close(together, torch.cat(apart, 1), rtol=0, atol=1e-10)


def test_a_float_mask_of_the_callers_own_is_added(llama: Any) -> None:
    ids, _ = tokens(2, 6)
    mask = torch.zeros(2, 1, 6, 6, dtype=torch.float64)
    mask = mask.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    mask[:, :, 4, 1] = -2.5
    agree(llama, lambda m: [m(ids, attention_mask=mask)])


def test_training_gradients_agree(llama: Any) -> None:
    ids, mask = tokens(2, 8, (3, 0))
    labels = ids.masked_fill(mask == 0, -100)
    grads = []
    for implementation in ("portattn", "sdpa"):
        llama.set_attn_implementation(implementation)
        llama.zero_grad()
        llama(ids, attention_mask=mask, labels=labels).loss.backward()
        grads.append([p.grad.clone() for p in llama.parameters()])
    llama.zero_grad()
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


# ---- the attention by itself ---------------------------------------------------------------------
def heads(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))


def test_result_is_contiguous_in_the_interfaces_layout() -> None:
    q, k = heads(2, 4, 5, 8), heads(2, 2, 7, 8)
    out, weights = face.attention_forward(torch.nn.Module(), q, k, k, None)
    assert out.shape == (2, 5, 4, 8)
    assert out.is_contiguous()
    assert weights is None


def test_sliding_window_counts_the_querys_own_token() -> None:
    q, k = heads(1, 1, 6, 8), heads(1, 1, 6, 8)
    out, _ = face.attention_forward(torch.nn.Module(), q, k, k, None, sliding_window=1)
    torch.testing.assert_close(out.transpose(1, 2), k)
    both, _ = face.attention_forward(
        torch.nn.Module(), q, k, k, None, sliding_window=2, is_causal=False
    )
    band = (torch.arange(6)[:, None] - torch.arange(6)).abs() <= 1
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=band)
    torch.testing.assert_close(both.transpose(1, 2), want)


def test_position_bias_joins_any_mask() -> None:
    q, k, bias = heads(2, 4, 5, 8), heads(2, 4, 5, 8), heads(1, 4, 5, 5)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    pad = torch.tensor([[False, True, True, True, True], [True] * 5])
    full = (causal & pad[:, None])[:, None]
    want = torch.where(full, bias, -torch.inf)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=want)
    for mask in (pad, full, torch.where(full, 0.0, -torch.inf).double()):
        out, _ = face.attention_forward(torch.nn.Module(), q, k, k, mask, position_bias=bias)
        torch.testing.assert_close(out.transpose(1, 2)[:, :, 1:], want[:, :, 1:])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dropout": 0.1}, portattn.Unsupported),
        ({"output_attentions": True}, portattn.Unsupported),
        ({"indices": torch.zeros(1)}, portattn.Unsupported),
        ({"block_table": torch.zeros(1)}, portattn.Unsupported),
        ({"attention_mask": torch.ones(2, 5, dtype=torch.int64)}, TypeError),
        ({"attention_mask": torch.ones(2, 1, 5, 5, dtype=torch.int64)}, TypeError),
        ({"attention_mask": torch.ones(2, 1, 5, 6, dtype=torch.bool)}, ValueError),
    ],
    ids=lambda x: str(x)[:40],
)
def test_refusals(options: dict[str, Any], error: type[Exception]) -> None:
    q = heads(2, 4, 5, 8)
    with pytest.raises(error):
        face.attention_forward(torch.nn.Module(), q, q, q, **{"attention_mask": None, **options})


def test_more_causal_queries_than_keys_are_refused() -> None:
    with pytest.raises(portattn.Unsupported, match="cross-attention"):
        face.attention_forward(
            torch.nn.Module(), heads(1, 2, 6, 8), heads(1, 2, 4, 8), heads(1, 2, 4, 8), None
        )


def test_dropout_in_training_is_refused_through_a_model() -> None:
    config = transformers.LlamaConfig(**SMALL, attention_dropout=0.1)
    model = transformers.LlamaForCausalLM(config)
    model.set_attn_implementation("portattn")
    with pytest.raises(portattn.Unsupported, match="dropout"):
        model.train()(tokens(1, 4)[0])
