"""Random services with random faults in virtual time: every request ends once, and nothing is left over."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from millpond.config.journal import JournalWriter, journaled
from millpond.config.sim_params import SimRankParams
from millpond.control.decode_scheduler import DecodeParams
from millpond.control.dispatcher import DispatchParams
from millpond.control.group_scheduler import GroupParams, GroupRole
from millpond.control.prefill_scheduler import PrefillParams
from millpond.core.chance import Chance
from millpond.core.errors import InvariantBroken
from millpond.core.ids import GatewayId, GroupId, RequestId
from millpond.core.request import FinishReason, StateRestore
from millpond.core.units import BLOCK_TOKENS, MILLISECOND_NS, SECOND_NS
from millpond.sim.cluster import CLIENT_ORDER, Cluster, ClusterShape
from millpond.sim.kv_node import LoadFaults
from millpond.sim.replay import replay
from millpond.sim.report import FINISHED
from millpond.sim.sim_gateway import Stream
from millpond.sim.workload import Arrival, Session

MAX_FAILURES = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened in one scenario."""

    seed: int
    num_requests: int
    num_events: int
    num_kills: int
    num_resubmitted: int
    num_cached: int
    """Requests that began with cached KV."""
    num_broken: int
    """Loads that broke after their answer."""
    reasons: Counter[str]


def run_scenario(seed: int, folder: Path | None = None) -> Outcome:
    """Run the scenario of one seed.

    Args:
        seed: Decides everything.
        folder: Journals go here and are replayed at the end; None keeps none.

    Raises:
        InvariantBroken: A law does not hold; the message names the seed.
    """
    chance = Chance(seed, "campaign")
    shape = _with_home_blocks(_draw_shape(chance), Chance(seed, "campaign.home"))
    journals: list[JournalWriter] = []

    def make(name: str, setup):  # noqa: ANN001, ANN202 - as `Rebuild`
        if folder is None:
            return setup.make()
        journals.append(JournalWriter(folder, name, setup, seed=seed))
        return journaled(setup.make(), journals[-1])

    try:
        cluster = Cluster(shape, seed, make)
        gateways = list(cluster.gateways.values())
        arrivals = _draw_arrivals(chance, shape)
        cluster.add(arrivals)
        if shape.rank.can_load:
            cluster.add_sessions(_draw_sessions(chance, shape))
        _draw_faults(chance, cluster, arrivals)
        _require(cluster.run(limit_s=4 * 3600), cluster, "a request has no end")
        _require(cluster.settle(), cluster, f"left over: {cluster.leftovers()}")
        for stream in cluster.streams:
            _check_stream(stream, cluster)
    except InvariantBroken as error:
        raise InvariantBroken(f"scenario {seed}: {error}") from error
    finally:
        for journal in journals:
            journal.close()
    if folder is not None:
        for report in replay(folder):
            if report.difference is not None:
                raise InvariantBroken(f"scenario {seed}: {report}")
    reasons = Counter(stream.reason.value for stream in cluster.streams if stream.reason is not None)
    return Outcome(
        seed=seed,
        num_requests=len(cluster.streams),
        num_events=cluster.kernel.num_events,
        num_kills=cluster.num_kills,
        num_resubmitted=sum(gateway.num_resubmitted for gateway in gateways),
        num_cached=sum(stream.num_cached_tokens > 0 for stream in cluster.streams),
        num_broken=cluster.kv_node.num_broken,
        reasons=reasons,
    )


def _require(is_true: bool, cluster: Cluster, what: str) -> None:
    if not is_true:
        still_open = [s.spec.request_id for g in cluster.gateways.values() for s in g.streams.values()]
        raise InvariantBroken(f"{what}; at {cluster.kernel.now_ns / SECOND_NS} s; open: {still_open}")


def _check_stream(stream: Stream, cluster: Cluster) -> None:
    spec = stream.spec
    num_tokens = len(stream.token_times_ns)
    longest = cluster.shape.rank.num_blocks * BLOCK_TOKENS
    full = max(1, min(spec.sampling.max_tokens, longest - spec.num_prompt_tokens))
    problem = None
    if stream.reason is None:
        problem = "has no end"
    elif stream.reason in FINISHED and num_tokens != full:
        problem = f"ended with {num_tokens} of {full} tokens"
    elif stream.reason is FinishReason.REFUSED and spec.num_prompt_tokens <= longest:
        problem = f"was refused: {stream.detail}"
    elif stream.reason is FinishReason.FAILED and not cluster.num_kills:
        problem = f"failed without a fault: {stream.detail}"
    if problem is not None:
        raise InvariantBroken(f"{spec.request_id} {problem}")


# --- chance -----------------------------------------------------------------------------------


def _between(chance: Chance, low: int, high: int) -> int:
    return low + chance.below(high - low + 1)


