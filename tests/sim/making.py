"""Small builders for tests of control and sim."""

from __future__ import annotations

from typing import Any

from millpond.control.group_scheduler import GroupParams, GroupRole, GroupScheduler
from millpond.core.events import Fetch, GroupUp, RankInfo, RankReport, StepDone
from millpond.core.ids import DpRank, GatewayId, GroupId, RankRef, RequestId
from millpond.core.plan import Assign, GroupPlan
from millpond.core.request import RequestSpec, SamplingParams, token_ids
from millpond.sim.sim_engine import SimEngine, token_at

P0 = RankRef(GroupId("p0"), DpRank(0))
D0 = RankRef(GroupId("d0"), DpRank(0))
_SPEC_FIELDS = {"priority", "gateway", "reply_to", "branch_points", "resume"}


def make_spec(
    name: str = "r",
    num_prompt: int = 10,
    max_tokens: int = 4,
    attempt: int = 0,
    num_output: int = 0,
    **more: Any,
) -> RequestSpec:
    """A request whose output tokens are those of `token_at`."""
    fields = {key: more.pop(key) for key in list(more) if key in _SPEC_FIELDS}
    sampling = SamplingParams(max_tokens=max_tokens, seed=sum(map(ord, name)), **more)
    output = token_ids(token_at(sampling, num_prompt + i) for i in range(num_output))
    fields.setdefault("gateway", GatewayId("g0"))
    fields.setdefault("reply_to", "tokens:g0")
    return RequestSpec(
        request_id=RequestId(name),
        attempt=attempt,
        prompt_ids=token_ids(range(num_prompt)),
        sampling=sampling,
        output_ids=output,
        **fields,
    )


def make_assign(spec: RequestSpec, prefill: RankRef = P0, decode: RankRef = D0) -> Assign:
    return Assign(spec, prefill, decode, f"data:{decode.group}/{decode.rank}")


def make_ranks(
    num_ranks: int = 1, num_blocks: int = 16, num_slots: int = 8, **more: int
) -> tuple[RankInfo, ...]:
    return tuple(RankInfo(DpRank(i), f"data:{i}", num_blocks, num_slots, **more) for i in range(num_ranks))


def make_scheduler(
    role: GroupRole,
    num_ranks: int = 1,
    num_blocks: int = 16,
    num_slots: int = 8,
    params: GroupParams | None = None,
    max_model_len: int = 4096,
    **more: int,
) -> GroupScheduler:
    name = GroupId("p0" if role is GroupRole.PREFILL else "d0" if role is GroupRole.DECODE else "m0")
    ranks = make_ranks(num_ranks, num_blocks, num_slots, **more)
    return GroupScheduler(name, role, ranks, max_model_len, params or GroupParams())


def make_group_up(
    group: str, role: str, num_ranks: int = 1, incarnation: int = 1, num_blocks: int = 64, **more: Any
) -> GroupUp:
    ranks = make_ranks(num_ranks, num_blocks, more.pop("num_slots", 32))
    return GroupUp(GroupId(group), incarnation, role, 4096, 32, ranks, **more)


def fetch_of(scheduler: GroupScheduler, incarnation: int = 1, **more: Any) -> Fetch:
    """What a leader would report now."""
    return Fetch(
        scheduler.group,
        incarnation,
        scheduler.views(),
        scheduler.room,
        scheduler.num_assigns_seen,
        **more,
    )


class Engines:
    """Engines of all ranks of a group."""

    def __init__(self, num_ranks: int) -> None:
        self.engines = [SimEngine() for _ in range(num_ranks)]

    def run(self, plan: GroupPlan) -> StepDone:
        reports: list[RankReport] = [
            engine.execute(rank, plan.num_steps)
            for engine, rank in zip(self.engines, plan.ranks, strict=True)
        ]
        return StepDone(plan.step, tuple(reports))
