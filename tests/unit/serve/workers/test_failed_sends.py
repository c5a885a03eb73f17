"""Handoffs that fail while their prompt is still being computed."""

from __future__ import annotations

from array import array

from millpond.config.synthetic_params import SyntheticParams
from millpond.control.group_scheduler import GroupParams, GroupRole
from millpond.control.prefill_scheduler import PrefillParams
from millpond.engine.synthetic import SyntheticEngine
from millpond.serve.workers.rank_runner import RankRunner
from tests.unit.serve.node.rig import poll
from tests.unit.serve.workers.kv_service import kv_service

PARAMS = SyntheticParams(
    num_layers=2, kv_bytes_per_token=8, num_blocks=64, max_model_len=4096, prefill_token_ns=0
)


def test_a_rank_remembers_nothing_of_sequences_whose_receiver_died_before_the_last_chunk():
    names = [f"doomed{i}" for i in range(100)]
    with kv_service() as service:
        service.start_daemon(SyntheticEngine(PARAMS))
        steps = GroupParams(prefill=PrefillParams(max_step_tokens=64))
        prefill = service.add_group("p0", GroupRole.PREFILL, SyntheticEngine(PARAMS), steps)
        decode = service.add_group("d0", GroupRole.DECODE, SyntheticEngine(PARAMS))
        for i, name in enumerate(names):
            service.submit(name, array("i", range(1000 + i, 1300 + i)), 5)
        receiver, sender = decode.runner.receiver, prefill.runner.sender
        assert receiver is not None
        assert sender is not None
        receiver.stop()

        def is_over() -> bool:
            while service.turn(prefill):
                pass
            return not prefill.scheduler.held_requests()

        poll(is_over, "the end of all handoffs")
        service.submit("one more", array("i", range(1300)), 5)  # the engine forgets with the next step
        poll(is_over, "the end of one more")
        assert sender.stats().num_failed == len(names) + 1
        # whatever it holds: the engine, the sender and the line to the daemon do not show what they have
        held = [field for field in RankRunner.__slots__ if "doomed" in repr(getattr(prefill.runner, field))]
        assert held == []
        assert sender.open_attempts() == {}
