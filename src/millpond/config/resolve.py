"""What spans several fields: checks, and values that follow from others. Runs once, after loading."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections import Counter
from pathlib import Path

from millpond.config.gateway_params import MAX_EFFORT
from millpond.config.pool_description import describe_pool
from millpond.config.sections import Config
from millpond.config.serve_params import SuperviseParams
from millpond.config.topology import StorageSpec
from millpond.control.group_scheduler import GroupRole
from millpond.core.errors import ConfigError
from millpond.core.units import GIB, KIB, MIB

DEVICES = ("cpu", "cuda", "xpu", "mps", "npu", "hpu")
MAX_NUM_SEQS = 65536
MAX_RUN_DIR_CHARS = 70
"""A socket's path may have 107 characters, its name within the folder takes up to 36."""


def resolve(config: Config) -> Config:
    """Check what spans several fields and fill in the values that are derived when left empty.

    Raises:
        ConfigError: The first thing that is wrong.
    """
    _check_names(config)
    _check_groups(config)
    _check_gateway(config)
    _check_choices(config)
    _check_numbers(config)
    _check_sizes(config)
    return dataclasses.replace(config, storage=_place_storage(config), supervise=_place_folders(config))


def _check_names(config: Config) -> None:
    for table, names in (
        ("host", [host.name for host in config.hosts]),
        ("group", [group.name for group in config.groups]),
        ("storage", [node.name for node in config.storage]),
        ("tenant", [tenant.name for tenant in config.tenants]),
    ):
        for index, name in enumerate(names):
            # Names become part of socket paths, metric labels and log fields.
            if not name or not all(char.isalnum() or char in "-_" for char in name):
                raise ConfigError(
                    f"{table}[{index}].name = {name!r}: use letters, digits, - and _",
                    param=f"{table}[{index}].name",
                )
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ConfigError(f"{table}: {twice[0]!r} is named twice; names must differ", param=table)
    known = {host.name for host in config.hosts}
    for path, name in (
        *((f"group[{i}].hosts", name) for i, group in enumerate(config.groups) for name in group.hosts),
        *((f"storage[{i}].host", node.host) for i, node in enumerate(config.storage) if node.host),
        *((f"link[{i}].a", link.a) for i, link in enumerate(config.links)),
    ):
        if name not in known:
            raise ConfigError(
                f"{path} = {name!r}: no such host; there are {', '.join(sorted(known))}", param=path
            )


def _check_groups(config: Config) -> None:
    roles = {group.role for group in config.groups}
    if GroupRole.MIXED not in roles and not {GroupRole.PREFILL, GroupRole.DECODE} <= roles:
        raise ConfigError(
            "group: a service needs a prefill and a decode group, or a mixed one; add the missing [[group]]",
            param="group",
        )
    for index, group in enumerate(config.groups):
        if group.device.partition(":")[0] not in DEVICES:
            raise ConfigError(
                f"group[{index}].device = {group.device!r}: must be one of {', '.join(DEVICES)},"
                " with a number such as cuda:1 if need be",
                param=f"group[{index}].device",
            )
        if not group.hosts:
            raise ConfigError(
                f"group[{index}].hosts = []: name at least one host", param=f"group[{index}].hosts"
            )


def _check_gateway(config: Config) -> None:
    if not config.gateway.host:
        raise ConfigError(
            "gateway.host is empty: name an address, such as 127.0.0.1, or 0.0.0.0 for all",
            param="gateway.host",
        )
    names = config.gateway.served_names
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(
            f"gateway.served_names = {list(names)}: names must differ and not be empty",
            param="gateway.served_names",
        )


def _check_choices(config: Config) -> None:
    links = ((f"link[{index}].net", link.net, ("snic", "cnic")) for index, link in enumerate(config.links))
    for path, value, choices in (
        ("engine.dtype", config.engine.dtype, ("auto", "bf16", "fp32")),
        ("engine.weights", config.engine.weights, ("unpacked", "packed")),
        ("engine.numerics", config.engine.numerics, ("fast", "exact")),
        *links,
    ):
        if value not in choices:
            raise ConfigError(f"{path} = {value!r}: must be one of {', '.join(choices)}", param=path)
    if config.engine.num_kept_tokens and config.engine.numerics == "exact":
        raise ConfigError(
            f"engine.num_kept_tokens = {config.engine.num_kept_tokens}: it approximates, so engine.numerics"
            " = 'exact' cannot have it; use 0, or numerics = 'fast'",
            param="engine.num_kept_tokens",
        )


