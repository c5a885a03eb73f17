"""From a TOML file and `--set` overrides to one checked `Config`, and where each value came from."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import msgspec

from millpond.config.resolve import resolve
from millpond.config.schema import check
from millpond.config.sections import TABLE_BY_FIELD, Config
from millpond.core.errors import ConfigError


class Origin(StrEnum):
    """Where a value came from."""

    DEFAULT = "default"
    FILE = "file"
    SET = "--set"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A config and the origins of its values."""

    config: Config
    origins: dict[str, Origin]
    """By path, for example `gateway.port` or `group[0].ranks`; paths that are missing are defaults."""


def load_config(file: Path | None = None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Load, check and resolve the configuration.

    Args:
        file: TOML file; None for the defaults alone.
        overrides: `section.key=value`, or `table.name.key=value` for an entry of a repeated table, applied in
            order on top of the file. The value is TOML; what is no TOML is taken as a string.

    Raises:
        ConfigError: The file cannot be read, or something in it is wrong.
    """
    data = _read(file) if file else {}
    origins = dict.fromkeys(_leaf_paths(data), Origin.FILE)
    for override in overrides:
        origins[_apply(data, override)] = Origin.SET
    return LoadedConfig(config=resolve(check(data)), origins=origins)


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 at byte {error.start}") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {error}") from error


def _apply(data: dict[str, Any], override: str) -> str:
    """Put one override into the nested mapping and return the path of the value."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError(f"--set {override}: write section.key=value")
    if keys[0] in TABLE_BY_FIELD.values():
        return _apply_to_table(data, keys, _parse_value(text), override)
    content: object = data
    for depth, key in enumerate(keys[:-1], start=1):
        content = cast("dict[str, object]", content).setdefault(key, {})
        if not isinstance(content, dict):
            table = ".".join(keys[:depth])
            raise ConfigError(f"--set {override}: {table} is no table", param=table)
    cast("dict[str, object]", content)[keys[-1]] = _parse_value(text)
    return ".".join(keys)


def _apply_to_table(data: dict[str, Any], keys: list[str], value: object, override: str) -> str:
    if len(keys) != 3:
        raise ConfigError(f"--set {override}: write {keys[0]}.name.key=value")
    table, name, key = keys
    entries = _entries(data.setdefault(table, _default_entries(table)))
    for index, entry in enumerate(entries):
        if entry.get("name") == name:
            entry[key] = value
            return f"{table}[{index}].{key}"
    known = ", ".join(str(entry.get("name")) for entry in entries) or "none"
    raise ConfigError(f"--set {override}: no {table} is named {name!r}; there are: {known}", param=table)


def _default_entries(table: str) -> list[dict[str, Any]]:
    field_name = next(field for field, key in TABLE_BY_FIELD.items() if key == table)
    return list(msgspec.to_builtins(getattr(Config(), field_name)))


def _parse_value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _leaf_paths(content: object, prefix: str = "") -> list[str]:
    """Paths of all values in a nested mapping."""
    if not isinstance(content, dict):
        entries = enumerate(_entries(content))
        return [path for index, entry in entries for path in _leaf_paths(entry, f"{prefix}[{index}]")] or [
            prefix
        ]
    items = cast("dict[str, object]", content).items()
    return [path for key, value in items for path in _leaf_paths(value, f"{prefix}.{key}" if prefix else key)]


def _entries(content: object) -> list[dict[str, Any]]:
    """Entries of a repeated table; none if it is something else, which `check` will refuse."""
    entries = cast("list[object]", content) if isinstance(content, list) else []
    return [cast("dict[str, Any]", entry) for entry in entries if isinstance(entry, dict)]
