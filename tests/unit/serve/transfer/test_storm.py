"""Many handoffs at once between real threads, closed at random moments from either side."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from millpond.config.transfer_params import TransferParams
from millpond.core.chance import Chance
from millpond.core.events import HandoffArrived, HandoffClosed, HandoffFailed, HandoffSent
from tests.unit.serve.transfer.harness import Pair, Posted, close_of, until

NUM_LANES = 8
ROUNDS = 12
NUM_TOKENS = 500


def play(pair: Pair, lane: int, chance: Chance) -> None:
    """One engine's thread: prefill after prefill, each closed by both sides at some point."""
    for round_ in range(ROUNDS):
        for move in moves_of(pair, f"{lane}-{round_}", lane, chance):
            move()
            threading.Event().wait(chance.below(4) / 1000)  # so that closings meet every stage


def moves_of(pair: Pair, name: str, lane: int, chance: Chance) -> list[Callable[[], None]]:
    """What both schedulers say about one request, in some order."""
    send = pair.send_order(name, num_tokens=NUM_TOKENS, first_block=1 + 4 * lane, slot=lane)
    receive = pair.receive_order(name, num_tokens=NUM_TOKENS, first_block=29 + 4 * lane, slot=lane)
    moves: list[Callable[[], None]] = [
        partial(pair.sender.start, send),
        partial(pair.receiver.expect, receive),
    ]
    if chance.below(2):
        moves.reverse()
    for num_blocks in (2, 4):
        moves += [partial(pair.sender.rows_ready, send.request_id, 0, row, num_blocks) for row in range(3)]
    moves.append(partial(pair.sender.finish, send.request_id, 0, lane))
    for close in (
        partial(pair.sender.close_request, close_of(send)),
        partial(pair.receiver.close_request, close_of(receive)),
    ):
        moves.insert(2 + chance.below(2 * len(moves)), close)  # at the end in about half of the cases
    return moves


def endings_of(posts: Posted, num_closed: int) -> dict[str, Counter[type]]:
    """Events by request, once every close was answered."""
    counts: dict[str, Counter[type]] = {}
    while sum(count[HandoffClosed] for count in counts.values()) < num_closed:
        event = posts.next()
        counts.setdefault(event.request_id, Counter())[type(event)] += 1
    return counts


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_bug_17_a_storm_of_closings_leaves_nothing_open(
    folder: Path, params: TransferParams, kind: str
) -> None:
    pair = Pair(folder, kind, replace(params, ring_bytes=500_000, lease_s=60.0, gap_s=60.0))
    try:
        lanes = [
            threading.Thread(target=play, args=(pair, lane, Chance(lane, kind))) for lane in range(NUM_LANES)
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join(60)
        num_requests = NUM_LANES * ROUNDS
        sent = endings_of(pair.sender_posts, num_requests)
        received = endings_of(pair.receiver_posts, num_requests)
        for counts, success in ((sent, HandoffSent), (received, HandoffArrived)):
            assert len(counts) == num_requests
            for count in counts.values():
                assert count[HandoffClosed] == 1
                assert count[success] + count[HandoffFailed] <= 1
        # nothing more is asked of either side, and yet all is given back
        until(lambda: pair.sender.stats().num_used_slots == 0)
        until(lambda: pair.receiver.stats().num_offered == 0)
        assert pair.sender.stats().num_open == pair.receiver.stats().num_expected == 0
        assert pair.receiver.stats().num_mismatches == 0
        send, receive = pair.send_order("last", slot=1), pair.receive_order("last", slot=2)
        pair.receiver.expect(receive)
        pair.sender.start(send)
        pair.sender.finish(send.request_id, 0, 5)
        assert isinstance(pair.receiver_posts.next(), HandoffArrived)
        assert isinstance(pair.sender_posts.next(), HandoffSent)
        pair.assert_equal_bytes(send, receive)
    finally:
        pair.stop()
