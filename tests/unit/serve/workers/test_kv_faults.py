"""What the disks, the directory, the daemon or the arena may do to a request: never a wrong token, never a
hang, and what had to be computed after all is counted.

The synthetic engine's text depends on every KV byte. A daemon that was restarted has nothing in memory: all
blocks come from storage nodes, which do here what they should not.
"""

from __future__ import annotations

import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from millpond.config.synthetic_params import SyntheticParams
from millpond.control.group_scheduler import GroupRole
from millpond.core.hashing import BLOCK_HASH_BYTES, HashChain
from millpond.core.ids import DpRank, RequestId
from millpond.core.plan import LoadStart
from millpond.core.request import CachedPrefix, KvIdentity, SamplingParams
from millpond.core.units import SECOND_NS
from millpond.engine.synthetic import SyntheticEngine, expected_tokens
from millpond.serve.node.load_line import LoadLine
from millpond.serve.node.node_load import NodeLoad
from millpond.store.dram_arena import SlotRef
from millpond.store.dram_directory import DramHost, DramPlace
from millpond.store.metadata.client import MetadataClient
from millpond.store.metadata.directory import BLOCKS
from millpond.store.net.messages import Match, Matched
from millpond.store.record import parse_header
from millpond.store.remote_directory import RemoteDirectory
from tests.unit.serve.node.rig import Rig, poll, rig
from tests.unit.serve.workers.kv_service import IDENTITY, Answer, Group, KvService, kv_service
from tests.unit.store.metadata.shards import TOKEN
from tests.unit.store.shard_peer import Faults, ShardPeer

PARAMS = SyntheticParams(
    num_layers=3,
    kv_bytes_per_token=8,
    num_blocks=64,
    max_model_len=4096,
    prefill_token_ns=0,
    decode_step_ns=0,
    decode_row_ns=0,
    decode_kv_token_ns=0,
)
SAMPLING = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
DEADLINE_S = 1.5
"""Of a load."""
BOUND_S = 10 * DEADLINE_S
"""Of a request whose load does not come."""
NUM_WORDS = 700
NUM_STORED = 640
OTHERS = KvIdentity(bytes(range(32)), 9)


def words(count: int, seed: int = 0) -> array[int]:
    return array("i", [1000 + seed * 7919 + i for i in range(count)])


@dataclass
class Stored:
    """A service whose daemon was started anew: a prompt's blocks are on the disks, and only there."""

    service: KvService
    pool: Rig
    group: Group
    _num_before: float = 0

    @property
    def peers(self) -> list[ShardPeer]:
        return list(self.pool.peers.values())

    def restart_daemon(self, num_slots: int = 64) -> None:
        """What waits is written; nothing is in memory afterwards."""
        self.service.daemon.end()
        daemon = self.service.start_daemon(SyntheticEngine(PARAMS), num_slots)
        poll(lambda: daemon.memory.pool.is_open, "the pool")
        epoch = daemon.memory.arena.epoch
        node = self.group.kv.node
        poll(lambda: node.epoch == epoch and node.num_free_slots > 0, "a lease")
        self._num_before = sum(node.load_counts.refused.values())

    @property
    def num_fallbacks(self) -> float:
        """Loads of which less came than was asked for, since the daemon began: as the metrics tell."""
        names = ("no_daemon", "daemon_lost", "deadline", "no_room", "absent", "stopping", "layout")
        refused = sum(self.metric(f"loads_refused_total:{name}") for name in names)
        return self.metric("node_loads_shortened_total") + refused - self._num_before

    def check_fallbacks(self, count: float) -> None:
        """So many are counted, and no more: the daemon counts a moment after the rank has gone on."""
        poll(lambda: self.num_fallbacks >= count, "a fallback is counted")
        assert self.num_fallbacks == count

    def keep(self, name: str, prompt: array[int], kv: KvIdentity = IDENTITY) -> None:
        """Have a prompt's blocks on the disks."""
        self.service.ask(name, prompt, 1, kv=kv)
        self.service.settle()
        memory = self.service.daemon.memory
        poll(lambda: memory.pool.is_open, "the pool")
        memory.level.spill_all(deadline_ns=memory.spill_until_ns())
        assert memory.level.num_waiting == 0
        self.restart_daemon()

    def ask(self, name: str, prompt: array[int], count: int = 40, **more: object) -> Answer:
        """The text must be right, and come in time."""
        began = time.monotonic()
        answer = self.service.ask(name, prompt, count, **more)
        assert time.monotonic() - began < BOUND_S
        assert answer.token_ids == expected_tokens(PARAMS, prompt, SAMPLING, count)
        return answer

    def metric(self, name: str) -> float:
        """Of the daemon or the rank; 0 if it is not counted yet."""
        daemon = self.service.daemon
        values = daemon.daemon.counts.values(daemon.memory) | self.group.kv.counters()
        return values.get(f"millpond_{name}", 0)

    def check_rest(self) -> None:
        """Nothing is held when all requests have ended."""
        self.service.settle()
        level = self.service.daemon.memory.level

        def num_pinned() -> int:
            with level.lock:
                return level.blocks.num_pinned

        poll(lambda: num_pinned() == 0, "all pins are gone")
        poll(lambda: self.service.daemon.memory.loader.num_loads == 0, "all loads are gone")
        assert self.group.kv.swaps.stats().num_open == 0


