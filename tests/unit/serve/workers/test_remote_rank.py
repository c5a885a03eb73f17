"""A rank in another process, seen from its leader: answers to loads and counters come by themselves."""

from __future__ import annotations

import threading

import pytest

from millpond.config.synthetic_params import SyntheticParams
from millpond.control.group_scheduler import GroupRole
from millpond.core.events import Loaded
from millpond.core.ids import DpRank, GroupId, RequestId
from millpond.core.plan import GroupPlan, LoadEnd, LoadStart, StepKind
from millpond.core.request import token_ids
from millpond.engine.synthetic import SyntheticEngine
from millpond.serve.rpc import Dealer, Router, Wakeup
from millpond.serve.workers.rank_kv import RankKv
from millpond.serve.workers.rank_runner import RankRunner
from millpond.serve.workers.remote_rank import RemoteRanks, rank_identity, run_rank
from tests.unit.serve.node.rig import poll
from tests.unit.serve.workers.kv_service import IDENTITY, kv_service

PARAMS = SyntheticParams(num_layers=2, kv_bytes_per_token=8, num_blocks=16, prefill_token_ns=0)
RANK = DpRank(1)


@pytest.fixture
def service():
    with kv_service() as made:
        made.start_daemon(SyntheticEngine(PARAMS))
        yield made


def plan(**parts):
    return GroupPlan(0, StepKind.PREFILL, 1, (), **parts)


def test_answers_and_counters_reach_the_leader(service):
    group = service.add_group("m0", GroupRole.MIXED, SyntheticEngine(PARAMS))
    service.ask("first", token_ids(range(1000, 1300)), 1)
    service.settle()
    wakeup, stopping = Wakeup(), threading.Event()
    node = service.connect("m0-1", group.runner.engine, wakeup.post)
    kv = RankKv(group.runner.engine, node, 30.0, lambda *_: None)
    runner = RankRunner(RANK, group.runner.engine, None, None, kv)
    endpoint = f"ipc://{service.folder / 'ranks'}"
    with (
        Router(service.network, endpoint) as router,
        Dealer(service.network, endpoint, rank_identity(RANK)) as dealer,
    ):
        thread = threading.Thread(
            target=run_rank, args=(GroupId("m0"), 1, runner, dealer, wakeup, stopping.is_set)
        )
        thread.start()
        try:
            others = RemoteRanks(router, (RANK,))
            (info,) = others.wait_until_up(30.0)
            assert info.can_load
            name = RequestId("a")
            order = LoadStart(name, 0, RANK, IDENTITY, token_ids(range(1000, 1256)), b"", wants_state=False)
            others.begin(plan(loads=(order,)))
            events = []
            poll(lambda: events.extend(others.take_events()) or events, "an answer")
            assert events == [Loaded(name, 0, 256)]
            others.begin(plan(unloads=(LoadEnd(name, 0, RANK),)))

            def counters():
                others.take_events()
                return dict(others.counters())

            poll(lambda: counters().get("millpond_loads_total") == 1, "counters")
            poll(lambda: kv.node.load_of(name, 0) is None, "the end of the load")
        finally:
            stopping.set()
            thread.join()
            runner.stop()
            wakeup.close()
