"""The IO model against the arithmetic of the literature and against sums done the long way."""

import pytest

from portattn import traffic

KIB, GIB, TIB = 2**10, 2**30, 2**40


def test_long_context_scores_cannot_be_stored():
    # 262,144 tokens in bfloat16: 128 GiB a head, 3 TiB a layer of 24 heads, 48 TiB for 16 layers.
    head = traffic.score_matrix(2**18, 2**18, 2)
    assert head == 128 * GIB
    assert 24 * head == 3 * TIB
    assert 16 * 24 * head == 48 * TIB


def test_key_tile_at_head_dim_256():
    assert traffic.tile(128, 256, 2) == 64 * KIB
    assert traffic.tile(128, 256, 2) == 2 * traffic.tile(128, 128, 2)


def test_standard_attention_moves_four_score_matrices():
    # S = 8192 in float16: 134 MB a score matrix, about 537 MB a head for the four trips.
    scores = traffic.score_matrix(8192, 8192, 2)
    assert round(scores / 1e6) == 134
    moved = traffic.standard(8192, 8192, 64, 64)
    assert round(4 * scores / 1e6) == 537
    assert moved.total - 4 * scores == 4 * traffic.tile(8192, 64)


def test_tiled_attention_is_linear_in_memory_and_far_below_standard():
    for n in (1024, 8192, 65536):
        tiled = traffic.flash_v2(n, n, 128, 128, block_q=128)
        assert tiled.stored == traffic.tile(n, 128) + 4 * n
        assert tiled.total < traffic.standard(n, n, 128, 128).total
    # Wider query tiles re-read the keys less often.
    narrow = traffic.flash_v2(8192, 8192, 128, 128, block_q=64)
    wide = traffic.flash_v2(8192, 8192, 128, 128, block_q=128)
    assert narrow.loaded > wide.loaded


def test_v2_stores_less_than_v1():
    v1 = traffic.flash_v1(4096, 4096, 128, 128, block_k=128)
    v2 = traffic.flash_v2(4096, 4096, 128, 128, block_q=128)
    assert v1.stored == 32 * v2.stored + 32 * 4 * 4096  # v1 keeps m and l, v2 one LSE
    assert v1.loaded > v2.loaded


@pytest.mark.parametrize("seq_q, seq_k", [(5, 5), (3, 7), (7, 3), (1, 9), (0, 4), (4, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_pairs(seq_q, seq_k, causal):
    counted = sum(
        1 for i in range(seq_q) for j in range(seq_k) if not causal or j <= i + seq_k - seq_q
    )
    assert traffic.visible_pairs(seq_q, seq_k, causal) == counted


def test_causal_reads_about_half():
    full = traffic.flash_v2(16384, 16384, 128, 128, block_q=128, block_k=128)
    half = traffic.flash_v2(16384, 16384, 128, 128, block_q=128, block_k=128, causal=True)
    assert 0.5 <= half.loaded / full.loaded <= 0.52


def test_decode_reads_each_key_once_for_all_its_query_heads():
    assert traffic.decode(131_072, 128, 128, heads_k=8) == 2 * 131_072 * 8 * 128 * 2


def test_intensity_of_standard_attention_is_low():
    moved = traffic.standard(4096, 4096, 64, 64)
    assert traffic.arithmetic_intensity(4096, 64, moved) < 100
    tiled = traffic.flash_v2(4096, 4096, 64, 64, block_q=128)
    assert traffic.arithmetic_intensity(4096, 64, tiled) > 100
