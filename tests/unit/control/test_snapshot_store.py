"""Snapshots of window state: the right one, within memory and time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from millpond.control.snapshot_store import MAX_BLOCKS_BACK, SnapshotStore


def name(index: int) -> bytes:
    return index.to_bytes(32, "little")


CHAIN = [name(index) for index in range(200)]


def test_the_last_one_at_or_before_the_end_is_found():
    store = SnapshotStore(100, 1000)
    for index in (3, 9):
        store.put(0, CHAIN[index], (index + 1) * 128, bytes([index]))
    assert store.find(0, CHAIN[:3]) is None
    assert store.find(0, CHAIN[:4]).state == b"\x03"  # type: ignore[union-attr]
    assert store.find(0, CHAIN[:9]).position == 4 * 128  # type: ignore[union-attr]
    assert store.find(0, CHAIN[:10]).state == b"\x09"  # type: ignore[union-attr]
    assert store.find(0, CHAIN[: 9 + MAX_BLOCKS_BACK]).state == b"\x09"  # type: ignore[union-attr]
    assert store.find(0, CHAIN[: 10 + MAX_BLOCKS_BACK]) is None


def test_what_was_approximate_when_it_was_kept_stays_so():
    store = SnapshotStore(100, 1000)
    for index in (3, 5):
        store.put(0, CHAIN[index], (index + 1) * 128, b"x", is_approximate=index == 5)
        store.put(1, CHAIN[index], (index + 1) * 128, b"x", is_approximate=index == 3)  # kept already
    found = [store.find(now_ns, CHAIN[: index + 1]) for now_ns in (2, 3) for index in (3, 5)]
    assert [each.is_approximate for each in found] == [False, True] * 2  # type: ignore[union-attr]


def test_one_under_a_wrong_position_is_not_found():
    store = SnapshotStore(100, 1000)
    store.put(0, CHAIN[3], 3 * 128, b"x")
    assert store.find(0, CHAIN[:4]) is None


def test_a_state_larger_than_the_memory_is_refused_and_nothing_goes_for_it():
    store = SnapshotStore(10, 1000)
    store.put(0, CHAIN[0], 128, b"x")
    assert store.put(0, CHAIN[1], 256, bytes(11)) == (None, [])
    assert len(store) == 1
    assert store.counts.refused == 1


def test_no_memory_keeps_none():
    store = SnapshotStore(0, 1000)
    assert store.put(0, CHAIN[0], 128, b"x") == (None, [])


@dataclass
class Model:
    """What should be there: name -> (size, last use), in order of use."""

    max_bytes: int
    kept: dict[bytes, tuple[int, int]] = field(default_factory=dict[bytes, tuple[int, int]])

    def touch(self, now_ns: int, digest: bytes) -> None:
        size, _ = self.kept.pop(digest)
        self.kept[digest] = (size, now_ns)

    def put(self, now_ns: int, digest: bytes, size: int, replaces: bytes) -> None:
        if replaces != digest:
            self.kept.pop(replaces, None)
        if digest in self.kept:
            self.touch(now_ns, digest)
        elif size <= self.max_bytes:
            while sum(each for each, _ in self.kept.values()) + size > self.max_bytes:
                del self.kept[next(iter(self.kept))]
            self.kept[digest] = (size, now_ns)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "find", "expire"]),
        st.integers(0, 7),
        st.integers(1, 6),
        st.integers(-1, 7),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(steps=STEPS)
def test_it_keeps_what_was_used_last(steps: list[tuple[str, int, int, int, int]]):
    store, model, now_ns = SnapshotStore(16, 10), Model(16), 0
    for kind, index, size, replaces, pause in steps:
        now_ns += pause
        if kind == "put":
            old = name(replaces) if replaces >= 0 else b""
            before = set(model.kept)
            made, gone = store.put(now_ns, name(index), (index + 1) * 128, bytes(size), old)
            model.put(now_ns, name(index), size, old)
            assert {each.digest for each in gone} == before - set(model.kept)
            assert (made is not None) == (name(index) in model.kept and name(index) not in before)
        elif kind == "find":
            found = store.find(now_ns, CHAIN[: index + 1])
            best = max((i for i in range(index + 1) if name(i) in model.kept), default=None)
            assert (found.digest if found else None) == (None if best is None else name(best))
            if best is not None:
                model.touch(now_ns, name(best))
        else:
            gone = store.expire(now_ns)
            late = [digest for digest, (_, used_ns) in model.kept.items() if used_ns + 10 <= now_ns]
            assert [each.digest for each in gone] == late
            for digest in late:
                del model.kept[digest]
        assert store.check() == []
        assert len(store) == len(model.kept)
        assert store.num_bytes == sum(each for each, _ in model.kept.values())
