"""Makes what a rank consists of. Only here does a process load torch."""

from __future__ import annotations

from collections.abc import Callable

from millpond.config.sections import Config
from millpond.config.synthetic_params import SYNTHETIC
from millpond.config.topology import GroupSpec
from millpond.core.errors import InvariantBroken
from millpond.core.ids import RequestId
from millpond.core.ports import Engine
from millpond.engine.kv_identity import configured_layout
from millpond.serve.loading_bar import loading_bar
from millpond.serve.network import Network
from millpond.serve.node.client import NodeClient
from millpond.serve.run_folder import RunFolder
from millpond.serve.transfer.sender import HandoffSender
from millpond.serve.workers.rank_kv import RankKv


def make_engine(config: Config, folder: RunFolder, group: GroupSpec, rank: int) -> Engine:
    """Load the engine of one rank of `group`; the first one of all shows on a terminal how far it is.

    Raises:
        ConfigError: The model's files have changed since the service started.
        ModelFormatError: The model's files cannot be used.
        InvariantBroken: Its blocks are not laid out as gateway and node daemon conclude from the config.
    """
    folder.require_served_model(config)
    engine = _load(config, group, rank)
    folder.require_served_model(config)  # once more: they may have changed while they were read
    if engine.layout != configured_layout(config.engine, config.synthetic):
        raise InvariantBroken(f"the engine of {config.engine.model} has another layout than its config says")
    return engine


def _load(config: Config, group: GroupSpec, rank: int) -> Engine:
    if config.engine.model == SYNTHETIC:
        from millpond.engine.synthetic import SyntheticEngine  # noqa: PLC0415

        return SyntheticEngine(config.synthetic)
    from millpond.engine.load import load_engine  # noqa: PLC0415 - loads torch

    params = config.engine_of(group)
    if (group.name, rank) != (config.groups[0].name, 0):
        return load_engine(params, group.device)
    with loading_bar(f"{group.name} loads") as show:
        return load_engine(params, group.device, show)


def make_rank_kv(
    config: Config,
    folder: RunFolder,
    network: Network,
    group: GroupSpec,
    rank: int,
    incarnation: int,
    engine: Engine,
    sender: HandoffSender | None,
    post: Callable[[object], None],
) -> RankKv | None:
    """Connect a rank to the node daemon of its host; None if the service keeps no KV."""
    if not config.storage:
        return None
    host = group.hosts[rank % len(group.hosts)]
    node = NodeClient(
        network,
        folder.socket(f"node-{host}"),
        f"{group.name}-{rank}",
        incarnation,
        engine.layout,
        config.node.put_slots,
        post,
        lease_s=config.node.lease_s,
    )
    rows_ready = sender.rows_ready if sender is not None else _tell_nobody
    return RankKv(engine, node, config.node.load_deadline_s, rows_ready)


def _tell_nobody(request_id: RequestId, attempt: int, row: int, num_blocks: int) -> None:
    """A mixed group hands nothing off."""
