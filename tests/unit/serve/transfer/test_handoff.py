"""Two ranks, real sockets and threads: what is sent arrives, and every ending is reported once."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.config.transfer_params import TransferParams
from millpond.core.errors import ConfigError, InvariantBroken
from millpond.core.events import HandoffArrived, HandoffClosed, HandoffFailed, HandoffSent
from millpond.core.ids import BlockId, RequestId
from millpond.core.plan import HandoffClose, HandoffSend
from millpond.core.units import SECOND_NS, num_blocks_for
from millpond.serve.transfer import peer
from millpond.serve.transfer.protocol import checksum
from millpond.serve.transfer.receiver import HandoffReceiver
from millpond.serve.transfer.sender import HandoffSender
from millpond.serve.transfer.stream import DataAddress
from tests.unit.serve.transfer.harness import TOKEN, BytesEngine, Pair, Posted, close_of, until

CLOSE_LIMIT_NS = 10 * SECOND_NS
"""Tenfold of what a release may take; it needs about a millisecond, and a tick if a thread is amid a copy."""


def send_all(pair: Pair, send: HandoffSend, first_token_id: int = 7, *, is_approximate: bool = False) -> None:
    """As a prefill would: two steps, the rows of each in order."""
    pair.sender.start(send)
    half = num_blocks_for(send.num_tokens) // 2
    for num_blocks in (half, num_blocks_for(send.num_tokens)):
        for row in range(3):
            pair.sender.rows_ready(send.request_id, send.attempt, row, num_blocks)
    pair.sender.finish(send.request_id, send.attempt, first_token_id, is_approximate=is_approximate)


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 300, 1280])
@pytest.mark.parametrize("is_expected_first", [True, False])
def test_a_sequence_arrives_whole(pair: Pair, num_tokens: int, is_expected_first: bool) -> None:
    send, receive = pair.send_order(num_tokens=num_tokens), pair.receive_order(num_tokens=num_tokens)
    if is_expected_first:
        pair.receiver.expect(receive)
        send_all(pair, send)
    else:
        send_all(pair, send)
        until(lambda: pair.receiver.stats().num_offered == 1)
        pair.receiver.expect(receive)
    assert pair.receiver_posts.next() == HandoffArrived(receive.request_id, 0, first_token_id=7)
    assert pair.sender_posts.next() == HandoffSent(send.request_id, 0)
    pair.assert_equal_bytes(send, receive)
    until(lambda: pair.sender.stats().num_used_slots == 0)
    assert pair.receiver.stats().num_mismatches == 0


def test_a_row_that_is_written_again_after_it_was_copied_does_not_spoil_what_travels(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a load that broke: what was announced is computed anew."""
    send, receive = pair.send_order(), pair.receive_order()

    def write_again() -> None:
        for rows in (*pair.source.rows, pair.source.state):
            rows += 1

    def interrupted(handle: int, block_index: int, row: int, payload: memoryview) -> int:
        write_again()
        digest = checksum(handle, block_index, row, payload)
        write_again()
        return digest

    monkeypatch.setattr(peer, "checksum", interrupted)
    pair.receiver.expect(receive)
    send_all(pair, send)
    assert pair.receiver_posts.next() == HandoffArrived(receive.request_id, 0, first_token_id=7)
    assert pair.receiver.stats().num_mismatches == 0


@pytest.mark.parametrize("is_approximate", [False, True])
def test_the_decode_side_hears_whether_what_arrives_is_approximate(pair: Pair, is_approximate: bool) -> None:
    send, receive = pair.send_order(), pair.receive_order()
    pair.receiver.expect(receive)
    send_all(pair, send, is_approximate=is_approximate)
    assert pair.receiver_posts.next() == HandoffArrived(receive.request_id, 0, 7, is_approximate)


def test_rows_travel_before_the_prompt_is_finished(pair: Pair) -> None:
    send, receive = pair.send_order(), pair.receive_order()
    pair.receiver.expect(receive)
    pair.sender.start(send)
    pair.sender.rows_ready(send.request_id, 0, 0, 2)
    row_bytes = pair.source.layout.rows[0].num_bytes
    until(lambda: pair.receiver.stats().num_bytes == 2 * row_bytes)
    assert bytes(pair.target.read_row(receive.block_table[1], 0)) == bytes(
        pair.source.read_row(BlockId(2), 0)
    )
    pair.sender.rows_ready(send.request_id, 0, 0, 2)  # said twice: sent once
    pair.sender.rows_ready(send.request_id, 0, 0, 1)  # never backwards
    pair.sender.finish(send.request_id, 0, 7)
    assert isinstance(pair.receiver_posts.next(), HandoffArrived)
    assert pair.receiver.stats().num_discarded == 0
    assert isinstance(pair.sender_posts.next(), HandoffSent)


