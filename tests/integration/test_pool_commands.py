"""`millpond pool ...` against a small pool of real processes."""

from __future__ import annotations

import shutil
from pathlib import Path

from typer.testing import CliRunner, Result

from millpond.cli.main import app
from millpond.config.pool_description import load_pool_description
from millpond.control.extent_write import WriteEnd
from millpond.store.extent_get import BlockSink
from millpond.store.local_pool import LocalPool
from millpond.store.pool import Pool
from millpond.store.pool_folder import PoolFolder
from tests.unit.store.pool_cluster import LAYOUT, SETTINGS, blocks_of, chain_of, empty_blocks, soon

CHAIN = chain_of(70)
DESCRIPTION = """
[pool]
data_shards = 2
parity_shards = 1

[[host]]
name = "h0"
""" + "".join(
    f"""
[[storage]]
name = "s{index}"
host = "h0"
targets = 1
capacity = "64 MiB"
"""
    for index in range(4)
)


def client(running: LocalPool) -> Pool:
    assert running.metadata is not None
    return Pool(LAYOUT, running.metadata, name="test", token="t", settings=SETTINGS)


def put(running: LocalPool) -> None:
    with client(running) as made:
        results = made.put(CHAIN, 0, blocks_of(CHAIN), deadline_ns=soon(30))
        assert [result.result for result in results] == [WriteEnd.PUBLISHED] * 3


def num_read(running: LocalPool) -> int:
    with client(running) as made:
        blocks = empty_blocks(70)
        return made.get(made.match(CHAIN), BlockSink(blocks), deadline_ns=soon(30)).num_blocks


def command(running: LocalPool, tmp_path: Path, *words: str) -> Result:
    token = tmp_path / "token"
    token.write_text("t\n")
    options = ["--metadata", running.metadata_addresses[0], "--token-file", str(token)]
    return CliRunner().invoke(app, ["pool", *words, *options])


def a_healthy_pool_says_so(pool: LocalPool, tmp_path: Path) -> None:
    found = command(pool, tmp_path, "status")
    assert found.exit_code == 0, found.output
    assert all(f"s{index} " in found.output for index in range(4))
    assert "3 extents, 70 blocks" in found.output
    found = command(pool, tmp_path, "verify")
    assert (found.exit_code, found.output) == (0, "3 stripes whole, 0 degraded, 0 lost\n")
    found = command(pool, tmp_path, "scrub", "--share", "1")
    assert found.exit_code == 0, found.output
    assert found.output.splitlines()[-1].startswith("9 records")


def a_node_that_lost_its_drive_is_rebuilt(pool: LocalPool, tmp_path: Path) -> None:
    pool.kill_one("s1")
    found = command(pool, tmp_path, "status")
    assert found.exit_code == 1
    assert "s1          down" in found.output
    shutil.rmtree(tmp_path / "data" / "s1")
    pool.restart("s1")
    found = command(pool, tmp_path, "verify")
    assert found.exit_code == 1, found.output
    found = command(pool, tmp_path, "rebuild", "s1")
    assert found.exit_code == 0, found.output
    found = command(pool, tmp_path, "verify")
    assert (found.exit_code, found.output) == (0, "3 stripes whole, 0 degraded, 0 lost\n")


def the_bench_leaves_nothing_behind(pool: LocalPool, tmp_path: Path) -> None:
    found = command(pool, tmp_path, "bench", "--mib", "8")
    assert found.exit_code == 0, found.output
    assert "put" in found.output
    assert "3 extents" in command(pool, tmp_path, "status").output


def a_drained_node_takes_no_writes_and_can_be_read(pool: LocalPool, tmp_path: Path) -> None:
    found = command(pool, tmp_path, "drain", "s3")
    assert found.exit_code == 0, found.output
    assert found.output == "placement epoch 1 does without s3\n"
    assert num_read(pool) == 70
    for words in (["drain", "s3"], ["drain", "s9"], ["drain", "s2"], ["rebuild", "nobody"]):
        found = command(pool, tmp_path, *words)
        assert found.exit_code == 2, found.output
        assert found.output.count("\n") == 1
        assert found.output.startswith("error: ")


def a_dropped_tenant_is_forgotten(pool: LocalPool, tmp_path: Path) -> None:
    assert num_read(pool) == 70
    found = command(pool, tmp_path, "drop", str(CHAIN.tenant))
    assert (found.exit_code, found.output) == (0, "3 extents forgotten\n")
    assert num_read(pool) == 0


def test_the_life_of_a_pool_as_its_operator_sees_it(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").write_text(DESCRIPTION)
    description = load_pool_description(str(tmp_path / "pool.toml"))
    with LocalPool(description, tmp_path / "data", token="t") as pool:
        put(pool)
        for step in (
            a_healthy_pool_says_so,
            a_node_that_lost_its_drive_is_rebuilt,
            the_bench_leaves_nothing_behind,
            a_drained_node_takes_no_writes_and_can_be_read,
            a_dropped_tenant_is_forgotten,
        ):
            step(pool, tmp_path)


def test_errors_are_one_line_and_status_2(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["pool", "status", "--metadata", "127.0.0.1:1"])
    assert found.exit_code == 2
    assert found.output.startswith("error: ")
    assert found.output.count("\n") == 1
    missing = ["--token-file", str(tmp_path / "none")]
    found = CliRunner().invoke(app, ["pool", "status", "--metadata", "127.0.0.1:1", *missing])
    assert found.exit_code == 2


def test_the_pool_of_this_machine_is_found_by_its_state_folder_and_removed_only_when_it_is_stopped(
    tmp_path: Path,
) -> None:
    (tmp_path / "pool.toml").write_text(DESCRIPTION)
    description = load_pool_description(str(tmp_path / "pool.toml"))
    here = ["--state-dir", str(tmp_path)]
    folder = PoolFolder(tmp_path / "pool")

    def run(*words: str) -> Result:
        return CliRunner().invoke(app, ["pool", *words, *here])

    found = run("drop", "--all")
    assert (found.exit_code, found.output) == (0, f"no KV pool in {folder.path}\n")
    with folder.claimed(), LocalPool(description, folder.path, token="t") as pool:
        put(pool)
        assert "3 extents" in run("status").output
        found = run("drop", "--all")
        assert found.exit_code == 2
        assert "stop it" in found.output
        assert num_read(pool) == 70
    found = run("drop", "--all")
    assert found.exit_code == 0
    assert "removed from" in found.output
    assert [path.name for path in folder.path.iterdir()] == ["lock"]
    for words in (["drop"], ["drop", "7", "--all"]):
        assert run(*words).exit_code == 2
