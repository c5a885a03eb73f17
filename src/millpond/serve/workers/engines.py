"""Makes the engine that the config names. Only here does a process load torch."""

from __future__ import annotations

from millpond.config.sections import Config
from millpond.config.synthetic_params import SYNTHETIC
from millpond.config.topology import GroupSpec
from millpond.core.ports import Engine


def make_engine(config: Config, group: GroupSpec) -> Engine:
    """Load the engine of one rank of `group`.

    Raises:
        ModelFormatError: The model's files cannot be used.
    """
    if config.engine.model == SYNTHETIC:
        from millpond.engine.synthetic import SyntheticEngine  # noqa: PLC0415

        return SyntheticEngine(config.synthetic)
    from millpond.engine.load import load_engine  # noqa: PLC0415 - loads torch

    return load_engine(config.engine, group.device)
