"""Ranks over a real node daemon: what one turn computed, the next one loads, and no byte is ever wrong.

The synthetic engine's text depends on every KV byte, so a wrong, stale or missing one shows.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest

from millpond.config.synthetic_params import SyntheticParams
from millpond.control.group_scheduler import GroupParams, GroupRole
from millpond.control.prefill_scheduler import PrefillParams
from millpond.core.errors import InvariantBroken
from millpond.core.hashing import HashChain
from millpond.core.request import KvIdentity, SamplingParams
from millpond.engine.synthetic import SyntheticEngine, expected_tokens
from millpond.serve.node.load_line import LoadLine
from millpond.serve.node.node_load import NodeLoad
from tests.unit.serve.node.rig import poll
from tests.unit.serve.workers.kv_service import IDENTITY, NODE, kv_service

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
GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
MIXED = (("m0", GroupRole.MIXED),)
SPLIT = (("p0", GroupRole.PREFILL), ("d0", GroupRole.DECODE))


@pytest.fixture
def service():
    with kv_service() as made:
        made.start_daemon(SyntheticEngine(PARAMS))
        yield made


@pytest.fixture(params=[MIXED, SPLIT], ids=["mixed", "split"])
def ranks(request, service):
    """A service with ranks; its first group computes prompts."""
    for name, role in request.param:
        service.add_group(name, role, SyntheticEngine(PARAMS))
    return service


def words(count, seed=0):
    return array("i", [1000 + seed * 7919 + i for i in range(count)])


def text(prompt, count):
    return expected_tokens(PARAMS, prompt, GREEDY, count)


def prefill(service):
    return next(iter(service.groups.values()))


def test_a_session_computes_only_what_is_new(ranks):
    prompt, known = words(300), 0
    for turn, num_output in enumerate([140, 30, 250, 1]):
        answer = ranks.ask(f"turn{turn}", prompt, num_output)
        assert answer.token_ids == text(prompt, num_output)
        assert answer.num_cached_tokens == known
        ranks.settle()
        known = (len(prompt) + num_output - 1) // 128 * 128  # the last token was sampled and not computed
        prompt = prompt + answer.token_ids + words(50, seed=turn + 1)
    assert prefill(ranks).lost == []


def test_every_remainder_of_a_block(service):
    """Hits end before prompts of any length; a prompt that is all hit still computes its last block."""
    service.add_group("m0", GroupRole.MIXED, SyntheticEngine(PARAMS))
    whole = words(512)
    service.ask("first", whole, 1)
    service.settle()
    for length in (129, 255, 256, 257, 383, 384, 385, 511, 512):
        answer = service.ask(f"r{length}", whole[:length], 3)
        assert answer.token_ids == text(whole[:length], 3)
        assert answer.num_cached_tokens == (length - 1) // 128 * 128


def test_others_with_another_root_share_nothing(ranks):
    prompt = words(300)
    ranks.ask("a", prompt, 2)
    ranks.settle()
    other = KvIdentity(bytes(32), IDENTITY.tenant)
    answer = ranks.ask("b", prompt, 2, kv=other)
    assert (answer.num_cached_tokens, answer.token_ids) == (0, text(prompt, 2))


@pytest.mark.parametrize("row", [1, 2])
@pytest.mark.parametrize("num_left", [0, 1, 3])
def test_a_load_that_breaks_in_the_middle_of_a_step(ranks, monkeypatch, row, num_left):
    """The daemon ends it short, after the rows before `row` came whole."""
    prompt = words(700)
    ranks.ask("a", prompt, 2)
    ranks.settle()
    finish, rows_ready = NodeLoad.finish, NodeLoad.rows_ready

    def ready(load, which):
        if which >= row and load.is_answered:  # by then its sequence has begun
            finish(load, num_left)
        return min(rows_ready(load, which), num_left if which >= row else 99)

    monkeypatch.setattr(LoadLine, "on_done", lambda line, message: None)
    monkeypatch.setattr(NodeLoad, "rows_ready", ready)
    answer = ranks.ask("b", prompt, 40)
    assert answer.token_ids == text(prompt, 40)
    assert answer.num_cached_tokens == num_left * 128
    assert prefill(ranks).lost == [("b", num_left * 128)]
    assert prefill(ranks).loaded[-1].num_tokens == 640
    ranks.settle()
    monkeypatch.undo()
    assert ranks.ask("c", prompt, 40).num_cached_tokens == 640


def test_a_daemon_that_dies_between_promise_and_step(ranks):
    prompt = words(700)
    ranks.ask("a", prompt, 2)
    ranks.settle()
    ranks.submit("b", prompt, 30)
    group = prefill(ranks)
    plan = group.scheduler.next_plan(0)
    assert plan.loads
    group.runner.carry_out(plan)
    load = group.kv.node.load_of("b", 0)
    poll(lambda: load.is_answered, "an answer")
    ranks.daemon.end()
    poll(lambda: load.is_void, "the client to notice")
    answer = ranks.run()["b"]
    assert (answer.token_ids, answer.num_cached_tokens) == (text(prompt, 30), 0)
    assert group.lost == [("b", 0)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_line_to_the_daemon_ends_the_rank(service, monkeypatch):
    """Restarted, it can load again; without this it would wait for an answer that never comes."""
    service.add_group("m0", GroupRole.MIXED, SyntheticEngine(PARAMS))

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(LoadLine, "ask", fail)
    with pytest.raises(InvariantBroken, match="ended") as caught:
        service.ask("a", words(300), 200)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_daemon_that_comes_back_with_nothing(ranks):
    prompt = words(400)
    ranks.ask("a", prompt, 2)
    ranks.daemon.end()
    answer = ranks.ask("b", prompt, 20)
    assert (answer.token_ids, answer.num_cached_tokens) == (text(prompt, 20), 0)
    ranks.start_daemon(SyntheticEngine(PARAMS))
    for group in ranks.groups.values():
        poll(lambda node=group.kv.node: node.num_free_slots > 0, "a lease")
    assert ranks.ask("c", prompt, 20).num_cached_tokens == 0
    ranks.settle()
    answer = ranks.ask("d", prompt, 20)
    assert (answer.token_ids, answer.num_cached_tokens) == (text(prompt, 20), 384)


@pytest.mark.parametrize("damaged", [0, 2])
def test_damaged_bytes_in_the_arena_are_never_used(ranks, damaged):
    prompt = words(600)
    ranks.ask("a", prompt, 1)
    ranks.settle()
    arena = ranks.daemon.memory.arena
    name = text_hashes(prompt)[damaged]
    slot = next(s for s in range(arena.num_slots) if arena._table[s]["hash"].tobytes() == name)
    arena.slots[slot, 1000] ^= 1
    answer = ranks.ask("b", prompt, 9)
    assert answer.token_ids == text(prompt, 9)
    assert answer.num_cached_tokens == damaged * 128


def text_hashes(prompt):
    chain = HashChain(IDENTITY.root)
    chain.extend(prompt)
    return chain.hashes


def test_without_room_nothing_is_kept_and_nothing_waits():
    with kv_service() as service:
        service.start_daemon(SyntheticEngine(PARAMS), num_slots=12)
        group = service.add_group("m0", GroupRole.MIXED, SyntheticEngine(PARAMS))
        for number in range(8):
            prompt = words(1000, seed=number)
            assert service.ask(f"r{number}", prompt, 5).token_ids == text(prompt, 5)
        stats, node, counts = group.kv.persister.stats, group.kv.node, service.daemon.daemon.counts
        poll(lambda: counts.puts + node.num_aside == stats.num_blocks, "puts")
        assert 0 < node.num_aside <= NODE.put_slots
        group.kv.persister.forget(["r7"])
        assert stats.num_skipped == 56 - stats.num_blocks > 0


@pytest.mark.parametrize("seed", range(3))
def test_many_at_once(ranks, seed):
    """Prompts that share prefixes, in one queue; some are given up at any moment."""
    chance = random.Random(seed)
    base = words(900, seed=seed)
    expected = {}
    for round_number in range(3):
        for number in range(6):
            name = f"r{round_number}.{number}"
            shared = chance.randint(1, 900)
            prompt = base[:shared] + words(chance.randint(1, 150), seed=10 + number)
            count = chance.randint(1, 40)
            ranks.submit(name, prompt, count)
            expected[name] = prompt, count
            for group in ranks.groups.values():
                if chance.random() < 0.5:
                    ranks.turn(group)
            if chance.random() < 0.2:
                ranks.abort(name)
                del expected[name]
        answers = ranks.run()
        ranks.settle()
    for name, (prompt, count) in expected.items():
        assert answers[name].token_ids == text(prompt, count), name
    for group in ranks.groups.values():
        assert group.kv.swaps.stats().num_open == 0


def test_small_steps_and_few_blocks(service):
    """Several chunks per prompt, and prompts that wait for memory while they are loaded."""
    engine = SyntheticEngine(replace(PARAMS, num_blocks=12))
    params = GroupParams(prefill=PrefillParams(max_step_tokens=100))
    service.add_group("m0", GroupRole.MIXED, engine, params)
    prompts = {f"r{i}": words(640) + words(300, seed=i + 1) for i in range(4)}
    service.ask("first", words(640), 1)
    service.settle()
    for name, prompt in prompts.items():
        service.submit(name, prompt, 10)
    answers = service.run()
    for name, prompt in prompts.items():
        assert answers[name].token_ids == text(prompt, 10)
        assert answers[name].num_cached_tokens == 640
