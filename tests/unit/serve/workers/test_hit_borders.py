"""V4.1 over a real node daemon: hits that end anywhere, with the state of that place, an older one, none,
or one that only the directory knows of. Exact requests equal a cold run bit for bit; a bounded replay equals
the plain one.
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from millpond.control.group_scheduler import GroupParams, GroupRole
from millpond.control.prefill_scheduler import PrefillParams
from millpond.core.hashing import BLOCK_HASH_BYTES, HashChain
from millpond.core.node_messages import SnapshotPut
from millpond.core.request import KvIdentity, StateRestore
from millpond.engine.model.engine import MemoryPlan, V41Engine
from millpond.store.dram_arena import SlotRef
from millpond.store.dram_directory import DramHost, DramPlace
from millpond.store.metadata.client import MetadataClient
from millpond.store.metadata.directory import STATES
from millpond.store.remote_directory import RemoteDirectory
from tests.unit.engine.model.tiny_v41 import EXACT, Hand, prompt, tiny_model
from tests.unit.serve.node.rig import poll, rig
from tests.unit.serve.workers.kv_service import IDENTITY, Answer, KvService, kv_service
from tests.unit.store.metadata.shards import TOKEN

NUM_OUTPUT = 4
HIT = 256
WHOLE = array("i", prompt(384, seed=31).tolist())
SHORT_STRIDE = 25
MAX_TRIES = 20


@pytest.fixture(scope="module")
def model():
    return tiny_model(EXACT["bf16"])


def digests() -> list[bytes]:
    """Of the blocks of all prompts here."""
    chain = HashChain(IDENTITY.root)
    chain.extend(WHOLE)
    return chain.digests


class Rank:
    """A rank and its daemon, who have the first two blocks of `WHOLE` and the states at 128 and 256."""

    def __init__(self, service: KvService, model: object, max_step_tokens: int = 300) -> None:
        def engine() -> V41Engine:
            return V41Engine(model, MemoryPlan(24, 4), max_model_len=1024, num_kept_tokens=0)

        self.service = service
        self.daemon = service.start_daemon(engine())
        self.engine = engine()
        params = GroupParams(prefill=PrefillParams(max_step_tokens=max_step_tokens))
        self.group = service.add_group("m0", GroupRole.MIXED, self.engine, params)
        self._num_asked = 0
        for length in (130, 260):
            self.ask(WHOLE[:length], 1)
        store = self.daemon.memory.snapshots._store
        self.states = {one.position: one.state for one in store._snapshots.values()}
        assert self.states.keys() == {128, HIT}

    def ask(self, token_ids: array[int], count: int = NUM_OUTPUT, **more: object) -> Answer:
        self._num_asked += 1
        options = {"state_restore": StateRestore.EXACT, **more}
        answer = self.service.ask(f"r{self._num_asked}", token_ids, count, **options)
        self.service.settle()
        return answer

    def cold(self, token_ids: array[int]) -> array[int]:
        """The text under a root of which nothing is kept."""
        root = KvIdentity(bytes([self._num_asked]) * 32, 2)
        answer = self.ask(token_ids, kv=root)
        assert answer.num_cached_tokens == 0
        return answer.token_ids

    def keep_states(self, positions: Collection[int]) -> None:
        """Have these states and no others of `WHOLE`."""
        snapshots = self.daemon.memory.snapshots
        with snapshots._lock:
            for position in self.states:
                found = snapshots._store._snapshots.get(digests()[position // 128 - 1])
                if found is not None:
                    snapshots._forget([snapshots._store._drop(found)])
        for position in positions:
            digest = digests()[position // 128 - 1]
            snapshots.put(SnapshotPut(IDENTITY, digest, position, self.states[position]))


@pytest.mark.campaign("borders")
def test_bug_31_campaign_borders_warm_equals_cold_wherever_the_hit_ends(model, num_rounds):
    """Of all remainders of 128 in the long form; with the state of the hit's end, an older one, and none."""
    with kv_service() as service:
        rank = Rank(service, model)
        for length in range(HIT + 1, HIT + 129, 1 if num_rounds else SHORT_STRIDE):
            token_ids = WHOLE[:length]
            cold = rank.cold(token_ids)
            for positions in ((128, HIT), (128,), ()):
                rank.keep_states(positions)
                answer = rank.ask(token_ids)
                assert answer.num_cached_tokens == max(positions, default=0), length
                assert answer.token_ids == cold, (length, positions)


