"""V4.1 ranks over a real node daemon: what begins after a snapshot equals a cold run, bit for bit."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.control.decode_scheduler import DecodeParams
from millpond.control.group_scheduler import GroupParams, GroupRole
from millpond.control.prefill_scheduler import PrefillParams
from millpond.core.hashing import BLOCK_HASH_BYTES, HashChain
from millpond.core.request import StateRestore
from millpond.engine.model.engine import MemoryPlan, V41Engine
from tests.unit.engine.model.tiny_v41 import EXACT, prompt, tiny_model
from tests.unit.serve.node.rig import poll
from tests.unit.serve.workers.kv_service import IDENTITY, kv_service


@pytest.fixture(scope="module")
def model():
    return tiny_model(EXACT["bf16"])


def engine_of(model, keep=0):
    return V41Engine(model, MemoryPlan(24, 4), max_model_len=1024, num_kept_tokens=keep)


def ids(count, seed=0):
    return array("i", prompt(count, seed).tolist())


class Warm:
    """A rank that keeps what it computes, and a fresh one for comparison."""

    def __init__(self, service, model, max_step_tokens=256, keep=0, num_drafts=0):
        self.service, self.model, self.keep = service, model, keep
        params = GroupParams(
            prefill=PrefillParams(max_step_tokens=max_step_tokens),
            decode=DecodeParams(num_draft_tokens=num_drafts),
        )
        service.start_daemon(engine_of(model))
        self.group = service.add_group("m0", GroupRole.MIXED, engine_of(model, keep), params)

    def ask(self, name, token_ids, count, **more):
        answer = self.service.ask(name, token_ids, count, **more)
        self.service.settle()
        return answer

    def cold(self, token_ids, count):
        """The text of a rank that has nothing."""
        with kv_service() as service:
            return Warm(service, self.model, keep=self.keep).ask("cold", token_ids, count).token_ids


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_prompt=st.integers(118, 300),
    num_output=st.integers(1, 30),
    num_tail=st.integers(1, 60),
    max_step_tokens=st.integers(40, 300),
    num_drafts=st.sampled_from([0, 3]),
)
def test_the_next_turn_is_as_if_everything_were_computed(
    model, num_prompt, num_output, num_tail, max_step_tokens, num_drafts
):
    with kv_service() as service:
        warm = Warm(service, model, max_step_tokens, num_drafts=num_drafts)
        first = ids(num_prompt, seed=num_prompt)
        answer = warm.ask("a", first, num_output)
        token_ids = first + answer.token_ids + ids(num_tail, seed=9)
        again = warm.ask("b", token_ids, 5, state_restore=StateRestore.EXACT)
        assert again.num_cached_tokens == (num_prompt + num_output - 1) // 128 * 128
        assert again.token_ids == warm.cold(token_ids, 5)


@pytest.mark.parametrize("policy", list(StateRestore))
def test_without_a_snapshot_exact_computes_and_what_replay_leaves_is_flagged(model, policy):
    token_ids = ids(400, seed=2)
    with kv_service(snapshots=0) as service:
        warm = Warm(service, model)
        warm.ask("a", token_ids, 1)
        answer = warm.ask("b", token_ids, 5, state_restore=policy)
        if policy is StateRestore.EXACT:
            assert answer.num_cached_tokens == 0
            assert answer.token_ids == warm.cold(token_ids, 5)
        else:
            assert answer.num_cached_tokens == 384 - warm.group.runner.engine.replay_tokens
        more = ids(700, seed=2)
        warm.ask("c", more, 1, state_restore=policy)
        service.settle()
        chain = HashChain(IDENTITY.root)
        chain.extend(more)
        blocks = service.daemon.memory.level.blocks
        lineages = [blocks.lineage(digest[:BLOCK_HASH_BYTES]) for digest in chain.digests]
        assert lineages == ([0] * 5 if policy is StateRestore.EXACT else [0, 0, 0, 1, 1])


def test_branches_of_one_prompt(model):
    shared = ids(200, seed=1)
    with kv_service() as service:
        warm = Warm(service, model)
        warm.ask("a", shared, 1)
        for name in "bcd":
            service.submit(name, shared[:128] + ids(20, seed=ord(name)), 4, state_restore=StateRestore.EXACT)
        answers = service.run()
        for name in "bcd":
            assert answers[name].num_cached_tokens == 128
            assert answers[name].token_ids == warm.cold(shared[:128] + ids(20, seed=ord(name)), 4)


@pytest.mark.parametrize("num_tail", [23, 24, 90])
def test_with_a_decoder_replay_the_tail_is_computed_as_from_the_start(model, num_tail):
    """The decoder layers' windows of a snapshot are those of another prompt's tail: they must not show."""
    keep = 24
    shared = ids(130, seed=5)
    token_ids = shared[:128] + ids(num_tail, seed=6)
    with kv_service() as service:
        warm = Warm(service, model, keep=keep)
        warm.ask("a", shared, 1)
        answer = warm.ask("b", token_ids, 5, state_restore=StateRestore.EXACT)
        assert answer.num_cached_tokens == (128 if num_tail >= keep else 0)
        assert answer.token_ids == warm.cold(token_ids, 5)


def test_states_travel_with_the_load_and_are_counted(model):
    with kv_service() as service:
        warm = Warm(service, model)
        first = ids(250, seed=4)
        answer = warm.ask("a", first, 20)
        kept = warm.group.kv.persister.stats.num_states
        assert kept == 2  # after 128 tokens of the prompt, and while decoding after 256
        warm.ask("b", first + answer.token_ids, 1)
        assert warm.group.loaded[-1].state_position == 256


def test_states_that_no_daemon_was_there_to_keep_are_counted(model):
    with kv_service() as service:
        warm = Warm(service, model)
        node = warm.group.kv.node
        service.daemon.end()
        poll(lambda: node.epoch == 0, "its end is noticed")
        service.ask("a", ids(300), 2)
        num_states = warm.group.kv.counters()["millpond_persist_states_total"]
        assert num_states > 0
        poll(lambda: warm.group.kv.counters()["millpond_persist_states_lost_total"] == num_states, "all")
