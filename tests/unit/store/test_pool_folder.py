"""What a pool on one machine keeps between its starts: addresses, token, placement; and who may use it."""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from millpond.config.pool_description import PoolDescription, load_pool_description
from millpond.core.errors import ConfigError
from millpond.core.pool_map import PoolMap
from millpond.store.files import DiskFiles
from millpond.store.metadata.checkpoint import save_map
from millpond.store.pool_folder import PoolFolder, choose_addresses, used_bytes


def prepare(folder: PoolFolder, description: PoolDescription) -> PoolMap:
    folder.path.mkdir(exist_ok=True)
    folder.prepare(description, reads_locally=True, loopback=True)
    return msgspec.json.decode(folder.map_file.read_bytes(), type=PoolMap)


def save(folder: PoolFolder, pool_map: PoolMap, shard: str = "m0") -> None:
    """As a metadata shard does when it is given a map."""
    files = DiskFiles(folder.data(shard))
    save_map(files, pool_map)
    files.close_folder()


@pytest.fixture
def folder(tmp_path: Path) -> PoolFolder:
    return PoolFolder(tmp_path / "pool")


def test_a_new_folder_gets_a_token_addresses_and_a_first_map(folder: PoolFolder):
    made = prepare(folder, load_pool_description("pooled"))
    assert made.version == 1
    assert [node.node for node in made.nodes] == ["s0", "s1", "s2"]
    assert [node.path for node in made.nodes] == [str(folder.path / name) for name in ("s0", "s1", "s2")]
    assert made.metadata == (folder.addresses()["m0"],)
    assert len({*folder.addresses().values()}) == 4
    assert stat.S_IMODE(folder.token_file.stat().st_mode) == 0o600
    assert len(folder.token()) == 64


def test_addresses_and_token_stay_and_the_map_is_newer_than_what_a_shard_has(folder: PoolFolder):
    description = load_pool_description("pooled")
    first = prepare(folder, description)
    kept = folder.addresses(), folder.token()
    save(folder, replace(first, version=7, default_depth=9))
    second = prepare(folder, description)
    assert (folder.addresses(), folder.token()) == kept
    assert second == replace(first, version=8, default_depth=9)


def test_a_port_that_is_taken_meanwhile_is_chosen_anew_and_the_map_says_so(folder: PoolFolder):
    description = load_pool_description("pooled")
    first = prepare(folder, description)
    save(folder, first)
    before = folder.addresses()
    host, port = before["s1"].split(":")
    with socket.create_server((host, int(port))):
        second = prepare(folder, description)
    after = folder.addresses()
    assert [name for name in before if before[name] != after[name]] == ["s1"]
    assert [node.address for node in second.nodes] == [after[name] for name in ("s0", "s1", "s2")]


def test_ports_are_different_even_if_an_earlier_start_said_otherwise():
    hosts = {"a": "127.0.0.1", "b": "127.0.0.1"}
    chosen = choose_addresses(hosts, {})
    again = choose_addresses(hosts, {"a": chosen["a"], "b": chosen["a"]})
    assert again["a"] == chosen["a"] != again["b"]
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        choose_addresses({"a": "192.0.2.1"}, {})


def test_another_node_means_another_placement_and_old_data_stays_readable(folder: PoolFolder):
    description = load_pool_description("pooled")
    first = prepare(folder, replace(description, storage=description.storage[:2]))
    save(folder, first)
    second = prepare(folder, description)
    assert [epoch.epoch for epoch in second.epochs] == [0, 1]
    assert second.epochs[0] == first.epochs[0]
    assert set(second.epochs[1].points) == {"s0", "s1", "s2"}
    save(folder, second)
    assert prepare(folder, description).epochs == second.epochs


def test_a_pool_that_cannot_become_the_described_one_says_what_to_do(folder: PoolFolder):
    local = load_pool_description("local-affinity")
    save_first = prepare(folder, replace(local, storage=local.storage[:1]))
    save(folder, save_first)
    with pytest.raises(ConfigError, match="pool drop --all"):
        prepare(folder, local)


def test_only_one_may_use_a_pool_at_a_time(folder: PoolFolder):
    with folder.claimed(), pytest.raises(ConfigError, match="stop it"), folder.claimed():
        pass
    with folder.claimed():
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_clearing_removes_all_but_the_lock(folder: PoolFolder):
    with folder.claimed():
        prepare(folder, load_pool_description("pooled"))
        folder.data("s0").mkdir()
        (folder.data("s0") / "segment").write_bytes(os.urandom(1 << 16))
        assert used_bytes(folder.path) >= 1 << 16
        assert folder.clear() >= 1 << 16
        assert [path.name for path in folder.path.iterdir()] == ["lock"]


def test_damaged_addresses_are_named(folder: PoolFolder):
    folder.path.mkdir()
    folder.address_file.write_text("no json")
    with pytest.raises(ConfigError, match=r"addresses\.json"):
        folder.addresses()
    with pytest.raises(ConfigError, match="no KV pool"):
        folder.token()
