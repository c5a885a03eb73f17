"""`Config`: all parameter records of the service in one frozen object, and its JSON form."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from millpond.config.engine_params import EngineParams
from millpond.config.gateway_params import GatewayParams, TenantParams
from millpond.config.node_params import NodeParams
from millpond.config.pool_params import PoolPlacementParams
from millpond.config.serve_params import SuperviseParams
from millpond.config.sim_params import SimCostParams, SimRankParams
from millpond.config.synthetic_params import SyntheticParams
from millpond.config.topology import (
    DEFAULT_GROUPS,
    DEFAULT_HOSTS,
    DEFAULT_STORAGE,
    GroupSpec,
    HostSpec,
    LinkSpec,
    StorageSpec,
)
from millpond.config.transfer_params import TransferParams
from millpond.control.decode_scheduler import DecodeParams
from millpond.control.dispatcher import DispatchParams
from millpond.control.group_scheduler import GroupRole
from millpond.control.prefill_scheduler import PrefillParams
from millpond.core.errors import ConfigError
from millpond.policies.step_vote import StepVoteParams


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_N = TypeVar("_N", bound=_Named)


def _by_name(items: tuple[_N, ...], name: str, kind: str) -> _N:
    for item in items:
        if item.name == name:
            return item
    raise ConfigError(f"no {kind} is named {name!r}; there are {[item.name for item in items]}", param=kind)


@dataclass(frozen=True, slots=True)
class Config:
    """Everything an operator may set. Written once, by `config.load`; nothing changes it afterwards.

    A field is one section of the file; the tuples are its `[[table]]`s.
    """

    engine: EngineParams = field(default_factory=EngineParams)
    synthetic: SyntheticParams = field(default_factory=SyntheticParams)
    gateway: GatewayParams = field(default_factory=GatewayParams)
    transfer: TransferParams = field(default_factory=TransferParams)
    prefill: PrefillParams = field(default_factory=PrefillParams)
    decode: DecodeParams = field(default_factory=DecodeParams)
    pool: PoolPlacementParams = field(default_factory=PoolPlacementParams)
    node: NodeParams = field(default_factory=NodeParams)
    mixed: StepVoteParams = field(default_factory=StepVoteParams)
    dispatch: DispatchParams = field(default_factory=DispatchParams)
    supervise: SuperviseParams = field(default_factory=SuperviseParams)
    sim_cost: SimCostParams = field(default_factory=SimCostParams)
    sim_rank: SimRankParams = field(default_factory=SimRankParams)
    hosts: tuple[HostSpec, ...] = DEFAULT_HOSTS
    groups: tuple[GroupSpec, ...] = DEFAULT_GROUPS
    storage: tuple[StorageSpec, ...] = DEFAULT_STORAGE
    links: tuple[LinkSpec, ...] = ()
    tenants: tuple[TenantParams, ...] = ()

    def host(self, name: str) -> HostSpec:
        """The host of that name."""
        return _by_name(self.hosts, name, "host")

    def group(self, name: str) -> GroupSpec:
        """The group of that name."""
        return _by_name(self.groups, name, "group")

    def engine_of(self, group: GroupSpec) -> EngineParams:
        """Engine parameters of one group: its own memory, and no home blocks where sequences decode."""
        return dataclasses.replace(
            self.engine,
            kv_memory=group.kv_memory or self.engine.kv_memory,
            host_kv_memory=self.engine.host_kv_memory if group.role is GroupRole.PREFILL else 0,
        )

    @property
    def digest(self) -> str:
        """SHA-256 over the JSON form, in hex. Stands in logs, journals and reports."""
        return hashlib.sha256(to_json(self)).hexdigest()


TABLE_BY_FIELD = {
    "hosts": "host",
    "groups": "group",
    "storage": "storage",
    "links": "link",
    "tenants": "tenant",
}
"""Names of the repeated tables in the file, in the singular, by field of `Config`."""


def section_types() -> dict[str, type]:
    """Record type of each section that is no repeated table, by name, in the order of the file."""
    return {
        item.name: item.default_factory  # type: ignore[misc] - every such field has its class as its factory
        for item in dataclasses.fields(Config)
        if item.name not in TABLE_BY_FIELD
    }


def to_json(config: Config) -> bytes:
    """The config as the supervisor hands it to the processes it starts. Equal configs, equal bytes."""
    return msgspec.json.encode(config, order="deterministic")


def from_json(data: bytes) -> Config:
    """Inverse of `to_json`. Checks nothing but types: the file was checked when it was loaded.

    Raises:
        ConfigError: The bytes are not a config of this version.
    """
    try:
        return msgspec.json.decode(data, type=Config)
    except msgspec.DecodeError as error:
        raise ConfigError(f"not a config written by this version: {error}") from error
