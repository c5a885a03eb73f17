"""Random lives of snapshots, against a plain list of what should be there."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millpond.control.invariants import require_sound
from millpond.control.snapshot_holder import SnapshotHolder
from millpond.core.errors import InvariantBroken
from millpond.core.ids import RequestId
from millpond.core.units import SECOND_NS

TTL_S = 10
OWNERS = st.tuples(st.sampled_from("abcd"), st.integers(0, 1))
POSITIONS = st.sampled_from([128, 256, 384])


class SnapshotLife(RuleBasedStateMachine):
    """Items of `live` are [owner, position, buffer, rolling, written], of `idle` [name, buffer, end]."""

    @initialize(num_buffers=st.integers(0, 4))
    def start(self, num_buffers):
        self.num_buffers = num_buffers
        self.holder = SnapshotHolder(num_buffers, TTL_S)
        self.now_s = 0
        self.live = []
        self.idle = []

    @rule(seconds=st.integers(0, 7))
    def time_passes(self, seconds):
        self.now_s += seconds
        self.holder.pass_time(self.now_s * SECOND_NS)
        self.idle = [item for item in self.idle if item[2] > self.now_s]

    @rule(owner=OWNERS, position=POSITIONS, is_rolling=st.booleans())
    def take(self, owner, position, is_rolling):
        name = (owner[0], position)
        if any(s[0] == owner and s[1] == position for s in self.live):
            with pytest.raises(InvariantBroken):
                self.holder.take(owner, position, is_rolling=is_rolling)
            return
        self.live = [s for s in self.live if (s[0][0], s[1]) != name]
        self.idle = [item for item in self.idle if item[0] != name]
        buffer = self.holder.take(owner, position, is_rolling=is_rolling)
        if len(self.live) == self.num_buffers:
            assert buffer is None
            return
        if len(self.live) + len(self.idle) == self.num_buffers:
            assert self.idle.pop(0)[1] == buffer, "the one unused longest gives way"
        assert buffer not in [s[2] for s in self.live] + [item[1] for item in self.idle]
        self.live.append([owner, position, buffer, is_rolling, False])

    @precondition(lambda self: any(not s[4] for s in self.live))
    @rule(is_written=st.booleans(), data=st.data())
    def commit(self, is_written, data):
        taken = data.draw(st.sampled_from([s for s in self.live if not s[4]]))
        self.holder.commit(taken[0], taken[1], is_written=is_written)
        taken[4] = is_written
        self.live = [
            s
            for s in self.live
            if (s is not taken or is_written)
            and (s is taken or not (is_written and taken[3] and s[3] and s[0] == taken[0]))
        ]

    @rule(owner=OWNERS)
    def hand_over(self, owner):
        mine = [s for s in self.live if s[0] == owner]
        if any(not s[4] for s in mine):
            for pending in [s for s in mine if not s[4]]:
                self.holder.commit(owner, pending[1], is_written=False)
            mine = [s for s in mine if s[4]]
        self.holder.hand_over(owner)
        self.live = [s for s in self.live if s[0] != owner]
        self.idle += [[(owner[0], s[1]), s[2], self.now_s + TTL_S] for s in mine]

    @rule(name=st.sampled_from("abcd"), position=POSITIONS)
    def use(self, name, position):
        expected = [s[2] for s in self.live if (s[0][0], s[1]) == (name, position) and s[4]]
        for item in [item for item in self.idle if item[0] == (name, position)]:
            expected = [item[1]]
            self.idle.remove(item)
            self.idle.append([item[0], item[1], self.now_s + TTL_S])
        assert self.holder.use(RequestId(name), position) == (expected[0] if expected else None)

    @invariant()
    def sound(self):
        if hasattr(self, "holder"):
            require_sound([self.holder])
            assert self.holder.stats().held == len(self.live) + len(self.idle)

    def teardown(self):
        if not hasattr(self, "holder"):
            return
        for owner in {s[0] for s in self.live}:
            self.hand_over(owner)
        self.time_passes(TTL_S)
        assert self.holder.stats().held == 0
        require_sound([self.holder])


SnapshotLife.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSnapshotLife = SnapshotLife.TestCase


def test_a_sequence_cannot_end_while_its_state_is_copied():
    holder = SnapshotHolder(1, TTL_S)
    holder.take(("a", 0), 128, is_rolling=False)
    with pytest.raises(InvariantBroken):
        holder.hand_over(("a", 0))


@pytest.mark.parametrize("position", [128, 256])
def test_only_a_buffer_that_was_taken_can_be_committed_and_once(position):
    holder = SnapshotHolder(1, TTL_S)
    holder.take(("a", 0), 128, is_rolling=False)
    holder.commit(("a", 0), 128, is_written=True)
    with pytest.raises(InvariantBroken):
        holder.commit(("a", 0), position, is_written=True)


def test_check_finds_a_lost_buffer():
    holder = SnapshotHolder(2, TTL_S)
    holder._free.pop()
    assert holder.check() == ["1 free + 0 owned != 2 buffers"]