def test_two_hundred_in_a_row_use_one_connection_and_leave_nothing(pair: Pair) -> None:
    num_open = 0
    for i in range(200):
        first_block, slot = 1 + i % 10, i % 16
        send = pair.send_order(f"r{i}", num_tokens=300, first_block=first_block, slot=slot)
        receive = pair.receive_order(f"r{i}", num_tokens=300, first_block=30 + i % 7, slot=slot)
        pair.receiver.expect(receive)
        send_all(pair, send, i)
        assert pair.receiver_posts.next() == HandoffArrived(receive.request_id, 0, first_token_id=i)
        assert pair.sender_posts.next() == HandoffSent(send.request_id, 0)
        pair.assert_equal_bytes(send, receive)
        num_open = num_open or len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert pair.sender.stats().num_connections == 1
    assert pair.sender.stats().num_sent == pair.receiver.stats().num_arrived == 200
    until(lambda: pair.sender.stats().num_used_slots == 0)


def test_eight_at_once_do_not_mix(pair: Pair) -> None:
    orders = [
        (
            pair.send_order(f"r{i}", num_tokens=500, first_block=1 + 4 * i, slot=i),
            pair.receive_order(f"r{i}", num_tokens=500, first_block=29 + 4 * i, slot=15 - i),
        )
        for i in range(8)
    ]
    for send, receive in orders:
        pair.sender.start(send)
        pair.receiver.expect(receive)
    for row in range(3):
        for send, _ in orders:
            pair.sender.rows_ready(send.request_id, 0, row, 4)
    for i, (send, _) in enumerate(orders):
        pair.sender.finish(send.request_id, 0, i)
    arrived = pair.receiver_posts.take(8)
    assert {(event.request_id, event.first_token_id) for event in arrived} == {(f"r{i}", i) for i in range(8)}
    assert all(isinstance(event, HandoffSent) for event in pair.sender_posts.take(8))
    for send, receive in orders:
        pair.assert_equal_bytes(send, receive)


# --- closing ------------------------------------------------------------------------------------------


def close_within_limit(close: HandoffClose, side: HandoffSender | HandoffReceiver, posts: Posted) -> None:
    """Close, and take the answer in time."""
    begin_ns = time.monotonic_ns()
    side.close_request(close)
    assert posts.next() == HandoffClosed(close.request_id, close.attempt)
    assert time.monotonic_ns() - begin_ns < CLOSE_LIMIT_NS


def test_closing_something_unknown_is_answered(pair: Pair) -> None:
    close = close_of(pair.send_order("never"))
    close_within_limit(close, pair.sender, pair.sender_posts)
    close_within_limit(close, pair.receiver, pair.receiver_posts)


def test_bug_12_the_receiver_closes_before_anything_came(pair: Pair) -> None:
    receive = pair.receive_order()
    pair.receiver.expect(receive)
    close_within_limit(close_of(receive), pair.receiver, pair.receiver_posts)
    assert pair.receiver.stats().num_expected == 0


def test_bug_12_the_sender_closes_before_it_was_expected(pair: Pair) -> None:
    send = pair.send_order()
    send_all(pair, send)
    until(lambda: pair.receiver.stats().num_offered == 1)
    close_within_limit(close_of(send), pair.sender, pair.sender_posts)
    until(lambda: pair.receiver.stats().num_offered == 0)


def test_the_receiver_closes_what_it_never_expected(pair: Pair) -> None:
    send = pair.send_order()
    send_all(pair, send)
    until(lambda: pair.receiver.stats().num_offered == 1)
    close_within_limit(close_of(send), pair.receiver, pair.receiver_posts)
    failed = pair.sender_posts.next()
    assert isinstance(failed, HandoffFailed)
    assert "closed by the receiver" in failed.why