def replay_ref(model, token_ids: array[int], begin: int) -> list[int]:
    """Text after a bounded replay from `begin`: one sequence alone, its tail in one piece."""
    hand, ids = Hand(model), np.array(token_ids, np.int32)
    hand.place("a", 4)
    hand.run(("a", ids, 0, HIT))
    hand.caches.slots.fill_(0x7F)  # all windows are lost
    hidden = hand.run(("a", ids, begin, len(ids), {"window_begin": begin, "write_begin": HIT}))
    text: list[int] = []
    while True:
        with torch.inference_mode():
            text.append(int(model.logits(hidden[-1:]).argmax()))
        if len(text) == NUM_OUTPUT:
            return text
        ids = np.append(ids, np.int32(text[-1]))
        hidden = hand.run(("a", ids, len(ids) - 1, len(ids), {"window_begin": begin}))


@pytest.mark.parametrize("max_step_tokens", [300, 37])
@pytest.mark.parametrize("length", [257, 384])
def test_a_bounded_replay_equals_the_plain_one_and_rewrites_no_block(
    model, monkeypatch, length, max_step_tokens
):
    with kv_service() as service:
        rank = Rank(service, model, max_step_tokens)
        rank.keep_states(())
        tables = []
        start = rank.group.kv.swaps.start

        def note(order, rows):
            tables.append(order.block_table)
            start(order, rows)

        monkeypatch.setattr(type(rank.group.kv.swaps), "start", lambda _, *both: note(*both))
        answer = rank.ask(WHOLE[:length], state_restore=StateRestore.REPLAY)
        begin = HIT - rank.engine.replay_tokens
        assert answer.num_cached_tokens == begin
        assert list(answer.token_ids) == replay_ref(model, WHOLE[:length], begin)
        (table,) = tables
        assert len(table) == HIT // 128
        arena = rank.daemon.memory.arena
        names = arena._table["hash"]
        for block, digest in zip(table, digests(), strict=False):
            (slot,) = [i for i in range(arena.num_slots) if names[i].tobytes() == digest[:BLOCK_HASH_BYTES]]
            rows = [bytes(rank.engine.read_row(block, row)) for row in range(len(rank.engine.layout.rows))]
            assert b"".join(rows) == bytes(arena.slots[slot])[: rank.engine.layout.block_bytes]


@contextmanager
def lying_directory(metadata: tuple[str, ...], address: str) -> Iterator[None]:
    """A host that does not exist is said to have the state at the end of the hit."""
    with closing(MetadataClient(metadata, name="liar", token=TOKEN)) as client:
        directory = RemoteDirectory(client, STATES)
        directory.join("h9", DramHost(address, 1))
        name = digests()[HIT // 128 - 1][:BLOCK_HASH_BYTES]
        directory.publish([(name, DramPlace("h9", 1, SlotRef(HIT // 128, 1)))])
        poll(lambda: directory.num_untold == 0 and directory.counts.joins, "the lie is told")
        try:
            yield
        finally:
            directory.close()


@pytest.mark.parametrize("says", ["nothing", "that nobody listens"])
def test_a_state_that_only_the_directory_knows_of_is_done_without_and_counted(
    model, tmp_path: Path, says: str
):
    with rig(tmp_path) as pool, kv_service(metadata=pool.metadata) as service:
        rank = Rank(service, model)
        rank.keep_states((128,))
        snapshots = rank.daemon.memory.snapshots
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            if says != "nothing":
                listener.close()
            with lying_directory(pool.metadata, address):
                cold = rank.cold(WHOLE[:300])
                for _ in range(MAX_TRIES):  # a directory that does not answer within 20 ms names nothing
                    rank.keep_states((128,))
                    poll(lambda: snapshots._directory.num_untold == 0, "our own is out of the directory")
                    answer = rank.ask(WHOLE[:300])
                    assert answer.num_cached_tokens == 128
                    assert answer.token_ids == cold
                    if snapshots.fetches.late:
                        break
        assert (snapshots.fetches.fetched, snapshots.fetches.late) == (0, 1)