def _check_numbers(config: Config) -> None:
    at_least_one = [
        ("engine.kv_memory", config.engine.kv_memory),
        ("prefill.max_step_tokens", config.prefill.max_step_tokens),
        ("prefill.max_held_seqs", config.prefill.max_held_seqs),
        ("prefill.max_loads_ahead", config.prefill.max_loads_ahead),
        ("mixed.all_vote_interval", config.mixed.all_vote_interval),
        ("mixed.any_vote_interval", config.mixed.any_vote_interval),
        ("mixed.max_prefill_run", config.mixed.max_prefill_run),
        ("gateway.max_sequences", config.gateway.max_sequences),
        ("gateway.max_choices", config.gateway.max_choices),
        ("gateway.max_body_bytes", config.gateway.max_body_bytes),
        ("node.put_slots", config.node.put_slots),
        ("node.num_load_threads", config.node.num_load_threads),
        ("node.pool_buffers", config.node.pool_buffers),
        ("node.lease_s", config.node.lease_s),
    ]
    for index, group in enumerate(config.groups):
        at_least_one += [
            (f"group[{index}].threads_per_rank", group.threads_per_rank),
        ]
    for path, value in at_least_one:
        if value < 1:
            raise ConfigError(f"{path} = {value}: must be at least 1", param=path)
    supervise = config.supervise
    if supervise.drain_s <= config.gateway.drain_s:
        raise ConfigError(
            f"supervise.drain_s = {supervise.drain_s}: must be longer than gateway.drain_s ="
            f" {config.gateway.drain_s}, or running streams are cut",
            param="supervise.drain_s",
        )


def _check_sizes(config: Config) -> None:
    """Refuse numbers out of range and sizes that no machine has, before something tries to build them."""
    synthetic = config.synthetic
    efforts = dataclasses.asdict(config.gateway.efforts)
    for path, value, least, most in (
        ("engine.max_num_seqs", config.engine.max_num_seqs, 1, MAX_NUM_SEQS),
        ("synthetic.max_num_seqs", synthetic.max_num_seqs, 1, MAX_NUM_SEQS),
        ("synthetic.num_layers", synthetic.num_layers, 1, 1024),
        ("synthetic.kv_bytes_per_token", synthetic.kv_bytes_per_token, 1, MIB),
        ("synthetic.vocab_size", synthetic.vocab_size, 1, MIB),
        ("transfer.ring_bytes", config.transfer.ring_bytes, 64 * KIB, GIB),
        *((f"gateway.efforts.{name}", value, 1, MAX_EFFORT) for name, value in efforts.items()),
        *((f"group[{i}].ranks", group.ranks, 1, 1024) for i, group in enumerate(config.groups)),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{path} = {value}: must be from {least} to {most}", param=path)


def _place_storage(config: Config) -> tuple[StorageSpec, ...]:
    """The storage nodes, each on a host; none without a pool."""
    if not config.pool.enabled:
        return ()
    flush_s, stop_s = config.node.flush_s, config.supervise.pool_stop_s
    if stop_s <= flush_s:
        raise ConfigError(
            f"supervise.pool_stop_s = {stop_s}: must be longer than node.flush_s = {flush_s}, or what is"
            " written at the end is cut off",
            param="supervise.pool_stop_s",
        )
    return describe_pool(config.hosts, config.storage, config.pool).storage


def _place_folders(config: Config) -> SuperviseParams:
    supervise = config.supervise
    run_name = f"millpond-{os.getuid()}-{config.gateway.port or f'pid{os.getpid()}'}"
    run_dir = supervise.run_dir or str(Path(tempfile.gettempdir()) / run_name)
    state_dir = supervise.state_dir or str(_state_home() / "millpond")
    run_dir, state_dir = (os.path.abspath(os.path.expanduser(path)) for path in (run_dir, state_dir))
    if len(run_dir) > MAX_RUN_DIR_CHARS:
        raise ConfigError(
            f"supervise.run_dir = {run_dir!r}: sockets lie in it, so its path may have {MAX_RUN_DIR_CHARS}"
            " characters at most; choose a shorter one",
            param="supervise.run_dir",
        )
    return dataclasses.replace(supervise, run_dir=run_dir, state_dir=state_dir)


def _state_home() -> Path:
    """Where the user's programs keep what outlives them (XDG base directories)."""
    given = os.environ.get("XDG_STATE_HOME", "")  # noqa: TID251 - the standard's name for it, not a setting
    return Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
