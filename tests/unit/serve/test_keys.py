"""Secrets are made once, kept private, and refused otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.core.errors import ConfigError
from millpond.serve.keys import check_private_folder, load_keys, make_keys, make_private_folder


def test_keys_are_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    keys = make_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert make_keys(path) == keys == load_keys(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["cluster.key"]


def test_secrets_do_not_show_in_a_repr(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "cluster.key")
    for secret in (keys.server_secret, keys.client_secret, repr(keys.handoff_token)):
        assert secret not in repr(keys)


def test_a_key_file_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    make_keys(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 640"):
        make_keys(path)


def test_a_linked_key_file_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path / "real.key")
    (tmp_path / "cluster.key").symlink_to(tmp_path / "real.key")
    with pytest.raises(ConfigError):
        load_keys(tmp_path / "cluster.key")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"server_public": 3}', "\0\xff"])
def test_a_file_that_holds_no_keys_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cluster.key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="not a key file"):
        load_keys(path)


def test_a_truncated_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    keys = make_keys(path)
    path.write_text(path.read_text().replace(keys.client_secret, keys.client_secret[:-5]))
    with pytest.raises(ConfigError, match="not a key file"):
        load_keys(path)


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.key"):
        load_keys(tmp_path / "nowhere.key")


def test_a_private_folder_is_made_and_checked(tmp_path: Path) -> None:
    run_folder = tmp_path / "a" / "run"
    make_private_folder(run_folder)
    make_private_folder(run_folder)
    run_folder.chmod(0o750)
    with pytest.raises(ConfigError, match="mode 750"):
        check_private_folder(run_folder)
    run_folder.chmod(0o700)
    (tmp_path / "link").symlink_to(run_folder)
    with pytest.raises(ConfigError):
        check_private_folder(tmp_path / "link")
    with pytest.raises(ConfigError, match="No such"):
        check_private_folder(tmp_path / "missing")