def _draw_shape(chance: Chance) -> ClusterShape:
    groups: list[tuple[str, GroupRole, int]] = []
    kind = chance.below(4)
    if kind > 0:
        groups += [
            (f"p{i}", GroupRole.PREFILL, _between(chance, 1, 3)) for i in range(_between(chance, 1, 3))
        ]
        groups += [(f"d{i}", GroupRole.DECODE, _between(chance, 1, 3)) for i in range(_between(chance, 1, 3))]
    if kind in (0, 3):
        groups += [(f"m{i}", GroupRole.MIXED, _between(chance, 1, 2)) for i in range(_between(chance, 1, 2))]
    return ClusterShape(
        groups=tuple(groups),
        num_gateways=_between(chance, 1, 3),
        dispatch=DispatchParams(lease_s=5.0, max_failures=MAX_FAILURES, queue_timeout_s=7200.0),
        group=GroupParams(
            prefill=PrefillParams(
                max_step_tokens=_between(chance, 32, 512),
                fetch_ahead_tokens=_between(chance, 1, 1024),
                max_held_seqs=_between(chance, 1, 12),
                max_loads_ahead=_between(chance, 1, 5),
            ),
            decode=DecodeParams(
                reserve_blocks_per_seq=chance.below(3) / 2, num_draft_tokens=chance.below(2) * 3
            ),
        ),
        rank=replace(
            SimRankParams(),
            num_blocks=_between(chance, 4, 24),
            num_slots=_between(chance, 1, 12),
            can_load=chance.below(3) > 0,
            has_state=bool(chance.below(2)),
            min_computed_tokens=1 + chance.below(2) * chance.below(200),
            max_drafts=chance.below(3),
        ),
        jitter_ns=chance.below(2) * _between(chance, 0, 40) * MILLISECOND_NS,
        duplicate_ratio=chance.below(2) * 0.2,
        load_faults=LoadFaults(
            refuse_ratio=chance.below(2) * 0.2,
            break_ratio=chance.below(2) * 0.4,
            repeat_ratio=chance.below(2) * 0.3,
        ),
        detect_ns=_between(chance, 1, 400) * MILLISECOND_NS,
        restart_ns=_between(chance, 50, 4000) * MILLISECOND_NS,
        is_spanning=bool(chance.below(2)),
    )


def _with_home_blocks(shape: ClusterShape, chance: Chance) -> ClusterShape:
    """Take blocks from prefill ranks, in half of the scenarios: what is too large for them is streamed."""
    if chance.below(2):
        return shape
    num_blocks = shape.rank.num_blocks
    few = _between(chance, 1, num_blocks)
    return replace(shape, rank=replace(shape.rank, num_prefill_blocks=few, num_home_blocks=num_blocks))


def _draw_arrivals(chance: Chance, shape: ClusterShape) -> list[Arrival]:
    longest = shape.rank.num_blocks * BLOCK_TOKENS
    gap_ns = _between(chance, 0, 300) * MILLISECOND_NS
    arrivals: list[Arrival] = []
    time_ns = 0
    for _ in range(_between(chance, 5, 60)):
        time_ns += chance.below(gap_ns + 1)
        num_prompt = _between(chance, 1, longest // 4 if chance.below(4) else longest + 100)
        num_output = _between(chance, 1, 60 if chance.below(4) else 400)
        arrivals.append(Arrival(time_ns, num_prompt, num_output, priority=chance.below(3)))
    return arrivals


def _draw_sessions(chance: Chance, shape: ClusterShape) -> list[Session]:
    longest = shape.rank.num_blocks * BLOCK_TOKENS
    policies = list(StateRestore)
    return [
        Session(
            time_ns=chance.below(5 * SECOND_NS),
            turns=tuple(
                (_between(chance, 1, longest // 6), _between(chance, 1, 80))
                for _ in range(_between(chance, 2, 5))
            ),
            pause_s=chance.below(3) / 4,
            state_restore=policies[chance.below(len(policies))],
        )
        for _ in range(_between(chance, 1, 12))
    ]


def _draw_faults(chance: Chance, cluster: Cluster, arrivals: list[Arrival]) -> None:
    span_ns = 2 * arrivals[-1].time_ns + 5 * SECOND_NS
    kernel = cluster.kernel
    groups = [GroupId(name) for name, _, _ in cluster.shape.groups]
    for _ in range(chance.below(4)):
        group = groups[chance.below(len(groups))]
        kernel.at(chance.below(span_ns), CLIENT_ORDER, partial(cluster.kill_group, group))
    for _ in range(max(0, chance.below(4) - 1)):
        kernel.at(chance.below(span_ns), CLIENT_ORDER, cluster.kill_controller)
    for _ in range(max(0, chance.below(5) - 2)):
        kill_node = partial(
            cluster.kill_node_daemons, _between(chance, 1, 2000) * MILLISECOND_NS, chance.below(3) / 2
        )
        kernel.at(chance.below(span_ns), CLIENT_ORDER, kill_node)
    if chance.below(5) == 0:
        gateway = GatewayId(f"g{chance.below(cluster.shape.num_gateways)}")
        kernel.at(chance.below(span_ns), CLIENT_ORDER, partial(cluster.kill_gateway, gateway))
    for i in range(len(arrivals)):
        if chance.below(6) == 0:
            time_ns = arrivals[i].time_ns + chance.below(5 * SECOND_NS)
            kernel.at(time_ns, CLIENT_ORDER, partial(cluster.cancel, RequestId(f"r{i}")))
    for _ in range(chance.below(8)):
        turn = RequestId(f"s{chance.below(12)}-{chance.below(5)}")
        kernel.at(chance.below(span_ns), CLIENT_ORDER, partial(cluster.cancel, turn))