@contextmanager
def stored_prompt(folder: Path, load_deadline_s: float, params: SyntheticParams = PARAMS) -> Iterator[Stored]:
    with rig(folder) as pool, kv_service(metadata=pool.metadata, load_deadline_s=load_deadline_s) as service:
        service.start_daemon(SyntheticEngine(PARAMS))
        made = Stored(service, pool, service.add_group("m0", GroupRole.MIXED, SyntheticEngine(params)))
        made.keep("a", words(NUM_WORDS))
        yield made
        for peer in made.peers:
            peer.faults = Faults()
        made.check_rest()


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    with stored_prompt(tmp_path, DEADLINE_S) as made:
        yield made


def test_without_faults_all_comes_from_the_disks(stored: Stored):
    assert stored.ask("b", words(NUM_WORDS)).num_cached_tokens == NUM_STORED
    assert stored.metric("node_blocks_loaded_total:pool") == 5
    assert stored.group.lost == []


# --- the store --------------------------------------------------------------------------------------


def fill_with_zeroes(peers: list[ShardPeer]) -> None:
    """The payload of every record; what names it stays."""
    for peer in peers:
        for key, record in peer.records.items():
            head = parse_header(record).header_bytes
            peer.records[key] = record[:head] + bytes(len(record) - head)


def set_fault(**fields: object) -> Callable[[list[ShardPeer]], None]:
    def spoil(peers: list[ShardPeer]) -> None:
        for peer in peers:
            peer.faults = Faults(**fields)  # type: ignore[arg-type]

    return spoil


def empty(peers: list[ShardPeer]) -> None:
    for peer in peers:
        peer.records.clear()


STORE_FAULTS: dict[str, Callable[[list[ShardPeer]], None]] = {
    "EIO": set_fault(error="io"),
    "zeroes": fill_with_zeroes,
    "a flipped bit": set_fault(flip_payload=True),
    "less than all": set_fault(short=True),
    "nothing": set_fault(is_silent=True),
    "absent": empty,
    "stale": set_fault(error="stale"),
}


@pytest.mark.parametrize("fault", STORE_FAULTS)
def test_bug_34_a_store_that_fails_costs_the_hit_and_is_counted(stored: Stored, fault: str):
    STORE_FAULTS[fault](stored.peers)
    assert stored.ask("b", words(NUM_WORDS)).num_cached_tokens == 0
    assert stored.metric("node_blocks_loaded_total:pool") == 0
    stored.check_fallbacks(1)
    stored.check_rest()
    for peer in stored.peers:
        peer.faults = Faults()
    assert stored.ask("c", words(NUM_WORDS)).num_cached_tokens == NUM_STORED


