"""The pool's client against a dict: any order of writes, reads, losses and lies; never a wrong byte."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from millpond.control.extent_write import ExtentWriteParams, WriteEnd
from millpond.policies.shard_pick import ShardPickParams
from millpond.store.net.node_link import NodeLinkParams
from millpond.store.pool import Pool
from tests.unit.store.pool_cluster import LAYOUT, SETTINGS, K, M, chain_of, cluster, soon

NUM_CHAINS = 3
MAX_BLOCKS = 70
CHAINS = [chain_of(MAX_BLOCKS, first_id=100_000 * index) for index in range(NUM_CHAINS)]
NODES = st.integers(0, 7)
QUICK = replace(
    SETTINGS,
    pick=ShardPickParams(first_hedge_ms=20, min_eject_s=0.2, max_eject_s=0.4),
    write=ExtentWriteParams(deadline_s=2.0, last_shard_ms=20),
    link=NodeLinkParams(min_redial_ms=1, max_redial_s=0.01),
)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.made = self.stack.enter_context(cluster(settings=QUICK))
        self.peers = list(self.made.peers.values())
        self.written: dict[bytes, int] = {}
        """Digest of the last block of each extent that is published -> blocks."""

    @property
    def bad(self) -> set[str]:
        """Nodes that cannot be relied on now."""
        return {
            peer.name
            for peer in self.peers
            if not peer.is_open or vars(peer.faults) != vars(type(peer.faults)())
        }

    def reconnect(self) -> None:
        """A new client, as after a restart: it knows nothing of the nodes' past."""
        self.made.pool.close()
        pool = Pool(LAYOUT, self.made.metadata, name="test", token="t", settings=QUICK)
        self.made.pool = self.stack.enter_context(pool)

    @initialize()
    def write_something(self) -> None:
        self.write(0, 0, 40)

    @rule(
        chain=st.integers(0, NUM_CHAINS - 1), begin=st.integers(0, MAX_BLOCKS - 1), length=st.integers(1, 40)
    )
    def write(self, chain: int, begin: int, length: int) -> None:
        end = min(MAX_BLOCKS, begin + length)
        for result in self.made.put(CHAINS[chain], begin, end):
            name = CHAINS[chain].digests[result.end - 1]
            if result.result == WriteEnd.PUBLISHED:
                self.written[name] = result.end - result.begin
            assert result.result != WriteEnd.BEATEN, "there is one writer"
            if not self.bad:
                assert result.result in {WriteEnd.PUBLISHED, WriteEnd.EXISTS}

    @rule(chain=st.integers(0, NUM_CHAINS - 1), length=st.integers(1, MAX_BLOCKS))
    def read(self, chain: int, length: int) -> None:
        wanted = replace(CHAINS[chain], digests=CHAINS[chain].digests[:length])
        before = dict(self.made.metadata.extents)
        hit, result = self.made.read(wanted, deadline_ns=soon(5))
        assert result.num_blocks <= hit.num_blocks
        if result.num_blocks < hit.num_blocks:
            lost = hit.extents[next(index for index, end in enumerate(result.ends) if end)].location
            nodes = self.nodes_of(lost)
            assert lost.missing.bit_count() + len(nodes & self.bad) > M, (
                "two of its nodes may be bad, not more"
            )
        assert set(self.made.metadata.extents) <= set(before)

    def nodes_of(self, location: object) -> set[str]:
        epoch = self.made.metadata.map.epochs[0]
        return {str(epoch.points[point]) for point in epoch.groups[location.group]}

    @rule(index=NODES)
    def kill(self, index: int) -> None:
        if len(self.bad - {self.peers[index].name}) < K:
            self.peers[index].close()

    @rule(index=NODES)
    def restart(self, index: int) -> None:
        if not self.peers[index].is_open:
            self.peers[index].reopen()
            self.reconnect()

    @rule(
        index=NODES,
        fault=st.sampled_from(["is_silent", "flip_payload", "wrong_shard", "short", "refuse_puts"]),
    )
    def lie(self, index: int, fault: str) -> None:
        if len(self.bad - {self.peers[index].name}) < M:
            setattr(self.peers[index].faults, fault, True)

    @rule(index=NODES)
    def repent(self, index: int) -> None:
        self.peers[index].faults = type(self.peers[index].faults)()

    @invariant()
    def only_published_extents_are_known(self) -> None:
        assert {key[2] for key in self.made.metadata.extents} <= set(self.written)
        assert not self.made.metadata.leases

    def teardown(self) -> None:
        self.stack.close()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
