"""Makes the engine that the config names. Only here does a process load torch."""

from __future__ import annotations

from millpond.config.sections import Config
from millpond.config.synthetic_params import SYNTHETIC
from millpond.config.topology import GroupSpec
from millpond.core.ports import Engine
from millpond.serve.loading_bar import loading_bar


def make_engine(config: Config, group: GroupSpec, rank: int) -> Engine:
    """Load the engine of one rank of `group`; the first one of all shows on a terminal how far it is.

    Raises:
        ModelFormatError: The model's files cannot be used.
    """
    if config.engine.model == SYNTHETIC:
        from millpond.engine.synthetic import SyntheticEngine  # noqa: PLC0415

        return SyntheticEngine(config.synthetic)
    from millpond.engine.load import load_engine  # noqa: PLC0415 - loads torch

    if (group.name, rank) != (config.groups[0].name, 0):
        return load_engine(config.engine, group.device)
    with loading_bar(f"{group.name} loads") as show:
        return load_engine(config.engine, group.device, show)
