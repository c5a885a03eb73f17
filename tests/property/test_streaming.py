"""A prefill group with home blocks: what its blocks cannot hold is computed too, and all is given back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.control.group_scheduler import GroupParams, GroupRole
from millpond.control.invariants import require_sound
from millpond.control.prefill_scheduler import PrefillParams
from millpond.core.events import Aborted, Assigned, HandoffClosed, HandoffSent, Loaded
from millpond.core.request import FinishReason
from millpond.core.units import BLOCK_TOKENS, num_blocks_for
from tests.sim.making import D0, P0, Engines, make_assign, make_scheduler, make_spec

REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 1300),
        st.integers(0, 9),
        st.sampled_from([None, None, None, 1, 4, 9]),
        st.sampled_from([None, None, 0, 2]),
    ),
    min_size=1,
    max_size=8,
)
"""(prompt tokens, blocks of its hit, rounds until it is aborted, blocks in place when its load breaks)."""


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.integers(1, 4), st.sampled_from([0, 4, 7, 12]), st.integers(1, 4), st.integers(1, 4))
def test_every_prompt_that_some_memory_can_hold_is_computed_and_all_is_given_back(
    requests, num_blocks, num_home, num_rows, max_held
):
    params = GroupParams(prefill=PrefillParams(max_step_tokens=200, max_held_seqs=max_held))
    more = {"can_load": True, "num_home_blocks": num_home, "num_rows": num_rows}
    scheduler = make_scheduler(GroupRole.PREFILL, 1, num_blocks, 6, params, **more)
    engines = Engines(1, num_blocks=num_blocks, **more)
    for i, (num_prompt, num_hit, _, _) in enumerate(requests):
        spec = make_spec(f"r{i}", num_prompt, max_tokens=5, num_cached=num_hit * BLOCK_TOKENS)
        scheduler.advance(0, Assigned(make_assign(spec, P0, D0)))
    aborts = {f"r{i}": after for i, (_, _, after, _) in enumerate(requests) if after is not None}
    breaks = {f"r{i}": left for i, (_, _, _, left) in enumerate(requests) if left is not None}
    computed, refused, staging = set(), set(), {}
    for round_ in range(400):
        for name in [name for name, after in aborts.items() if after == round_]:
            scheduler.advance(0, Aborted(name, 0))
        require_sound([scheduler])
        plan = scheduler.next_plan(0)
        if plan is None:
            if not scheduler.held_requests() and round_ > 9:
                break
            continue
        engines.note(plan)
        swapped = {swap.request_id: len(swap.block_table) for swap in plan.swaps}
        starts = [start for rank in plan.ranks for start in rank.start]
        staging |= {start.request_id: len(start.staging) for start in starts}
        refused |= {end.request_id for end in plan.ended if end.reason is FinishReason.REFUSED}
        computed |= {finish.request_id for finish in plan.finishes}
        if plan.ranks:
            lost = {
                chunk.request_id: min(breaks.pop(chunk.request_id), swapped[chunk.request_id]) * BLOCK_TOKENS
                for chunk in plan.ranks[0].chunks
                if chunk.request_id in breaks and chunk.request_id in swapped
            }
            scheduler.advance(0, engines.run(plan, lost))
        for order in plan.loads:
            scheduler.advance(0, Loaded(order.request_id, 0, len(order.token_ids)))
        for finish in plan.finishes:
            scheduler.advance(0, HandoffSent(finish.request_id, 0))
        for close in plan.closes:
            scheduler.advance(0, HandoffClosed(close.request_id, 0))
    assert scheduler.held_requests() == ()
    assert engines.chains == {}
    [view] = scheduler.views()
    assert (view.free_blocks, view.free_slots, view.kv_tokens) == (num_blocks, 6, 0)
    longest = max(num_blocks, min(num_home, num_blocks * num_rows))
    for i, (num_prompt, _, after, _) in enumerate(requests):
        name, need = f"r{i}", num_blocks_for(num_prompt)
        assert name in computed | refused or after is not None
        assert (name in refused) <= (need > longest)
        if name in staging:
            assert staging[name] == (-(-need // num_rows) if need > num_blocks else 0)
