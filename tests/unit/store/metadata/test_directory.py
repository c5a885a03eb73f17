"""What hosts keep in memory, as a metadata shard and a host see it."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.core.errors import BadFrame, DataError, InvalidRequest, StaleEpoch
from millpond.core.units import SECOND_NS
from millpond.store import remote_directory
from millpond.store.dram_arena import SlotRef
from millpond.store.dram_directory import DramHost, DramPlace
from millpond.store.files import DiskFiles
from millpond.store.metadata.client import MetadataClient
from millpond.store.metadata.directory import BLOCKS, STATES, HostDirectory, pack_entries, unpack_places
from millpond.store.metadata.server import MetadataServer
from millpond.store.net.messages import (
    DirectoryDrop,
    DirectoryFind,
    DirectoryFound,
    DirectoryJoin,
    DirectoryLeave,
    DirectoryPublish,
    Done,
    Failed,
)
from millpond.store.remote_directory import RemoteDirectory, find_places
from tests.unit.store.metadata.names import digests
from tests.unit.store.metadata.shards import TOKEN, Shards, shards, stop, wait_until
from tests.unit.store.net.peers import within

NAMES = [digest[:16] for digest in digests(range(40))]


def join(directory: HostDirectory, host: str, epoch: int, now_s: float = 0, kind: str = BLOCKS) -> int:
    message = DirectoryJoin(kind, host, f"{host}:1", epoch)
    answer, _ = directory.handle(message, b"", int(now_s * SECOND_NS))
    assert isinstance(answer, Done)
    return answer.count


def publish(directory: HostDirectory, host: str, epoch: int, slots: dict[int, int], kind: str = BLOCKS):
    payload = pack_entries([(NAMES[index], SlotRef(slot, 7)) for index, slot in slots.items()])
    return directory.handle(DirectoryPublish(kind, host, epoch), payload, 0)[0]


def find(directory: HostDirectory, kind: str = BLOCKS) -> dict[int, tuple[str, int, int]]:
    answer, payload = directory.handle(DirectoryFind(kind), b"".join(NAMES), 0)
    assert isinstance(answer, DirectoryFound)
    places = unpack_places(answer, payload)
    assert len(places) == len(NAMES)
    return {
        index: (place.host, place.epoch, place.ref.slot)
        for index, place in enumerate(places)
        if place is not None
    }


def test_the_first_host_of_a_block_is_named_and_each_host_ends_its_own_entries():
    directory = HostDirectory()
    assert (join(directory, "a", 5), join(directory, "a", 5), join(directory, "b", 9)) == (1, 0, 1)
    assert publish(directory, "a", 5, {0: 10, 1: 11}) == Done(2)
    assert publish(directory, "b", 9, {1: 3, 2: 4}) == Done(1)
    assert find(directory) == {0: ("a", 5, 10), 1: ("a", 5, 11), 2: ("b", 9, 4)}
    assert publish(directory, "a", 5, {0: 12}) == Done(1), "its own entry may move"
    assert find(directory)[0] == ("a", 5, 12)
    drop = DirectoryDrop(BLOCKS, "b", 9)
    assert directory.handle(drop, NAMES[1] + NAMES[2], 0)[0] == Done(1), "not what is another's"
    assert find(directory) == {0: ("a", 5, 12), 1: ("a", 5, 11)}
    assert find(directory, STATES) == {}, "snapshots are known apart"


@pytest.mark.parametrize("end", ["leave", "silence", "new epoch", "new address"])
def test_the_end_of_a_life_ends_all_its_entries(end: str):
    directory = HostDirectory()
    join(directory, "a", 5)
    join(directory, "b", 9, now_s=4)
    publish(directory, "a", 5, {0: 10, 1: 11})
    publish(directory, "b", 9, {2: 1})
    if end == "leave":
        assert directory.handle(DirectoryLeave(BLOCKS, "a", 4), b"", 0)[0] == Done(0), "an earlier life"
        assert directory.handle(DirectoryLeave(BLOCKS, "a", 5), b"", 0)[0] == Done(1)
    elif end == "silence":
        directory.tick(5 * SECOND_NS)
        assert directory.hosts == ("a", "b")
        directory.tick(6 * SECOND_NS)
        assert directory.hosts == ("b",)
    elif end == "new epoch":
        assert join(directory, "a", 6) == 1
    else:
        message = DirectoryJoin(BLOCKS, "a", "elsewhere:1", 5)
        assert directory.handle(message, b"", 0)[0] == Done(1)
    assert find(directory) == {2: ("b", 9, 1)}
    if end in ("leave", "silence"):
        assert isinstance(publish(directory, "a", 5, {3: 1}), Failed), "it has to join first"
        assert join(directory, "a", 5) == 1, "it is asked for everything again"
        assert find(directory) == {2: ("b", 9, 1)}, "what was said in its earlier life does not come back"


def test_dead_entries_are_swept_while_others_come():
    directory = HostDirectory()
    for epoch in range(1, 30):
        join(directory, "a", epoch)
        publish(directory, "a", epoch, dict.fromkeys(range(40), epoch))
        assert directory.num_places <= 80


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (DirectoryFind(BLOCKS), b"x" * 17),
        (DirectoryFind("nothing"), b""),
        (DirectoryPublish(BLOCKS, "a", 5), b"x" * 27),
        (DirectoryDrop(BLOCKS, "a", 5), b"x"),
        (DirectoryJoin("nothing", "a", "a:1", 5), b""),
        (Done(1), b""),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(message, payload: bytes):
    directory = HostDirectory()
    join(directory, "a", 5)
    publish(directory, "a", 5, {0: 1})
    with pytest.raises(InvalidRequest):
        directory.handle(message, payload, 0)
    assert find(directory) == {0: ("a", 5, 1)}


@pytest.mark.parametrize("payload", [b"x" * 15, struct.pack("<iIQ", 1, 0, 0)])
def test_an_answer_that_makes_no_sense_is_an_error(payload: bytes):
    with pytest.raises(DataError):
        unpack_places(DirectoryFound((("a", "a:1", 5),)), payload)


# --- over the wire --------------------------------------------------------------------------------


def place(host: str, epoch: int, slot: int) -> DramPlace:
    return DramPlace(host, epoch, SlotRef(slot, 7))


def remote(made: Shards, name: str, epoch: int, kind: str = BLOCKS) -> RemoteDirectory:
    directory = RemoteDirectory(made.client, kind, find_ms=2000)
    directory.join(name, DramHost(f"{name}:1", epoch))
    return directory


@pytest.fixture
def closing(request: pytest.FixtureRequest) -> Callable[[RemoteDirectory], RemoteDirectory]:
    def close_later(directory: RemoteDirectory) -> RemoteDirectory:
        request.addfinalizer(directory.close)
        return directory

    return close_later


@pytest.mark.parametrize("count", [1, 3])
def test_hosts_see_what_others_keep(tmp_path: Path, closing, count: int):
    with shards(tmp_path, count) as made:
        a, b = closing(remote(made, "a", 5)), closing(remote(made, "b", 9))
        assert a.find(b"".join(NAMES[:2])) == [None, None]
        a.publish([(NAMES[0], place("a", 5, 1)), (NAMES[1], place("a", 5, 2))])
        wait_until(lambda: b.find(NAMES[0] + NAMES[1])[1] is not None, "published")
        assert b.find(NAMES[1] + NAMES[3] + NAMES[0]) == [place("a", 5, 2), None, place("a", 5, 1)]
        assert b.host("a") == DramHost("a:1", 5)
        assert not a.swap(NAMES[0], place("a", 5, 3), None), "it was not there"
        assert a.swap(NAMES[0], place("a", 5, 1), None)
        assert a.swap(NAMES[1], place("a", 5, 2), place("a", 5, 8))
        wait_until(lambda: b.find(NAMES[0] + NAMES[1]) == [None, place("a", 5, 8)], "swapped")
        # Gone and back before anybody was told: the new place counts.
        a.swap(NAMES[1], place("a", 5, 8), None)
        a.publish([(NAMES[1], place("a", 5, 4))])
        wait_until(lambda: b.find(NAMES[1]) == [place("a", 5, 4)], "moved")
        a.leave("a", 5)
        assert b.find(NAMES[1]) == [None]
        a.join("a", DramHost("a:1", 6))
        a.publish([(NAMES[2], place("a", 6, 3))])
        wait_until(lambda: b.find(NAMES[1] + NAMES[2]) == [None, place("a", 6, 3)], "a new life")
        assert b.host("a") == DramHost("a:1", 6)


def test_a_block_of_two_hosts_is_found_when_the_first_one_drops_it(
    tmp_path: Path, closing, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote_directory, "NUM_AGAIN", 3)
    with shards(tmp_path, 1) as made:
        a, b, c = (closing(remote(made, name, 5)) for name in ("a", "b", "c"))
        hashes = b"".join(NAMES[:8])
        a.publish([(name, place("a", 5, slot)) for slot, name in enumerate(NAMES[:8])])
        wait_until(lambda: None not in c.find(hashes), "published")
        b.publish([(name, place("b", 5, slot)) for slot, name in enumerate(NAMES[:8])])
        wait_until(lambda: b.counts.told >= 8, "told")
        assert c.find(hashes) == [place("a", 5, slot) for slot in range(8)], "the first one stays"
        for slot, name in enumerate(NAMES[:8]):
            assert a.swap(name, place("a", 5, slot), None)
        expected = [place("b", 5, slot) for slot in range(8)]
        wait_until(lambda: c.find(hashes) == expected, "the second one is named")


def test_states_are_found_by_their_own_address(tmp_path: Path, closing):
    with shards(tmp_path, 1) as made:
        states = closing(RemoteDirectory(made.client, STATES, find_ms=2000))
        states.join("a", DramHost("snic:1", 5))
        states.publish([(NAMES[0], DramPlace("a", 5, SlotRef(128, 0)))])
        wait_until(lambda: states.find(NAMES[0])[0] is not None, "published")
        other = closing(RemoteDirectory(made.client, STATES, find_ms=2000))
        assert other.find(NAMES[0])[0] == DramPlace("a", 5, SlotRef(128, 0))
        assert other.host("a") == DramHost("snic:1", 5)
        assert find_places(made.client, BLOCKS, NAMES[0], deadline_ns=within(10)).places == [None]


def test_a_directory_that_restarted_is_told_everything(tmp_path: Path, closing):
    with shards(tmp_path, 1) as made:
        a = closing(remote(made, "a", 5))
        a.publish([(name, place("a", 5, slot)) for slot, name in enumerate(NAMES)])
        wait_until(lambda: None not in a.find(b"".join(NAMES)), "published")
        address = made.servers[0].address
        stop(made.servers[0])
        a.publish([(NAMES[0], place("a", 5, 99))])
        assert a.swap(NAMES[1], place("a", 5, 1), None)
        assert a.find(NAMES[0]) == [None], "nobody answers"
        assert a.counts.failed_finds == 1
        files = DiskFiles(tmp_path / "again")
        server = MetadataServer(files, address, name="m0", token=TOKEN, clock=made.clock)
        server.start()
        try:
            expected = [place("a", 5, slot) for slot in range(len(NAMES))]
            expected[0], expected[1] = place("a", 5, 99), None
            wait_until(lambda: a.find(b"".join(NAMES)) == expected, "told again")
            assert a.counts.joins == 2
        finally:
            a.close()
            made.client.close()
            stop(server)
            files.close_folder()


def test_a_host_that_was_taken_for_dead_is_told_everything_of(tmp_path: Path, closing):
    with shards(tmp_path, 1) as made:
        a = closing(remote(made, "a", 5))
        a.publish([(NAMES[0], place("a", 5, 1))])
        wait_until(lambda: a.find(NAMES[0])[0] is not None, "published")
        made.clock.ahead_s += 6
        # Its silence is noticed by the shard's upkeep, unless its next sign of life was quicker.
        wait_until(lambda: a.counts.joins >= 1 and a.find(NAMES[0])[0] is not None, "named again")
        message = DirectoryLeave(BLOCKS, "a", 5)
        assert made.client.ask_directory(message, deadline_ns=within(10))[0] == Done(1)
        joins = a.counts.joins
        wait_until(lambda: a.counts.joins > joins and a.find(NAMES[0])[0] is not None, "named again")


def test_a_host_knows_better_what_it_keeps_itself(tmp_path: Path, closing):
    with shards(tmp_path, 1) as made:
        a = closing(remote(made, "a", 5))
        a.publish([(NAMES[0], place("a", 5, 1)), (NAMES[1], place("a", 5, 2))])
        wait_until(lambda: a.find(NAMES[0] + NAMES[1]) == [place("a", 5, 1), place("a", 5, 2)], "published")
        for slot in range(2, 200):  # the directory lags behind, what is found does not
            assert a.swap(NAMES[1], place("a", 5, slot), None)
            assert a.find(NAMES[1]) == [None]
            a.publish([(NAMES[1], place("a", 5, slot + 1))])
            assert a.find(NAMES[1]) in ([None], [place("a", 5, slot + 1)])


def test_publishing_does_not_wait_for_a_frozen_directory(tmp_path: Path, closing):
    """A listening socket that nobody serves: connections are taken and never answered."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        client = MetadataClient([f"{host}:{port}"], name="test", token=TOKEN)
        directory = closing(RemoteDirectory(client, find_ms=50))
        directory.join("a", DramHost("a:1", 5))
        began = time.monotonic()
        for slot in range(70_000):
            name = slot.to_bytes(16, "little")
            directory.publish([(name, place("a", 5, slot))])
            assert directory.swap(name, place("a", 5, slot), None)
        assert directory.find(NAMES[0]) == [None]
        assert time.monotonic() - began < 30
        assert directory.num_untold <= (1 << 16) + 1, "what has left is not remembered for ever"
        wait_until(lambda: directory.counts.failed_beats > 0, "it gave up waiting")
        directory.close()
        client.close()


def test_a_client_is_told_that_it_is_stale(tmp_path: Path):
    with shards(tmp_path, 1) as made:
        message = DirectoryPublish(BLOCKS, "a", 5)
        with pytest.raises(StaleEpoch):
            made.client.ask_directory(message, b"", deadline_ns=within(10))
        with pytest.raises(BadFrame):
            made.client.ask_directory(DirectoryFind(BLOCKS), b"x", deadline_ns=within(10))
        status = next(iter(made.client.statuses(deadline_ns=within(10)).values()))
        assert (status.memory_hosts, status.num_places) == ((), 0)
