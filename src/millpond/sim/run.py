"""One simulation from a config and a workload: what `millpond sim run` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millpond.config.journal import JournalWriter, Setup, journaled
from millpond.config.sections import Config
from millpond.config.sim_params import SimCostParams, SimRankParams
from millpond.control.dispatcher import Dispatcher
from millpond.control.group_scheduler import GroupParams, GroupScheduler
from millpond.core.errors import ConfigError
from millpond.sim.cluster import Cluster, ClusterShape
from millpond.sim.report import summarise
from millpond.sim.workload import Arrival, Session


def make_shape(
    config: Config, *, costs: SimCostParams | None = None, rank: SimRankParams | None = None
) -> ClusterShape:
    """Read the groups and parameters of a service out of its config."""
    return ClusterShape(
        groups=tuple((group.name, group.role, group.ranks) for group in config.groups),
        dispatch=config.dispatch,
        group=GroupParams(config.prefill, config.decode, config.mixed),
        rank=rank or SimRankParams(num_slots=config.engine.max_num_seqs),
        costs=costs or SimCostParams(),
    )


def run_simulation(
    config: Config,
    arrivals: list[Arrival],
    *,
    costs: SimCostParams | None = None,
    rank: SimRankParams | None = None,
    sessions: Sequence[Session] = (),
    seed: int = 0,
    journal: Path | None = None,
    limit_s: float = 86_400.0,
) -> dict[str, object]:
    """Run a workload to its end.

    Args:
        config: Groups and all parameters of control.
        arrivals: From `workload.poisson` or `workload.read_trace`.
        costs: Times of the simulated hardware.
        rank: Memory of each simulated rank.
        sessions: Requests that wait for each other, beside the arrivals.
        seed: Of the chance in the network; decides nothing without jitter.
        journal: Folder for one journal per deciding object; None keeps none.
        limit_s: Virtual seconds after which the service is taken for stuck.

    Returns:
        Plain JSON values: those of `report.summarise`, and `config_digest`, `seed`, `num_events`,
        `num_steps`.

    Raises:
        ConfigError: The workload does not come to an end.
    """
    journals: list[JournalWriter] = []

    def make(name: str, setup: Setup) -> Dispatcher | GroupScheduler:
        machine = setup.make()
        if journal is None:
            return machine
        journals.append(JournalWriter(journal, name, setup, config_digest=config.digest, seed=seed))
        return journaled(machine, journals[-1])

    try:
        cluster = Cluster(make_shape(config, costs=costs, rank=rank), seed, make)
        cluster.add(arrivals)
        cluster.add_sessions(sessions)
        if not cluster.run(limit_s):
            raise ConfigError(f"requests are still open after {limit_s:g} s of virtual time")
    finally:
        for each in journals:
            each.close()
    return {
        **summarise(cluster.streams),
        "config_digest": config.digest,
        "seed": seed,
        "num_events": cluster.kernel.num_events,
        "num_steps": {name: leader.num_steps for name, leader in sorted(cluster.leaders.items())},
    }
