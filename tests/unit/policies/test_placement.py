"""Which rank prefills and which decodes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from millpond.core.units import BLOCK_TOKENS, num_blocks_for
from millpond.core.views import RankView
from millpond.policies.decode_place import DecodePlaceParams, can_take, pick_decode_rank, tokens_of
from millpond.policies.prefill_pull import pick_prefill_rank

PARAMS = DecodePlaceParams()


def view(rank=0, **fields):
    empty = RankView(
        rank, num_seqs=0, num_queued=0, queued_tokens=0, kv_tokens=0, free_blocks=64, free_slots=8
    )
    return replace(empty, **fields)


def test_prefill_goes_to_the_least_outstanding_work_then_the_lower_rank():
    assert pick_prefill_rank([view(0, queued_tokens=9), view(1, queued_tokens=3)]) == 1
    assert pick_prefill_rank([view(1), view(0)]) == 0
    assert pick_prefill_rank([view(0, num_queued=1), view(1)]) == 1


def test_under_the_line_the_fewest_sequences_win():
    ranks = [view(0, kv_tokens=1000, num_seqs=1), view(1, kv_tokens=990, num_seqs=5), view(2, kv_tokens=1030)]
    assert pick_decode_rank(ranks, 1, PARAMS) == 2


def test_over_the_line_the_fewest_tokens_win():
    ranks = [view(0, kv_tokens=3000, num_seqs=1), view(1, kv_tokens=1000, num_seqs=5)]
    assert pick_decode_rank(ranks, 10, PARAMS) == 1
    assert pick_decode_rank(ranks, 10_000 * BLOCK_TOKENS, PARAMS) is None
    assert pick_decode_rank([view(0, kv_tokens=500), view(1, kv_tokens=400)], 700, PARAMS) == 1


def test_a_rank_without_memory_is_never_picked():
    full = view(0, free_blocks=1)
    no_slot = view(1, free_slots=0)
    promised = view(2, free_blocks=10, num_queued=3, queued_kv_tokens=3 * BLOCK_TOKENS)
    assert pick_decode_rank([full, no_slot, promised], 5 * BLOCK_TOKENS, PARAMS) is None
    assert not can_take(view(free_slots=2, num_queued=2), 1)


RANKS = st.lists(
    st.builds(
        RankView,
        rank=st.just(0),
        num_seqs=st.integers(0, 9),
        num_queued=st.integers(0, 3),
        queued_tokens=st.integers(0, 900),
        queued_kv_tokens=st.integers(0, 900),
        kv_tokens=st.integers(0, 5000),
        free_blocks=st.integers(0, 40),
        free_slots=st.integers(0, 9),
    ),
    min_size=1,
    max_size=6,
).map(lambda views: [replace(v, rank=i) for i, v in enumerate(views)])


@given(RANKS, st.integers(1, 5000), st.randoms())
def test_choice_fits_does_not_depend_on_order_and_is_under_the_line_if_any_is(ranks, need, random):
    choice = pick_decode_rank(ranks, need, PARAMS)
    shuffled = ranks[:]
    random.shuffle(shuffled)
    assert pick_decode_rank(shuffled, need, PARAMS) == choice
    fitting = [r for r in ranks if can_take(r, need)]
    if choice is None:
        assert fitting == []
        return
    chosen = ranks[choice]
    assert chosen in fitting
    assert chosen.free_blocks >= num_blocks_for(need)
    line = 1.05 * (sum(map(tokens_of, fitting)) + need) / len(fitting)
    if any(tokens_of(r) + need <= line for r in fitting):
        assert tokens_of(chosen) + need <= line


def test_bug_46_equal_ranks_are_filled_evenly():
    ranks = [view(i, free_blocks=4000, free_slots=600) for i in range(4)]
    for _ in range(500):
        choice = pick_decode_rank(ranks, 100, PARAMS)
        ranks[choice] = replace(
            ranks[choice],
            num_queued=ranks[choice].num_queued + 1,
            queued_kv_tokens=ranks[choice].queued_kv_tokens + 100,
        )
    assert [r.num_queued for r in ranks] == [125] * 4
