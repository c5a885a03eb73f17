"""Where a prefill begins: cases by hand, then the laws over everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.events import RankInfo
from millpond.core.ids import DpRank
from millpond.core.request import StateRestore
from millpond.core.units import BLOCK_TOKENS
from millpond.policies.resume import COLD, MAX_REBUILD_REPLAYS, Resumption, resume

EXACT, REPLAY = StateRestore.EXACT, StateRestore.REPLAY


def rank(*, has_state=False, replay_tokens=0, min_computed_tokens=1):
    return RankInfo(
        DpRank(0),
        "",
        num_blocks=99,
        num_slots=9,
        min_computed_tokens=min_computed_tokens,
        can_load=True,
        has_state=has_state,
        replay_tokens=replay_tokens,
    )


PLAIN = rank()
WINDOWED = rank(has_state=True, replay_tokens=128)


@pytest.mark.parametrize(
    ("hit", "known", "begin"), [(0, 1, 0), (512, 513, 512), (512, 512, 384), (128, 128, 0), (512, 9000, 512)]
)
def test_a_model_without_state_begins_after_the_hit(hit, known, begin):
    for policy in StateRestore:
        assert resume(hit, -1, known, PLAIN, policy) == Resumption(begin)


@pytest.mark.parametrize(("known", "begin"), [(652, 512), (651, 384), (200, 0), (100, 0)])
def test_the_last_tokens_that_a_rank_must_compute_are_computed(known, begin):
    assert resume(512, -1, known, rank(min_computed_tokens=140), REPLAY).begin == begin


@pytest.mark.parametrize("policy", list(StateRestore))
def test_a_snapshot_at_the_end_of_the_hit_is_all_it_needs(policy):
    assert resume(1024, 1024, 1100, WINDOWED, policy) == Resumption(1024, restores_state=True)


@pytest.mark.parametrize(
    ("position", "policy", "expected"),
    [
        (512, REPLAY, Resumption(512, restores_state=True)),
        (384, REPLAY, Resumption(896, write_begin=1024)),
        (384, EXACT, Resumption(384, restores_state=True)),
        (0, EXACT, COLD),
        (-1, EXACT, COLD),
        (-1, REPLAY, Resumption(896, write_begin=1024)),
    ],
)
def test_far_before_the_end_of_the_hit_the_policy_decides(position, policy, expected):
    assert resume(1024, position, 1100, WINDOWED, policy) == expected


@pytest.mark.parametrize(("hit", "expected"), [(128, COLD), (256, Resumption(128, write_begin=256))])
def test_a_replay_that_would_begin_at_the_first_token_is_a_cold_run(hit, expected):
    assert resume(hit, -1, 300, WINDOWED, REPLAY) == expected


def test_a_rank_that_must_compute_more_replays_more():
    info = rank(has_state=True, replay_tokens=128, min_computed_tokens=400)
    assert resume(512, -1, 600, info, REPLAY) == Resumption(200, write_begin=512)
    assert resume(512, 512, 600, info, REPLAY) == Resumption(200, write_begin=512)
    assert resume(512, 512, 600, info, EXACT) == COLD


def test_a_model_with_state_that_cannot_replay_begins_cold():
    assert resume(512, -1, 600, rank(has_state=True), REPLAY) == COLD


@given(
    hit=st.integers(0, 20),
    state=st.integers(-1, 20),
    known=st.integers(1, 3000),
    has_state=st.booleans(),
    replay=st.sampled_from([0, 128, 256]),
    min_computed=st.integers(1, 700),
    policy=st.sampled_from(list(StateRestore)),
)
def test_laws(hit, state, known, has_state, replay, min_computed, policy):
    hit, state = hit * BLOCK_TOKENS, min(state, hit) * BLOCK_TOKENS
    info = rank(has_state=has_state, replay_tokens=replay, min_computed_tokens=min_computed)
    found = resume(hit, state, known, info, policy)
    assert found.num_loaded_tokens % BLOCK_TOKENS == 0
    assert 0 <= found.num_loaded_tokens <= min(hit, known - 1)
    assert found == COLD or found.begin + min_computed <= known
    if found.restores_state:
        assert has_state
        assert found == Resumption(state, restores_state=True)
        usable = min(hit, (known - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        assert policy is EXACT or usable - state <= replay * MAX_REBUILD_REPLAYS
    elif found.is_approximate:
        assert policy is REPLAY
        assert has_state
        assert 0 < found.begin <= found.write_begin - replay
    elif has_state:
        assert found == COLD
    if not has_state:
        assert found.begin == max(0, min(hit, (known - min_computed) // BLOCK_TOKENS * BLOCK_TOKENS))