def open_half(pair: Pair) -> tuple[HandoffSend, HandoffClose]:
    """A request of which some rows arrived."""
    send, receive = pair.send_order(), pair.receive_order()
    pair.receiver.expect(receive)
    pair.sender.start(send)
    pair.sender.rows_ready(send.request_id, 0, 0, 3)
    until(lambda: pair.receiver.stats().num_bytes > 0)
    return send, close_of(receive)


def test_bug_12_the_sender_closes_in_the_middle(pair: Pair) -> None:
    send, close = open_half(pair)
    close_within_limit(close, pair.sender, pair.sender_posts)
    failed = pair.receiver_posts.next()
    assert failed == HandoffFailed(send.request_id, 0, why="sender: closed by the sender")
    pair.sender.rows_ready(send.request_id, 0, 1, 3)  # late words of the engine's thread change nothing
    pair.sender.finish(send.request_id, 0, 7)
    assert pair.sender.stats().num_open == 0
    assert_still_works(pair)


def test_bug_12_the_receiver_closes_in_the_middle(pair: Pair) -> None:
    send, close = open_half(pair)
    close_within_limit(close, pair.receiver, pair.receiver_posts)
    failed = pair.sender_posts.next()
    assert failed == HandoffFailed(send.request_id, 0, why="receiver: closed by the receiver")
    assert_still_works(pair)


def test_closing_after_the_end_is_answered_too(pair: Pair) -> None:
    send, receive = pair.send_order(), pair.receive_order()
    pair.receiver.expect(receive)
    send_all(pair, send)
    assert isinstance(pair.receiver_posts.next(), HandoffArrived)
    assert isinstance(pair.sender_posts.next(), HandoffSent)
    close_within_limit(close_of(send), pair.sender, pair.sender_posts)
    close_within_limit(close_of(receive), pair.receiver, pair.receiver_posts)


def assert_still_works(pair: Pair, name: str = "next") -> None:
    """Another request goes through the same pair."""
    send, receive = pair.send_order(name, 1), pair.receive_order(name, 1)
    pair.receiver.expect(receive)
    send_all(pair, send)
    until(lambda: not pair.receiver_posts.is_empty())
    assert pair.receiver_posts.next() == HandoffArrived(receive.request_id, 1, first_token_id=7)
    assert pair.sender_posts.next() == HandoffSent(send.request_id, 1)
    pair.assert_equal_bytes(send, receive)


# --- disagreement and absence -------------------------------------------------------------------------


def test_an_old_attempt_is_not_taken_for_the_new_one(pair: Pair) -> None:
    old, new = pair.send_order(attempt=0, first_block=1), pair.send_order(attempt=1, first_block=10)
    receive = pair.receive_order(attempt=1)
    pair.receiver.expect(receive)
    send_all(pair, old)
    send_all(pair, new)
    assert pair.receiver_posts.next() == HandoffArrived(receive.request_id, 1, first_token_id=7)
    assert pair.sender_posts.next() == HandoffSent(new.request_id, 1)
    pair.assert_equal_bytes(new, receive)
    assert pair.sender.stats().num_open == 1


def test_another_number_of_tokens_fails_both_sides(pair: Pair) -> None:
    pair.receiver.expect(pair.receive_order(num_tokens=300))
    send_all(pair, pair.send_order(num_tokens=301))
    for posts in (pair.receiver_posts, pair.sender_posts):
        failed = posts.next()
        assert isinstance(failed, HandoffFailed)
        assert "number of tokens" in failed.why


def test_too_short_a_block_table_is_our_own_bug(pair: Pair) -> None:
    send, receive = pair.send_order(), pair.receive_order()
    with pytest.raises(InvariantBroken):
        pair.sender.start(replace(send, block_table=send.block_table[:1]))
    with pytest.raises(InvariantBroken):
        pair.receiver.expect(replace(receive, block_table=receive.block_table[:1]))


def test_leases_end_what_only_one_side_wants(folder: Path, params: TransferParams) -> None:
    pair = Pair(folder, "unix", replace(params, lease_s=0.3))
    try:
        pair.receiver.expect(pair.receive_order("expected"))
        send_all(pair, pair.send_order("offered"))
        failed = pair.receiver_posts.next()
        assert (failed.request_id, type(failed)) == ("expected", HandoffFailed)
        failed = pair.sender_posts.next()
        assert (failed.request_id, type(failed)) == ("offered", HandoffFailed)
        until(lambda: pair.receiver.stats().num_offered == 0)
        assert_still_works(pair)
    finally:
        pair.stop()