@pytest.mark.parametrize("fault", ["EIO", "zeroes", "nothing"])
def test_two_nodes_that_fail_cost_nothing(stored: Stored, fault: str):
    """Any two shards of an extent may be lost (4 + 2)."""
    STORE_FAULTS[fault](stored.peers[:2])
    assert stored.ask("b", words(NUM_WORDS)).num_cached_tokens == NUM_STORED


@pytest.mark.parametrize("whose", [IDENTITY, OTHERS], ids=["of the same tenant", "of another tenant"])
def test_bug_32_records_of_another_extent_are_no_hit(stored: Stored, whose: KvIdentity):
    """Every node answers with the other's record under the name that was asked for."""
    before = {peer.name: set(peer.records) for peer in stored.peers}
    stored.keep("other", words(NUM_WORDS, seed=3), kv=whose)
    theirs = {
        shard: record
        for peer in stored.peers
        for (digest, num_blocks, shard, nonce), record in peer.records.items()
        if (digest, num_blocks, shard, nonce) not in before[peer.name]
    }
    for peer in stored.peers:
        peer.records |= {key: theirs[key[2]] for key in before[peer.name]}
    assert stored.ask("b", words(NUM_WORDS)).num_cached_tokens == 0
    stored.check_fallbacks(1)


def test_another_tenants_place_of_the_same_words_is_no_hit(stored: Stored):
    """The hint that comes with the request names an extent of somebody else."""
    theirs = HashChain(IDENTITY.root)
    theirs.extend(words(NUM_STORED))
    hashes = b"".join(theirs.hashes)
    question = Match(IDENTITY.tenant, IDENTITY.root[:BLOCK_HASH_BYTES], 0, 32)
    with closing(MetadataClient(stored.pool.metadata, name="thief", token=TOKEN)) as client:
        found = client.call(question, hashes, prefix=hashes, deadline_ns=time.monotonic_ns() + 5 * SECOND_NS)
    assert isinstance(found, Matched)
    assert found.num_blocks == 5
    located = msgspec.msgpack.encode(found)
    answer = stored.ask("b", words(NUM_WORDS), kv=OTHERS, cached=CachedPrefix(NUM_STORED, located))
    assert answer.num_cached_tokens == 0
    stored.check_fallbacks(1)


# --- a slow layer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [0, PARAMS.num_layers - 1])
def test_bug_35_a_slow_layer_is_waited_for_and_others_are_answered(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, row: int
):
    """One row of one request comes late; a step waits for it, in time."""
    is_there, rows_ready = threading.Event(), NodeLoad.rows_ready

    def late(load: NodeLoad, which: int) -> int:
        is_late = load.request_id == "b" and which >= row and not is_there.is_set()
        return 0 if is_late else rows_ready(load, which)

    monkeypatch.setattr(NodeLoad, "rows_ready", late)
    timer = threading.Timer(DEADLINE_S / 3, is_there.set)
    prompts = {"b": words(NUM_WORDS), "c": words(300, seed=5), "d": words(NUM_WORDS) + words(50, seed=6)}
    for name, prompt in prompts.items():
        stored.service.submit(name, prompt, 20)
    timer.start()
    answers = stored.service.run()
    timer.join()
    for name, prompt in prompts.items():
        assert answers[name].token_ids == expected_tokens(PARAMS, prompt, SAMPLING, 20)
    assert [answers[name].num_cached_tokens for name in "bcd"] == [NUM_STORED, 0, NUM_STORED]
    assert stored.group.lost == []
    assert stored.metric("swap_in_wait_seconds_total") > 0


@pytest.mark.parametrize("row", [0, PARAMS.num_layers - 1])
def test_bug_35_a_layer_that_never_comes_is_computed_after_the_deadline(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, row: int
):
    rows_ready = NodeLoad.rows_ready
    monkeypatch.setattr(LoadLine, "on_done", lambda line, message: None)
    monkeypatch.setattr(
        NodeLoad, "rows_ready", lambda load, r: min(rows_ready(load, r), 2 if r >= row else 99)
    )
    assert stored.ask("b", words(NUM_WORDS)).num_cached_tokens == 2 * 128
    is_begun = row > 0  # without its first row a load is not begun with
    assert stored.group.lost == ([("b", 2 * 128)] if is_begun else [])
    assert stored.metric("swap_in_broken_total") == is_begun


