"""Coded reads in virtual time: the real state machine over simulated storage nodes.

Each node serves `slots` shards at once, first come first served. Service times have a lognormal body and rare
stalls; single nodes may be slow or stopped. The same reads can be run with plain k-of-k reading to compare.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from millpond.control.extent_read import (
    CancelShards,
    CodedRead,
    EndRead,
    ExtentReads,
    ReadAction,
    ReadCounts,
    ReadEnd,
    ShardOutcome,
    StartShards,
)
from millpond.core.extents import NodeId
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.policies.receive_window import ReceiveWindowParams
from millpond.policies.shard_pick import ShardPickParams

SHARD_BYTES = 182 * 1024
_NEVER = 1 << 62
_LOAD_PERIOD_NS = 2 * MILLISECOND_NS


@dataclass(frozen=True, slots=True)
class ReadLoad:
    """What is read, and from what. The defaults are those of the level `hedge_p999_ratio_virtual`."""

    num_reads: int = 150_000
    rho: float = 0.4
    """Utilisation of the nodes if every read took k shards."""
    seed: int = 1
    num_nodes: int = 24
    slots: int = 8
    k: int = 10
    m: int = 2
    median_ms: float = 0.6
    sigma: float = 0.35
    stall_ratio: float = 0.002
    stall_ms: float = 10.0
    """Mean; a stall takes half to one and a half times as long."""
    slow_node: int | None = None
    """Node that takes `slow_factor` times as long."""
    slow_factor: float = 4.0
    stopped_node: int | None = None
    """Node that answers nothing."""
    deadline_s: float = 5.0


@dataclass(slots=True)
class ReadsOutcome:
    """What came of a load."""

    latency_ns: np.ndarray
    """Of the reads that could be decoded."""
    ends: tuple[int, ...]
    extra_ratio: float
    """Bytes asked for beyond k shards, as a share of k shards."""
    counts: ReadCounts = field(default_factory=ReadCounts)

    def quantile_ms(self, quantile: float) -> float:
        """Of the latencies."""
        return float(np.quantile(self.latency_ns, quantile)) / MILLISECOND_NS


class _Node:
    __slots__ = ("busy", "factor", "queue")

    def __init__(self, factor: float) -> None:
        self.queue: deque[tuple[int, int]] = deque()
        self.busy = 0
        self.factor = factor


class _Nodes:
    """All storage nodes: queues, service times, and the heap of what ends when."""

    def __init__(self, load: ReadLoad) -> None:
        rng = np.random.default_rng((load.seed, 0))
        draws = 1 << 18
        body = rng.lognormal(np.log(load.median_ms), load.sigma, draws)
        stalls = (rng.random(draws) < load.stall_ratio) * rng.uniform(0.5, 1.5, draws) * load.stall_ms
        self._service = ((body + stalls) * MILLISECOND_NS).astype(np.int64).tolist()
        self._next_draw = 0
        factors = [1.0] * load.num_nodes
        if load.slow_node is not None:
            factors[load.slow_node] = load.slow_factor
        self._nodes = [_Node(factor) for factor in factors]
        self._stopped = load.stopped_node
        self._slots = load.slots
        self.ends: list[tuple[int, int, int, int]] = []
        """Heap of (time, node, read, shard)."""
        self.dropped: set[tuple[int, int]] = set()
        """Cancelled while they were queued."""

    @property
    def busy_ratio(self) -> float:
        """Share of the slots that serve."""
        return sum(node.busy for node in self._nodes) / (len(self._nodes) * self._slots)

    def ask(self, now_ns: int, node_index: int, read: int, shard: int) -> None:
        if node_index == self._stopped:
            return
        node = self._nodes[node_index]
        if node.busy < self._slots:
            node.busy += 1
            self._serve(now_ns, node, node_index, read, shard)
        else:
            node.queue.append((read, shard))

    def finish(self, now_ns: int, node_index: int) -> None:
        node = self._nodes[node_index]
        while node.queue:
            entry = node.queue.popleft()
            if entry in self.dropped:
                self.dropped.discard(entry)
                continue
            self._serve(now_ns, node, node_index, *entry)
            return
        node.busy -= 1

    def cancel(self, node_index: int, read: int, shard: int) -> None:
        # What is being served runs to its end: a storage node does not take back a disk read.
        if (read, shard) in self._nodes[node_index].queue:
            self.dropped.add((read, shard))

    def _serve(self, now_ns: int, node: _Node, node_index: int, read: int, shard: int) -> None:
        service_ns = self._service[self._next_draw]
        self._next_draw = (self._next_draw + 1) % len(self._service)
        heapq.heappush(self.ends, (now_ns + int(service_ns * node.factor), node_index, read, shard))


def stripe_nodes(load: ReadLoad) -> list[tuple[int, ...]]:
    """Groups of k + m nodes that load every node and every shard position equally."""
    width = load.k + load.m
    steps = [step for step in range(1, load.num_nodes) if np.gcd(step, load.num_nodes) == 1]
    return [
        tuple((first + step * shard) % load.num_nodes for shard in range(width))
        for step in steps
        for first in range(load.num_nodes)
    ]


def arrivals_ns(load: ReadLoad) -> list[int]:
    """Poisson arrivals of all reads."""
    mean_ms = load.median_ms * float(np.exp(load.sigma**2 / 2)) + load.stall_ratio * load.stall_ms
    per_ms = load.rho * load.num_nodes * load.slots / (load.k * mean_ms)
    rng = np.random.default_rng((load.seed, 1))
    gaps = rng.exponential(MILLISECOND_NS / per_ms, load.num_reads)
    return np.cumsum(gaps).astype(np.int64).tolist()


def run_hedged(load: ReadLoad, pick: ShardPickParams, window: ReceiveWindowParams) -> ReadsOutcome:
    """Run a load through `ExtentReads`."""
    return _HedgedRun(load, pick, window).run()


class _HedgedRun:
    def __init__(self, load: ReadLoad, pick: ShardPickParams, window: ReceiveWindowParams) -> None:
        self._load = load
        self._machine = ExtentReads(pick, window)
        self._nodes = _Nodes(load)
        self._began_ns: dict[int, int] = {}
        self._groups = stripe_nodes(load)
        self._names = [tuple(NodeId(f"s{node}") for node in group) for group in self._groups]
        self._latency_ns: list[int] = []

    def run(self) -> ReadsOutcome:
        load, machine, nodes = self._load, self._machine, self._nodes
        picks = (
            np.random.default_rng((load.seed, 2)).integers(len(self._groups), size=load.num_reads).tolist()
        )
        self._group_of = picks
        arrivals = arrivals_ns(load)
        arrivals.append(_NEVER)
        deadline_ns = int(load.deadline_s * SECOND_NS)
        ends, next_read, next_load_ns = nodes.ends, 0, 0
        while True:
            end_ns = ends[0][0] if ends else _NEVER
            timer_ns = machine.next_time_ns or _NEVER
            now_ns = min(end_ns, arrivals[next_read], timer_ns)
            if now_ns == _NEVER:
                break
            if now_ns >= next_load_ns:
                next_load_ns = now_ns + _LOAD_PERIOD_NS
                machine.utilisation += 0.1 * (nodes.busy_ratio - machine.utilisation)
            if now_ns == end_ns:
                _, node, read, shard = heapq.heappop(ends)
                nodes.finish(now_ns, node)
                self._carry_out(now_ns, machine.on_shard(now_ns, read, shard, ShardOutcome.VALID))
            elif now_ns == arrivals[next_read]:
                query = CodedRead(self._names[picks[next_read]], load.k, SHARD_BYTES, now_ns + deadline_ns)
                self._began_ns[next_read] = now_ns
                self._carry_out(now_ns, machine.begin(now_ns, next_read, query))
                next_read += 1
            else:
                self._carry_out(now_ns, machine.on_time(now_ns))
        counts = machine.counts
        return ReadsOutcome(np.array(self._latency_ns), counts.ends, counts.extra_ratio, counts)

    def _carry_out(self, now_ns: int, actions: list[ReadAction]) -> None:
        for action in actions:
            match action:
                case StartShards(read, shards):
                    group = self._groups[self._group_of[read]]
                    for shard in shards:
                        self._nodes.ask(now_ns, group[shard], read, shard)
                case CancelShards(read, shards):
                    group = self._groups[self._group_of[read]]
                    for shard in shards:
                        self._nodes.cancel(group[shard], read, shard)
                case EndRead(read, end):
                    began_ns = self._began_ns.pop(read)
                    if end == ReadEnd.DECODABLE:
                        self._latency_ns.append(now_ns - began_ns)
                case _:
                    pass


def run_plain(load: ReadLoad) -> ReadsOutcome:
    """Run a load with k-of-k reads: what a store without coded reads would do."""
    nodes = _Nodes(load)
    groups = stripe_nodes(load)
    picks = np.random.default_rng((load.seed, 2)).integers(len(groups), size=load.num_reads).tolist()
    arrivals = arrivals_ns(load)
    arrivals.append(_NEVER)
    left = [load.k] * load.num_reads
    latency_ns: list[int] = []
    ends, next_read = nodes.ends, 0
    while ends or next_read < load.num_reads:
        if ends and ends[0][0] <= arrivals[next_read]:
            now_ns, node, read, _ = heapq.heappop(ends)
            nodes.finish(now_ns, node)
            left[read] -= 1
            if not left[read]:
                latency_ns.append(now_ns - arrivals[read])
        else:
            now_ns = arrivals[next_read]
            for shard in range(load.k):
                nodes.ask(now_ns, groups[picks[next_read]][shard], next_read, shard)
            next_read += 1
    done = len(latency_ns)
    return ReadsOutcome(np.array(latency_ns), (done, 0, 0, load.num_reads - done), 0.0)
