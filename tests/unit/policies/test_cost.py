"""The cost estimator: closed forms against plain sums, and the laws that schedulers rely on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.llama_shape import LlamaShape
from millpond.core.pairs import num_candidate_pairs, num_pairs
from millpond.core.shapes import KvFormat
from millpond.core.work import Mechanism, WorkKind
from millpond.engine.model.config import load_config
from millpond.policies.cost import Flops, TokenRange, draft_cost, llama_cost, v41_cost
from tests.golden.goldens import IN_REPO

TINY = load_config(IN_REPO / "tiny_a" / "config.json").shape
FLASH = load_config(IN_REPO / "v41_flash_config.json").shape
LLAMA = LlamaShape(
    vocab_size=160, hidden_size=64, mlp_width=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32
)
COSTS = {"tiny": v41_cost(TINY), "flash": v41_cost(FLASH), "llama": llama_cost(LLAMA)}
BACKBONES = st.sampled_from(["tiny", "flash", "llama"])
positions = st.integers(0, 300)


@given(st.integers(-3, 200), st.integers(1, 3), st.none() | st.integers(0, 40))
def test_pairs_are_the_plain_sum(num_tokens, ratio, cap):
    seen = [t // ratio for t in range(1, num_tokens + 1)]
    assert num_pairs(num_tokens, ratio, cap) == sum(seen if cap is None else [min(s, cap) for s in seen])


@given(st.integers(-3, 200), st.integers(1, 6), st.integers(1, 9))
def test_candidate_pairs_are_the_plain_sum(num_tokens, num_blocks, size):
    total = 0
    for entries in range(1, num_tokens + 1):
        blocks = [min(size, entries - begin) for begin in range(0, entries, size)]
        total += sum(blocks[:-1][: num_blocks - 1]) + blocks[-1]  # the newest is always kept
    assert num_candidate_pairs(num_tokens, num_blocks, size) == total


@given(st.lists(positions, min_size=2, max_size=6), positions, positions, BACKBONES)
def test_chunks_cost_what_the_whole_prompt_costs(edges, keep_begin, window_begin, name):
    edges, cost = sorted(edges), COSTS[name]
    window_begin = min(window_begin, edges[0])
    parts = [
        cost.flops(TokenRange(a, b, keep_begin=keep_begin, window_begin=window_begin))
        for a, b in pairwise(edges)
    ]
    whole = cost.flops(TokenRange(edges[0], edges[-1], keep_begin=keep_begin, window_begin=window_begin))
    assert whole == Flops(
        sum(p.linear for p in parts), sum(p.mixing for p in parts), sum(p.attention for p in parts)
    )


@given(positions, st.integers(0, 200), BACKBONES)
def test_cost_never_falls_when_chunk_or_context_grows(begin, length, name):
    cost = COSTS[name]
    at = cost.flops(TokenRange(begin, begin + length))
    longer = cost.flops(TokenRange(begin, begin + length + 1))
    later = cost.flops(TokenRange(begin + 1, begin + 1 + length))
    for kind in ("linear", "mixing", "attention"):
        assert getattr(longer, kind) >= getattr(at, kind)
    assert later.attention >= at.attention


@given(positions, st.integers(1, 200))
def test_attention_is_the_part_that_grows_with_the_context(begin, length):
    for cost in (COSTS["tiny"], COSTS["llama"]):
        tokens = TokenRange(begin, begin + length)
        assert cost.attention_flops(begin, begin + length) == cost.flops(tokens).attention
        assert sum(cost.by_mechanism(tokens).values()) == cost.flops(tokens).total


def test_the_kept_tail_saves_the_decoder_layers():
    """Half of the released model's layers run on 134 rows only."""
    whole = COSTS["flash"].flops(TokenRange(0, 8192, 1))
    kept = COSTS["flash"].flops(TokenRange(0, 8192, 1, keep_begin=8192 - 134))
    assert 0.5 < kept.total / whole.total < 0.55


def test_a_hit_leaves_the_entries_as_they_are():
    """Replay before a hit makes windows, not entries."""
    cost, compressor = COSTS["tiny"], Mechanism.COMPRESSOR
    replay = cost.by_mechanism(TokenRange(112, 200, window_begin=112, write_begin=128))
    cold = cost.by_mechanism(TokenRange(112, 200))
    assert replay[compressor] == cost.by_mechanism(TokenRange(128, 200))[compressor] < cold[compressor]
    assert replay[Mechanism.WINDOW] < cold[Mechanism.WINDOW]
    assert replay[Mechanism.PROJECTIONS] == cold[Mechanism.PROJECTIONS]


def test_figures_of_the_released_model():
    """From 4 K to 1 M tokens a decode row pays for more index scores and for nothing else."""
    cost = COSTS["flash"]
    short, long = (cost.flops(TokenRange(n - 1, n, 1)) for n in (1 << 12, 1 << 20))
    assert cost.weights_touched(1) == short.linear / 2
    encoder, candidate_source, reindexing = (
        3 * ((1 << 19) - (1 << 11)),
        (1 << 20) - (1 << 12),
        4 * (16_384 - 4_096),
    )
    num_scores = encoder + candidate_source + reindexing
    assert long.total - short.total == 2 * num_scores * 32 * (128 + 1)


def test_weights_touched_reach_all_experts_of_a_large_batch():
    cost, expert = COSTS["tiny"], 3 * TINY.hidden_size * TINY.moe_width
    dense = cost.weights_touched(1) - len(TINY.layers) * TINY.num_experts_per_token * expert
    assert cost.weights_touched(1000) == pytest.approx(dense + len(TINY.layers) * TINY.num_experts * expert)


def test_cached_bytes_that_one_row_reads():
    """By hand, for a row that sees full windows, 8 selected of 20 or 40 entries, and 24 candidates."""
    position = 39
    window = 12 * 16 * (64 + 2)
    selected = 10 * 8 * (32 + 4)
    keys = (2 * 20 + 40 + 2 * 24) * (16 + 1)
    read = COSTS["tiny"].kv_bytes_read(TokenRange(position, position + 1))
    assert read == window + selected + keys
    plain = v41_cost(TINY, KvFormat.FP32).kv_bytes_read(TokenRange(position, position + 1))
    assert plain == 12 * 16 * 256 + 10 * 8 * 256 + (2 * 20 + 40 + 2 * 24) * 128


def test_drafts_cost_nothing_where_there_are_none():
    without = replace(TINY, num_draft_stages=0, num_draft_tokens=0, draft_targets=())
    assert Mechanism.DRAFTS not in v41_cost(without).by_mechanism(TokenRange(0, 9, 9))
    assert draft_cost(without).flops(TokenRange(8, 9)) == Flops()


def test_llama_by_hand():
    """Two layers, 3 rows behind 4 cached tokens: 5 + 6 + 7 pairs."""
    flops = COSTS["llama"].flops(TokenRange(4, 7, 1))
    per_row = 64 * (128 + 128 + 128) + 3 * 64 * 96
    assert flops == Flops(linear=2 * (2 * 3 * per_row + 160 * 64), attention=2 * 2 * 18 * 2 * 128)
    assert {term.kind for term in COSTS["llama"].terms} == {WorkKind.LINEAR, WorkKind.ATTENTION}