def test_too_many_announced_requests_are_rejected(folder: Path, params: TransferParams) -> None:
    pair = Pair(folder, "unix", replace(params, lease_s=30.0, max_open_requests=3))
    try:
        for i in range(5):
            pair.sender.start(pair.send_order(f"r{i}", slot=i))
        assert {pair.sender_posts.next().request_id for _ in range(2)} == {"r3", "r4"}
        assert pair.receiver.stats().num_offered == 3
    finally:
        pair.stop()


def test_a_receiver_that_is_not_there_fails_the_request(pair: Pair) -> None:
    send = replace(pair.send_order(), address=f"unix:{pair.folder}/nobody")
    pair.sender.start(send)
    failed = pair.sender_posts.next()
    assert isinstance(failed, HandoffFailed)
    assert pair.sender.stats().num_open == 0
    assert_still_works(pair)


def test_a_restarted_receiver_is_found_again(folder: Path, params: TransferParams) -> None:
    pair = Pair(folder, "unix", replace(params, lease_s=30.0))
    try:
        assert_still_works(pair, "before")
        pair.sender.start(pair.send_order("lost"))
        pair.receiver.stop()
        assert isinstance(pair.sender_posts.next(), HandoffFailed)
        until(lambda: pair.sender.stats().num_connections == 0)
        pair.receiver = HandoffReceiver(
            pair.target, f"unix:{folder}/d0", TOKEN, pair.params, pair.receiver_posts
        )
        assert_still_works(pair, "after")
    finally:
        pair.stop()


def test_a_sender_with_another_token_is_not_admitted(folder: Path, params: TransferParams) -> None:
    pair = Pair(folder, "unix", params, token=b"x" * 32)
    try:
        pair.receiver.expect(pair.receive_order())
        send_all(pair, pair.send_order())
        assert isinstance(pair.sender_posts.next(), HandoffFailed)
        until(lambda: pair.receiver.stats().num_connections == 0)
        assert pair.receiver.stats().num_expected == 1
    finally:
        pair.stop()


def test_ranks_of_different_layouts_do_not_talk(folder: Path, params: TransferParams) -> None:
    pair = Pair(folder, "unix", params)
    other = HandoffSender(BytesEngine(1, row_bytes=4032), TOKEN, pair.params, pair.sender_posts)
    try:
        other.start(pair.send_order())
        failed = pair.sender_posts.next()
        assert isinstance(failed, HandoffFailed)
        assert "layout" in failed.why
    finally:
        other.stop()
        pair.stop()


def test_stopping_fails_what_is_open(pair: Pair) -> None:
    send, _ = open_half(pair)
    pair.sender.stop()
    assert isinstance(pair.sender_posts.next(), HandoffFailed)
    assert isinstance(pair.receiver_posts.next(), HandoffFailed)
    pair.receiver.expect(pair.receive_order("alone"))
    pair.receiver.stop()
    assert isinstance(pair.receiver_posts.next(), HandoffFailed)
    pair.sender.start(replace(send, request_id=RequestId("late")))
    assert isinstance(pair.sender_posts.next(), HandoffFailed)


def test_without_shared_memory_the_same_host_falls_back_to_inline(
    folder: Path, params: TransferParams
) -> None:
    pair = Pair(folder, "unix", replace(params, lease_s=30.0, ring_bytes=2**50))  # no room for that
    try:
        assert_still_works(pair)
        assert pair.sender.stats().num_slots == 0
    finally:
        pair.stop()


@pytest.mark.parametrize(
    "address", ["", "unix:", "tcp:host", "tcp::80", "tcp:host:99999", "udp:host:1", "tcp:h:x"]
)
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match="data address"):
        DataAddress.parse(address)


def test_a_missing_folder_for_shared_memory_is_named(folder: Path, params: TransferParams) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        HandoffSender(BytesEngine(1), TOKEN, replace(params, shm_dir=f"{folder}/nowhere"), Posted())


def test_an_address_in_use_is_named(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="listen"):
        HandoffReceiver(pair.target, pair.receiver.address, TOKEN, pair.params, Posted())
