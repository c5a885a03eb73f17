from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.control.extent_write import (
    AskLease,
    EndWrite,
    ExtentWrite,
    ExtentWriteParams,
    GiveUpLease,
    Publish,
    SendShards,
    WriteEnd,
)
from millpond.core.errors import InvariantBroken
from millpond.core.units import MILLISECOND_NS, SECOND_NS

MS = MILLISECOND_NS
LEASE_NS = 30 * SECOND_NS
PARAMS = ExtentWriteParams()


def leased(k: int = 10, m: int = 2) -> ExtentWrite:
    write = ExtentWrite(k + m, m, PARAMS)
    assert write.begin(0) == [AskLease()]
    assert write.on_lease(0, LEASE_NS) == [SendShards()]
    return write


def store(write: ExtentWrite, shards: range | tuple[int, ...], now_ns: int = MS) -> list[object]:
    return [action for shard in shards for action in write.on_shard(now_ns, shard, is_stored=True)]


def test_all_twelve_publish_at_once():
    write = leased()
    assert store(write, range(12)) == [Publish(0)]
    assert write.on_published(2 * MS, is_ours=True) == [EndWrite(WriteEnd.PUBLISHED, 0xFFF)]
    assert write.is_over


def test_eleven_publish_after_a_short_wait_with_a_note():
    write = leased()
    assert store(write, range(11)) == []
    assert write.next_time_ns == MS + PARAMS.last_shard_ms * MS
    assert write.on_time(write.next_time_ns - 1) == []
    assert write.on_time(write.next_time_ns) == [Publish(1 << 11)]


def test_eleven_and_one_refusal_need_no_wait():
    write = leased()
    assert write.on_shard(0, 4, is_stored=False) == []
    assert store(write, (0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11)) == [Publish(1 << 4)]


def test_ten_are_not_enough():
    write = leased()
    store(write, range(10))
    assert write.on_shard(MS, 10, is_stored=False) == []
    assert write.on_shard(MS, 11, is_stored=False) == [
        GiveUpLease(),
        EndWrite(WriteEnd.REFUSED, 0b1111111111),
    ]


def test_ten_at_the_deadline_are_not_enough():
    write = leased()
    store(write, range(10))
    assert write.next_time_ns == 10 * SECOND_NS
    assert write.on_time(10 * SECOND_NS) == [GiveUpLease(), EndWrite(WriteEnd.LATE, 0b1111111111)]


def test_no_lease_no_bytes():
    write = ExtentWrite(12, 2, PARAMS)
    write.begin(0)
    assert write.on_lease(MS, 0) == [EndWrite(WriteEnd.EXISTS, 0)]


def test_a_lease_that_another_holds_says_nothing_of_what_will_be_there():
    write = ExtentWrite(12, 2, PARAMS)
    write.begin(0)
    assert write.on_lease(MS, -1) == [EndWrite(WriteEnd.HELD, 0)]


def test_a_short_lease_is_the_deadline():
    write = ExtentWrite(12, 2, PARAMS)
    write.begin(0)
    write.on_lease(MS, 2 * SECOND_NS)
    assert write.next_time_ns == 2 * SECOND_NS
    late = ExtentWrite(12, 2, PARAMS)
    late.begin(0)
    assert late.on_lease(3 * SECOND_NS, 2 * SECOND_NS) == [GiveUpLease(), EndWrite(WriteEnd.LATE, 0)]


def test_the_second_writer_is_beaten():
    write = leased()
    store(write, range(12))
    assert write.on_published(MS, is_ours=False) == [EndWrite(WriteEnd.BEATEN, 0xFFF)]


def test_publishing_is_repeated_and_then_unknown():
    write = leased()
    assert store(write, range(11)) == []
    assert write.on_time(SECOND_NS) == [Publish(1 << 11)]
    assert store(write, (11,)) == [], "the note of what is missing does not change between tries"
    for _ in range(PARAMS.max_publish_tries - 1):
        assert write.on_published(SECOND_NS, is_ours=None) == [Publish(1 << 11)]
    assert write.on_published(SECOND_NS, is_ours=None) == [EndWrite(WriteEnd.UNKNOWN, 0x7FF)]


def test_a_metadata_that_never_answers():
    leasing = ExtentWrite(12, 2, PARAMS)
    leasing.begin(0)
    assert leasing.on_time(10 * SECOND_NS) == [GiveUpLease(), EndWrite(WriteEnd.LATE, 0)]
    publishing = leased()
    store(publishing, range(12))
    assert publishing.on_time(10 * SECOND_NS) == [EndWrite(WriteEnd.UNKNOWN, 0xFFF)]


def test_without_parity_every_shard_is_needed():
    write = leased(k=3, m=0)
    assert store(write, (0, 1)) == []
    assert write.next_time_ns == 10 * SECOND_NS
    assert store(write, (2,)) == [Publish(0)]


def test_a_write_begins_once():
    write = leased()
    with pytest.raises(InvariantBroken):
        write.begin(0)


@settings(max_examples=50)
@given(st.data())
def test_any_history_ends_once_and_publishes_only_enough(data: st.DataObject):
    k, m = data.draw(st.integers(1, 10)), data.draw(st.integers(0, 4))
    write = ExtentWrite(k + m, m, PARAMS)
    now_ns, lease_end_ns, stored, actions = 0, LEASE_NS, set(), write.begin(0)
    history = list(actions)
    for _ in range(data.draw(st.integers(0, 40))):
        now_ns += data.draw(st.sampled_from([0, MS, 60 * MS, SECOND_NS]))
        match data.draw(st.sampled_from(["lease", "shard", "shard", "shard", "shard", "published", "time"])):
            case "lease":
                lease_ns = data.draw(st.sampled_from([0, -1, SECOND_NS, LEASE_NS]))
                actions = write.on_lease(now_ns, lease_ns)
                if SendShards() in actions:
                    lease_end_ns = lease_ns
            case "shard":
                shard, is_stored = data.draw(st.integers(0, k + m - 1)), data.draw(st.booleans())
                stored |= {shard} if is_stored else set()
                actions = write.on_shard(now_ns, shard, is_stored=is_stored)
            case "published":
                actions = write.on_published(now_ns, is_ours=data.draw(st.sampled_from([True, False, None])))
            case _:
                actions = write.on_time(now_ns)
        for action in actions:
            if isinstance(action, Publish):
                assert now_ns < lease_end_ns
                assert action.missing.bit_count() <= min(1, m)
                assert {shard for shard in range(k + m) if not action.missing >> shard & 1} <= stored
        history += actions
    while (due_ns := write.next_time_ns) is not None:
        now_ns = max(now_ns, due_ns)
        history += write.on_time(now_ns)
        if isinstance(history[-1], Publish):
            history += write.on_published(now_ns, is_ours=True)
    ends = [action for action in history if isinstance(action, EndWrite)]
    assert len(ends) == 1
    assert history[-1] == ends[0]
    if ends[0].end == WriteEnd.PUBLISHED:
        assert ends[0].acknowledged.bit_count() >= k + m - min(1, m)
