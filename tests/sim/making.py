"""Small builders for tests of control and sim."""

from __future__ import annotations

from typing import Any

from millpond.control.group_scheduler import GroupParams, GroupRole, GroupScheduler
from millpond.core.events import Fetch, GroupUp, RankInfo, RankReport, StepDone
from millpond.core.hashing import HashChain
from millpond.core.ids import DpRank, GatewayId, GroupId, RankRef, RequestId
from millpond.core.plan import Assign, GroupPlan
from millpond.core.request import CachedPrefix, KvIdentity, RequestSpec, SamplingParams, token_ids
from millpond.core.units import BLOCK_TOKENS
from millpond.sim.sim_engine import SimEngine, token_at

P0 = RankRef(GroupId("p0"), DpRank(0))
D0 = RankRef(GroupId("d0"), DpRank(0))
KV = KvIdentity(bytes(32), 7)
_SPEC_FIELDS = {"priority", "gateway", "reply_to", "branch_points", "kv", "cached", "state_restore"}


def make_spec(
    name: str = "r",
    num_prompt: int = 10,
    max_tokens: int = 4,
    attempt: int = 0,
    num_output: int = 0,
    **more: Any,
) -> RequestSpec:
    """A request whose output tokens are those of `token_at`, with `num_cached` tokens found, if given."""
    num_cached = more.pop("num_cached", 0)
    if num_cached:
        more |= {"kv": KV, "cached": CachedPrefix(num_cached, b"there")}
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
    num_ranks: int = 1, num_blocks: int = 16, num_slots: int = 8, **more: Any
) -> tuple[RankInfo, ...]:
    return tuple(RankInfo(DpRank(i), f"data:{i}", num_blocks, num_slots, **more) for i in range(num_ranks))


def make_scheduler(
    role: GroupRole,
    num_ranks: int = 1,
    num_blocks: int = 16,
    num_slots: int = 8,
    params: GroupParams | None = None,
    max_model_len: int = 4096,
    **more: Any,
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
    """Engines of all ranks of a group, and what is loaded for them: everything that was asked for."""

    def __init__(self, num_ranks: int, **more: Any) -> None:
        self.engines = [SimEngine(info) for info in make_ranks(num_ranks, **more)]
        self.chains: dict[tuple[RequestId, int], HashChain] = {}
        """Of open loads, by (request, attempt)."""

    def note(self, plan: GroupPlan) -> None:
        """Carry out what a plan says of loads. Comes before `run` where there are any."""
        for end in plan.unloads:
            del self.chains[end.request_id, end.attempt]
        for order in plan.loads:
            key = (order.request_id, order.attempt)
            assert key not in self.chains, f"{key} is loaded twice"
            self.chains[key] = HashChain(order.kv.root)
            self.chains[key].extend(order.token_ids)
        for swap in plan.swaps:
            digests = self.chains[swap.request_id, swap.attempt].digests
            assert len(swap.block_table) <= len(digests)
            self.engines[swap.rank].swap_in(swap, digests)

    def run(self, plan: GroupPlan, lost: dict[RequestId, int] | None = None) -> StepDone:
        """Compute a step. `lost`: leading tokens in place of those whose load breaks in it."""
        reports: list[RankReport] = []
        for engine, rank in zip(self.engines, plan.ranks, strict=True):
            for copy in rank.restore:
                [chain] = [chain for key, chain in self.chains.items() if key[0] == copy.request_id]
                engine.write_state(copy.slot, chain.digests[copy.position // BLOCK_TOKENS - 1])
            mine = {c.request_id: lost[c.request_id] for c in rank.chunks if c.request_id in (lost or {})}
            reports.append(engine.execute(rank, plan.num_steps, mine))
        return StepDone(plan.step, tuple(reports))
