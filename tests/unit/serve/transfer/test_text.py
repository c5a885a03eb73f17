"""Handoffs between engines whose text shows every byte, within a process and from a process that dies."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.config.transfer_params import TransferParams
from millpond.core.events import HandoffArrived, HandoffFailed
from millpond.core.ids import BlockId, DpRank, RequestId, SlotId
from millpond.core.plan import DecodeRow, HandoffReceive, RankPlan, SequenceStart
from millpond.core.units import num_blocks_for
from millpond.engine.synthetic import SyntheticEngine, expected_tokens
from millpond.serve.transfer.receiver import HandoffReceiver
from millpond.serve.transfer.sender import HandoffSender
from tests.unit.serve.transfer import prefill_process
from tests.unit.serve.transfer.harness import DEADLINE_S, Posted, until
from tests.unit.serve.transfer.prefill_process import GREEDY, PARAMS, TOKEN, prompt_of

NUM_OUTPUT = 12


def order_for(i: int, num_tokens: int, first_block: int) -> HandoffReceive:
    """Room for the prompt and a little output."""
    table = tuple(BlockId(first_block + k) for k in range(num_blocks_for(num_tokens + NUM_OUTPUT)))
    return HandoffReceive(RequestId(f"r{i}"), 0, DpRank(0), num_tokens, table, SlotId(0))


def decode(
    engine: SyntheticEngine, order: HandoffReceive, prompt: array[int], first_token_id: int
) -> array[int]:
    """Continue as a decode rank would."""
    known = array("i", [*prompt, first_token_id])
    start = (
        SequenceStart(
            order.request_id, 0, array("i", known), len(prompt), GREEDY, order.block_table, order.slot
        ),
    )
    while len(known) < len(prompt) + NUM_OUTPUT:
        row = DecodeRow(order.request_id, len(known) - 1, ())
        report = engine.execute(RankPlan(DpRank(0), start=start, rows=(row,)))
        known.append(report.sampled[0].token_id)
        start = ()
    return known[len(prompt) :]


@contextmanager
def receiving(
    folder: Path, kind: str, params: TransferParams
) -> Iterator[tuple[HandoffReceiver, SyntheticEngine, Posted]]:
    (folder / "shm").mkdir()
    posts, engine = Posted(), SyntheticEngine(PARAMS)
    listen_on = f"unix:{folder}/d0" if kind == "unix" else "tcp:127.0.0.1:0"
    receiver = HandoffReceiver(engine, listen_on, TOKEN, params, posts)
    try:
        yield receiver, engine, posts
    finally:
        receiver.stop()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("num_tokens", [2, 255, 256, 700])
def test_the_text_after_a_handoff_is_the_text_without_one(
    folder: Path, params: TransferParams, kind: str, num_tokens: int
) -> None:
    with receiving(folder, kind, params) as (receiver, target, posts):
        sender = HandoffSender(
            source := SyntheticEngine(PARAMS), TOKEN, replace(params, shm_dir=str(folder / "shm")), Posted()
        )
        try:
            order = order_for(3, num_tokens, first_block=40)
            receiver.expect(order)
            prefill_process.prefill(source, sender, 3, receiver.address, num_tokens, PARAMS.num_layers)
            arrived = posts.next()
            assert isinstance(arrived, HandoffArrived)
            prompt = prompt_of(3, num_tokens)
            text = decode(target, order, prompt, arrived.first_token_id)
            assert text == expected_tokens(PARAMS, prompt, GREEDY, NUM_OUTPUT)
        finally:
            sender.stop()


@contextmanager
def prefill_child(
    address: str, folder: Path, num_tokens: int, max_rows: int
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.unit.serve.transfer.prefill_process"]
    child = subprocess.Popen(
        [*command, address, str(folder / "shm"), str(num_tokens), str(max_rows)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[4],
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=DEADLINE_S)


def tell(child: subprocess.Popen[str], i: int) -> None:
    assert child.stdin is not None
    child.stdin.write(f"{i}\n")
    child.stdin.flush()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_bug_24_a_killed_prefill_process_fails_its_requests_and_nothing_else(
    folder: Path, params: TransferParams, kind: str
) -> None:
    num_tokens = 700
    with receiving(folder, kind, replace(params, lease_s=60.0, gap_s=60.0)) as (receiver, target, posts):
        with prefill_child(receiver.address, folder, num_tokens, max_rows=2) as victim:
            for i in range(3):
                receiver.expect(order_for(i, num_tokens, first_block=1 + 6 * i))
                tell(victim, i)
            row_bytes = target.layout.rows[0].num_bytes
            until(lambda: receiver.stats().num_bytes == 3 * 2 * num_blocks_for(num_tokens) * row_bytes)
            victim.kill()
            failed = [posts.next() for _ in range(3)]
            assert all(isinstance(event, HandoffFailed) for event in failed)
            assert {event.request_id for event in failed} == {"r0", "r1", "r2"}
        stats = receiver.stats()
        assert (stats.num_expected, stats.num_offered, stats.num_mismatches) == (0, 0, 0)
        assert not list((folder / "shm").iterdir())
        with prefill_child(receiver.address, folder, num_tokens, max_rows=3) as successor:
            order = order_for(5, num_tokens, first_block=1)  # into the blocks of a request that failed
            receiver.expect(order)
            tell(successor, 5)
            arrived = posts.next()
            assert isinstance(arrived, HandoffArrived)
            prompt = prompt_of(5, num_tokens)
            text = decode(target, order, prompt, arrived.first_token_id)
            assert text == expected_tokens(PARAMS, prompt, GREEDY, NUM_OUTPUT)