def test_a_load_of_which_nothing_comes_holds_up_nobody(tmp_path: Path):
    """Disks are silent: those who decode get their tokens, who comes later is computed, an abort is heard."""
    with stored_prompt(tmp_path, load_deadline_s=10 * BOUND_S) as stored:
        service, group = stored.service, stored.group
        service.submit("a", words(100, seed=8), 3000)
        set_fault(is_silent=True)(stored.peers)
        service.submit("b", words(NUM_WORDS), 20)
        service.submit("c", words(300, seed=5), 20)
        longest_s, last, is_held = 0.0, time.monotonic(), False
        while len(service.answers["c"]) < 20:
            before = len(service.answers["a"])
            service.turn(group)
            load = group.kv.node.load_of(RequestId("b"), 0)
            is_held = is_held or (load is not None and load.is_held)
            now = time.monotonic()
            assert now - last < BOUND_S, "nothing happens"
            if len(service.answers["a"]) > before:
                longest_s, last = max(longest_s, now - last), now
        assert is_held
        assert longest_s < BOUND_S / 5
        assert len(service.answers["a"]) > 20
        assert service.answers["b"] == []
        for name, prompt in (("a", words(100, seed=8)), ("c", words(300, seed=5))):
            ids = [token.token_id for token in service.answers[name]]
            assert ids == list(expected_tokens(PARAMS, prompt, SAMPLING, len(ids)))
        service.abort("b")
        level = service.daemon.memory.level

        def is_released() -> bool:
            service.turn(group)
            with level.lock:
                return level.blocks.num_pinned == 0

        poll(is_released, "all pins are gone", 1.0)
        service.abort("a")
        service.turn(group)
        [view] = group.scheduler.views()
        assert (view.num_seqs, view.free_blocks) == (0, group.runner.info.num_blocks)


def test_slow_nodes_are_waited_for_or_done_without(stored: Stored):
    """Reads of all nodes take a part of the deadline, then far more than it."""
    for peer in stored.peers:
        peer.faults = Faults(delay_s=0.1)
    assert stored.ask("b", words(NUM_WORDS)).num_cached_tokens == NUM_STORED
    stored.restart_daemon()
    for peer in stored.peers:
        peer.faults = Faults(delay_s=3 * DEADLINE_S)
    assert stored.ask("c", words(NUM_WORDS)).num_cached_tokens == 0
    stored.check_fallbacks(1)


# --- the daemon and its arena -----------------------------------------------------------------------


def test_a_daemon_that_goes_amid_a_load_is_done_without(stored: Stored, monkeypatch: pytest.MonkeyPatch):
    """Of all blocks but the first row came."""
    rows_ready = NodeLoad.rows_ready
    monkeypatch.setattr(LoadLine, "on_done", lambda line, message: None)
    monkeypatch.setattr(NodeLoad, "rows_ready", lambda load, row: 0 if row else rows_ready(load, row))
    daemon, kv = stored.service.daemon, stored.group.kv

    def is_amid() -> bool:
        load = kv.node.load_of(RequestId("b"), 0)
        return load is not None and load.is_held and kv.swaps.stats().num_open == 1

    def end() -> None:
        poll(is_amid, "the load runs")
        daemon.end()

    ending = threading.Thread(target=end)
    ending.start()
    answer = stored.ask("b", words(NUM_WORDS))
    ending.join()
    assert answer.num_cached_tokens == 0
    assert stored.group.lost == [("b", 0)]
    assert stored.metric("swap_in_broken_total") == 1
    monkeypatch.undo()
    stored.restart_daemon()
    assert stored.ask("c", words(NUM_WORDS)).num_cached_tokens == NUM_STORED


