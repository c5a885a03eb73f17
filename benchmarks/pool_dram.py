"""What a DRAM level saves, on recorded sessions: `python -m benchmarks.pool_dram TRACE [SESSIONS]`.

Replays who asks for which blocks and when through the eviction orders and the spill policy of the product,
without moving a byte. Sessions of the agent trace are laid over each other at random, as on a service that
many use. Every block that was computed before would be read from disk; what is in memory then is saved.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from millpond.core.chance import Chance
from millpond.core.units import SECOND_NS
from millpond.policies.dram_evict import make_order
from millpond.policies.spill import SpillParams, TailBook, first_to_write

TOKENS = 1024
"""Unit of the replay: eight blocks at once."""
BYTES_PER_TOKEN = 890
"""DeepSeek-V4.1-Flash (kvstore 1.2)."""
WINDOW = 32
SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)
OVERLAP_S = 4 * 3600
"""Sessions begin within so many seconds."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request: the units of its prompt, in the order of its chain."""

    at_s: float
    session: int
    units: tuple[int, ...]
    num_blocks: int
    """Of 128 tokens."""


def agent_calls(path: Path, max_sessions: int, seed: int) -> list[Call]:
    """Calls of the agent trace, by time."""
    chance = Chance(seed, "session starts")
    calls: list[Call] = []
    for number, session in enumerate(_lines(path)):
        if number == max_sessions:
            break
        start_s = chance.uniform() * OVERLAP_S
        per_unit = TOKENS // session["block_size"]
        for request in session["requests"]:
            if "hash_runs" not in request:
                continue
            runs = request["hash_runs"]
            ids = [
                first + step
                for first, length in zip(runs[::2], runs[1::2], strict=True)
                for step in range(length)
            ]
            # A unit is named by its last id: ids never come back behind another prefix.
            units = tuple(number << 32 | ids[end] for end in range(per_unit - 1, len(ids), per_unit))
            calls.append(Call(start_s + request["t"], number, units, len(ids) * session["block_size"] // 128))
    return sorted(calls, key=lambda call: call.at_s)


def chat_calls(path: Path) -> list[Call]:
    """Calls of a Mooncake trace: 512-token blocks, shared by all."""
    return [
        Call(line["timestamp"] / 1000, number, tuple(line["hash_ids"]), len(line["hash_ids"]) * 4)
        for number, line in enumerate(_lines(path))
    ]


def saved_share(calls: list[Call], order_name: str, capacity: int) -> float:
    """Of the units that were computed before: how many are in memory when they are asked for."""
    order, held = make_order(order_name, capacity), set[int]()
    computed: set[int] = set()
    asked = saved = 0
    for call in calls:
        for unit in call.units:
            asked += unit in computed
            saved += unit in held
        for unit in reversed(call.units):  # tail first
            name = unit.to_bytes(8, "big")
            if unit in held:
                order.touch(name)
                continue
            if len(held) >= capacity:
                victim = order.pop()
                held.discard(int.from_bytes(victim or b"", "big"))
            order.insert(name)
            held.add(unit)
        computed.update(call.units)
    return saved / max(1, asked)


def writes_per_block(calls: list[Call], idle_s: float) -> tuple[float, float]:
    """(blocks written per block computed, blocks per extent) of the spill policy, without pressure."""
    book = TailBook(WINDOW, SpillParams(idle_s=idle_s))
    ends: dict[int, int] = {}
    written = extents = 0

    def write(now_ns: int) -> None:
        nonlocal written, extents
        for tail in book.take_due(now_ns):
            written += tail.end - first_to_write(tail.begin, tail.end, WINDOW)
            extents += 1

    next_look_ns = 0
    for call in calls:
        now_ns = int(call.at_s * SECOND_NS)
        if now_ns >= next_look_ns:
            write(now_ns)
            next_look_ns = now_ns + SECOND_NS
        begin, end = ends.get(call.session, 0), call.num_blocks
        book.touch(now_ns, _tip(call.session, begin))
        for block in range(begin, end):
            book.add(now_ns, _tip(call.session, block), block, block + 1, _tip(call.session, block + 1))
        ends[call.session] = max(begin, end)
    write(int(calls[-1].at_s + idle_s + 1) * SECOND_NS)
    return written / sum(ends.values()), written / extents


def _tip(session: int, end: int) -> bytes:
    return session.to_bytes(4, "big") + end.to_bytes(4, "big")


def _lines(path: Path) -> Iterator[dict]:
    with gzip.open(path, "rt") as file:
        for line in file:
            yield json.loads(line)


def main(path: Path, max_sessions: int) -> None:
    """Print a line of JSON for each size of memory."""
    is_agent = "weka" in path.name
    calls = agent_calls(path, max_sessions, seed=1) if is_agent else chat_calls(path)
    tokens = TOKENS if is_agent else 512
    footprint = len({unit for call in calls for unit in call.units})
    print(json.dumps({"calls": len(calls), "footprint_gb": footprint * tokens * BYTES_PER_TOKEN / 1e9}))
    for share in SHARES:
        capacity = max(1, int(share * footprint))
        row: dict[str, float] = {
            "dram_share": share,
            "dram_gb": round(capacity * tokens * BYTES_PER_TOKEN / 1e9, 2),
        }
        for name in ("lru", "s3fifo"):
            row[name] = round(saved_share(calls, name, capacity), 3)
        print(json.dumps(row), flush=True)
    if is_agent:
        for idle_s in (10.0, 30.0, 120.0):
            per_block, per_extent = writes_per_block(calls, idle_s)
            print(
                json.dumps(
                    {
                        "idle_s": idle_s,
                        "writes_per_block": round(per_block, 3),
                        "blocks_per_extent": round(per_extent, 1),
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 120)
