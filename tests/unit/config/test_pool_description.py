"""Descriptions of a pool: the presets load, and what makes no sense is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.config.pool_description import PRESETS, load_pool_description
from millpond.config.pool_params import GroupKind
from millpond.core.errors import ConfigError
from millpond.core.units import GIB

NODE = '[[storage]]\nname = "s0"\nhost = "h0"\ntargets = 2\ncapacity = "1 GiB"\n'


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load(name: str):
    description = load_pool_description(name)
    assert all(description.host(node.host) for node in description.storage)


def test_the_presets_are_the_two_of_the_decision():
    pooled, local = (load_pool_description(name).placement for name in PRESETS)
    assert (pooled.data_shards, pooled.parity_shards, pooled.groups) == (10, 2, GroupKind.SPREAD)
    assert (local.data_shards, local.parity_shards, local.groups) == (1, 0, GroupKind.HOST)


def test_a_file_says_what_differs(tmp_path: Path):
    path = tmp_path / "pool.toml"
    path.write_text(f"[pool]\ndata_shards = 4\nmetadata_shards = 3\n{NODE}")
    description = load_pool_description(str(path))
    assert (description.placement.data_shards, description.placement.parity_shards) == (4, 2)
    assert description.placement.metadata_shards == 3
    assert description.storage[0].capacity == GIB


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "at least one"),
        ("[pool", "pool"),
        ('[pool]\ngroups = "racks"\n' + NODE, "pool.groups"),
        ("[pool]\ndata_shard = 4\n" + NODE, "data_shards"),
        ('[pool]\ngroups = "host"\n' + NODE, "data_shards = 1"),
        ("[pool]\nparity_shards = 5\n" + NODE, "at most 4"),
        ("[pool]\ndata_shards = 0\n" + NODE, "1 to 32"),
        ("[pool]\nmetadata_shards = 0\n" + NODE, "metadata_shards"),
        (NODE + NODE, "one name"),
        (NODE.replace("h0", "h7"), "h7"),
        (NODE.replace("targets = 2", "targets = 0"), "targets"),
        ("[pools]\n" + NODE, "pools"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, text: str, says: str):
    path = tmp_path / "pool.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_pool_description(str(path))


def test_a_file_that_is_not_there_names_the_presets():
    with pytest.raises(ConfigError, match="local-affinity"):
        load_pool_description("no such file")