def test_a_load_for_which_the_arena_has_no_room_is_computed(stored: Stored):
    """Another rank's load holds all that may be held, and does not give it back."""
    big = words(3900, seed=2)
    stored.keep("big", big)
    stored.restart_daemon(num_slots=12)
    events: list[object] = []
    other = stored.service.connect("x-0", SyntheticEngine(PARAMS), events.append)
    try:
        poll(lambda: other.epoch == stored.service.daemon.memory.arena.epoch, "a lease")
        order = LoadStart(RequestId("x"), 0, DpRank(0), IDENTITY, big[: 30 * 128], b"", wants_state=False)
        other.load(order, time.monotonic_ns() + 60 * SECOND_NS)
        level = stored.service.daemon.memory.level
        poll(lambda: events and level.blocks.num_available < 5, "the arena is full")
        num_before = stored.num_fallbacks
        assert stored.ask("b", words(NUM_WORDS)).num_cached_tokens == 0
        stored.check_fallbacks(num_before + 1)
        other.end(RequestId("x"), 0)
        poll(lambda: level.blocks.num_pinned == 0, "it was given back")
        assert stored.ask("c", words(NUM_WORDS)).num_cached_tokens == NUM_STORED
    finally:
        other.stop()


def test_a_load_that_had_no_room_while_others_computed_is_had_in_its_turn(tmp_path: Path):
    """The arena takes two of three hits, and the first prefill takes longer than a load may."""
    params = replace(PARAMS, prefill_token_ns=1_000_000)
    with stored_prompt(tmp_path, load_deadline_s=1.0, params=params) as stored:
        prompts = {name: words(NUM_WORDS, seed=20 + index) for index, name in enumerate("def")}
        for name, prompt in prompts.items():
            stored.keep(f"keep {name}", prompt)
        stored.restart_daemon(num_slots=8)  # of small blocks it takes more: 16, of which 4 are lent
        prompts["d"] = prompts["d"] + words(2500, seed=30)
        for name, prompt in prompts.items():
            stored.service.submit(name, prompt, 5, cached=CachedPrefix(NUM_STORED))
        answers = stored.service.run()
        for name, prompt in prompts.items():
            assert answers[name].token_ids == expected_tokens(PARAMS, prompt, SAMPLING, 5)
        assert [answers[name].num_cached_tokens for name in "def"] == [NUM_STORED] * 3
        assert stored.num_fallbacks > 0, "it was refused before"


# --- the directory ----------------------------------------------------------------------------------


def test_a_prefix_that_nobody_has_is_computed(stored: Stored):
    """The gateway was told of it, and it has gone since."""
    assert stored.ask("b", words(NUM_WORDS, seed=4)).num_cached_tokens == 0
    stored.check_fallbacks(1)


@contextmanager
def lying_directory(stored: Stored, hashes: list[bytes], address: str) -> Iterator[None]:
    """A host that does not exist is said to have these blocks in memory."""
    with closing(MetadataClient(stored.pool.metadata, name="liar", token=TOKEN)) as client:
        directory = RemoteDirectory(client, BLOCKS)
        directory.join("h9", DramHost(address, 1))
        directory.publish([(name, DramPlace("h9", 1, SlotRef(i, 1))) for i, name in enumerate(hashes)])
        poll(lambda: directory.num_untold == 0 and directory.counts.joins, "the lie is told")
        try:
            yield
        finally:
            directory.close()


@pytest.mark.parametrize("is_on_disk", [True, False], ids=["on disk too", "nowhere"])
@pytest.mark.parametrize("answers", ["nobody listens", "silence"])
def test_a_host_that_has_not_what_the_directory_says(stored: Stored, answers: str, is_on_disk: bool):
    prompt = words(NUM_WORDS, seed=0 if is_on_disk else 4)
    chain = HashChain(IDENTITY.root)
    chain.extend(prompt[:NUM_STORED])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        if answers == "nobody listens":
            listener.close()
        with lying_directory(stored, chain.hashes, address):
            answer = stored.ask("b", prompt)
    assert answer.num_cached_tokens == (NUM_STORED if is_on_disk else 0)
    stored.check_fallbacks(0 if is_on_disk else 1)
