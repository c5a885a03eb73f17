"""The metadata of the pool: look-ups in process and over TCP, memory per block, balance of the shards.

python -m benchmarks.pool_metadata
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness import say
from millpond.core.extents import ExtentId, StripeId, TenantId
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.pool_map import PoolMap
from millpond.core.units import SECOND_NS
from millpond.policies.metadata_shard import ShardTable, deepened
from millpond.store.child_process import ChildProcess
from millpond.store.index import BlockIndex, ExtentEntry, warm_up
from millpond.store.metadata.client import MetadataClient
from millpond.store.net.messages import Commit, Location, Match, Matched

CHAIN_BLOCKS = 512
INDEX_EXTENTS = 500_000
EXTENT_BLOCKS = 16
WINDOW = 32
TRACE = Path(__file__).parents[2] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"
TRACE_BLOCK_TOKENS = 512
BLOCK_TOKENS = 128
NUM_SHARDS = 8
PROMPT_BLOCKS = 15_000 // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class IndexFigures:
    """A large index."""

    lpm512_us_p50: float
    bytes_per_block: float
    num_blocks: int
    insert_us: float


def measure_index(num_extents: int = INDEX_EXTENTS, num_samples: int = 2000) -> IndexFigures:
    """Fill an index, then match chains of 512 blocks in it, each for the first time."""
    warm_up()
    rng = np.random.default_rng(1)
    index = BlockIndex(max(1 << 16, num_extents * EXTENT_BLOCKS * 2))
    per_chain = CHAIN_BLOCKS // EXTENT_BLOCKS
    num_chains = max(1, num_extents // per_chain)
    kept = [rng.bytes(CHAIN_BLOCKS * BLOCK_HASH_BYTES) for _ in range(min(num_chains, num_samples))]
    before = _resident_bytes()
    began = time.thread_time_ns()
    for number in range(num_chains):
        chain = kept[number] if number < len(kept) else rng.bytes(CHAIN_BLOCKS * BLOCK_HASH_BYTES)
        _insert_chain(index, chain, number)
    insert_us = (time.thread_time_ns() - began) / 1000 / (num_chains * per_chain)
    grown = _resident_bytes() - before
    times: list[int] = []
    for chain in kept:
        begin = time.perf_counter_ns()
        num_blocks, _ = index.match(chain, EXTENT_BLOCKS, 6)
        times.append(time.perf_counter_ns() - begin)
        if num_blocks != CHAIN_BLOCKS:
            raise RuntimeError(f"{num_blocks} blocks found")
    return IndexFigures(
        statistics.median(times) / 1000, grown / index.num_blocks, index.num_blocks, insert_us
    )


def _insert_chain(index: BlockIndex, chain: bytes, number: int) -> None:
    for begin in range(0, CHAIN_BLOCKS, EXTENT_BLOCKS):
        hashes = chain[begin * BLOCK_HASH_BYTES : (begin + EXTENT_BLOCKS) * BLOCK_HASH_BYTES]
        digest = hashes[-BLOCK_HASH_BYTES:] + bytes(16)
        entry = ExtentEntry(
            extent=ExtentId(digest, EXTENT_BLOCKS),
            stripe=StripeId(1, 3, number * CHAIN_BLOCKS + begin),
            first_block=begin,
            missing=0,
            approximate=False,
            tenant=TenantId(1),
            access_hour=5,
            num_kib=100,
        )
        index.insert(entry, hashes)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """Matches over loopback."""

    match_us_p50: float
    raw_us_p50: float
    """Round trip of as many bytes each way between two processes that do nothing else."""

    @property
    def rtts(self) -> float:
        """Matches in round trips."""
        return self.match_us_p50 / self.raw_us_p50


def measure_client(num_samples: int = 1500) -> ClientFigures:
    """Match a chain of 512 blocks (8 KB of keys) through a client, in turn with raw round trips."""
    with tempfile.TemporaryDirectory() as folder:
        shard = ChildProcess(["metadata", "--name", "m0", "--data", folder], "m0")
        try:
            address = shard.wait_address(time.monotonic_ns() + 60 * SECOND_NS)
            return _measure_client(address, num_samples)
        finally:
            shard.end()
            shard.wait(20)


def _measure_client(address: str, num_samples: int) -> ClientFigures:
    client = MetadataClient([address], name="bench")
    client.update_map(PoolMap(1, (), (), (address,)), deadline_ns=_soon())
    chain = np.random.default_rng(2).bytes(CHAIN_BLOCKS * BLOCK_HASH_BYTES)
    for begin in range(0, CHAIN_BLOCKS, WINDOW):
        hashes = chain[begin * BLOCK_HASH_BYTES : (begin + WINDOW) * BLOCK_HASH_BYTES]
        digest = hashes[-BLOCK_HASH_BYTES:] + bytes(16)
        location = Location(digest, WINDOW, 0, 0, begin)
        commit = Commit(1, b"r" * 16, location, begin, bytes(32), 1 << 20, 0)
        client.call(commit, hashes, prefix=chain, deadline_ns=_soon())
    request = Match(1, b"r" * 16, 1, WINDOW)
    matches: list[int] = []
    raws: list[int] = []
    with _Echo() as raw:
        for _ in range(num_samples):
            begin_ns = time.perf_counter_ns()
            answer = client.call(request, chain, prefix=chain, deadline_ns=_soon())
            matches.append(time.perf_counter_ns() - begin_ns)
            if not isinstance(answer, Matched) or answer.num_blocks != CHAIN_BLOCKS:
                raise RuntimeError(f"answered {answer}")
            raws.append(raw.round_trip_ns(chain))
    client.close()
    return ClientFigures(statistics.median(matches) / 1000, statistics.median(raws) / 1000)


class _Echo:
    """A process that sends back a kilobyte for every 8 KB it gets: what a match takes on the wire."""

    ANSWER = 1024

    def __enter__(self) -> _Echo:
        listener = socket.create_server(("127.0.0.1", 0))
        self._pid = os.fork()
        if not self._pid:
            peer, _ = listener.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            left = CHAIN_BLOCKS * BLOCK_HASH_BYTES
            while got := len(peer.recv(left)):
                left -= got
                if not left:
                    peer.sendall(bytes(self.ANSWER))
                    left = CHAIN_BLOCKS * BLOCK_HASH_BYTES
            os._exit(0)
        self._socket = socket.create_connection(listener.getsockname())
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        os.waitpid(self._pid, 0)

    def round_trip_ns(self, sent: bytes) -> int:
        begin_ns = time.perf_counter_ns()
        self._socket.sendall(sent)
        left = self.ANSWER
        while left:
            left -= len(self._socket.recv(left))
        return time.perf_counter_ns() - begin_ns


def _soon() -> int:
    return time.monotonic_ns() + 10 * SECOND_NS


@dataclass(frozen=True, slots=True)
class BalanceFigures:
    """Look-ups of the busiest of 8 shards over their mean, per workload."""

    conversation: float
    conversation_start: float
    """Before popular prefixes were spread."""
    shared_prompt: float
    shared_prompt_start: float
    depth: int
    """Largest depth that the shared prompt got."""

    @property
    def worst(self) -> float:
        """Of both, once spread."""
        return max(self.conversation, self.shared_prompt)


def measure_balance(path: Path = TRACE, num_requests: int = 12_000) -> BalanceFigures:
    """Route the chains of a public trace, alone and behind a tool prompt that all requests share.

    Raises:
        FileNotFoundError: The trace is not there.
    """
    chains = _trace_chains(path, num_requests)
    prompt = b"".join(hashlib.blake2b(b"p%d" % i, digest_size=16).digest() for i in range(PROMPT_BLOCKS))
    conversation = _spread(chains)
    shared = _spread([prompt + chain for chain in chains])
    return BalanceFigures(conversation[1], conversation[0], shared[1], shared[0], shared[2])


def _trace_chains(path: Path, num_requests: int) -> list[bytes]:
    """Chains of 128-token blocks: four of each 512-token block of the trace."""
    per_block = TRACE_BLOCK_TOKENS // BLOCK_TOKENS
    chains: list[bytes] = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            ids = json.loads(line)["hash_ids"]
            names = (b"%d.%d" % (block, part) for block in ids for part in range(per_block))
            chains.append(b"".join(hashlib.blake2b(name, digest_size=16).digest() for name in names))
            if len(chains) == num_requests:
                break
    return [chain for chain in chains if chain]


def _spread(chains: Sequence[bytes]) -> tuple[float, float, int]:
    """(max / mean at the start, at the end, largest depth) when depths grow window after window."""
    pool_map = PoolMap(1, (), (), tuple(f"10.0.0.{i}:7300" for i in range(NUM_SHARDS)))
    start = _max_over_mean(pool_map, chains)
    window = 2000
    for begin in range(0, 12 * window, window):
        part = [chains[at % len(chains)] for at in range(begin, begin + window)]
        table = ShardTable(pool_map)
        keys = [table.lookup_key(chain) for chain in part]
        lookups = Counter(key for key, chain in zip(keys, part, strict=True) if not chain.endswith(key[1]))
        if grown := deepened(pool_map, lookups, len(part)):
            pool_map = replace(pool_map, depths=tuple((dict(pool_map.depths) | grown).items()))
    depths = [depth for _, depth in pool_map.depths]
    return start, _max_over_mean(pool_map, chains), max(depths, default=pool_map.default_depth)


def _max_over_mean(pool_map: PoolMap, chains: Sequence[bytes]) -> float:
    table = ShardTable(pool_map)
    loads = Counter(table.owner(chain) for chain in chains)
    return max(loads.values()) * NUM_SHARDS / len(chains)


def main() -> None:
    """Print everything."""
    say(str(measure_balance()))
    figures = measure_client()
    say(f"{figures} {figures.rtts:.2f} round trips")
    say(str(measure_index()))


if __name__ == "__main__":
    main()
