"""The whole configuration as TOML: every value with its origin, every setting with its docstring."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from millpond.config.load import LoadedConfig, Origin
from millpond.config.sections import TABLE_BY_FIELD, section_types
from millpond.config.sizes import format_size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

COMMENT_WIDTH = 108


def field_docs(record: type) -> dict[str, str]:
    """Docstrings that stand under the fields of a dataclass, by field."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(record)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs: dict[str, str] = {}
    for field, below in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs


def show_config(loaded: LoadedConfig) -> str:
    """Write a config as a TOML file that loads to the same config."""
    lines = [f"# digest {loaded.config.digest}"]
    for name in section_types():
        lines += _section_lines(getattr(loaded.config, name), name, loaded.origins)
    for field_name, table in TABLE_BY_FIELD.items():
        for index, record in enumerate(getattr(loaded.config, field_name)):
            lines += ["", f"[[{table}]]", *_record_lines(record, f"{table}[{index}]", loaded.origins)]
    return "\n".join(lines) + "\n"


def _section_lines(record: DataclassInstance, path: str, origins: dict[str, Origin]) -> Iterator[str]:
    yield from ("", f"[{path}]")
    yield from _record_lines(record, path, origins)
    for item in dataclasses.fields(record):
        if dataclasses.is_dataclass(inner := getattr(record, item.name)):
            yield from _section_lines(cast("DataclassInstance", inner), f"{path}.{item.name}", origins)


def _record_lines(record: DataclassInstance, path: str, origins: dict[str, Origin]) -> Iterator[str]:
    docs = field_docs(type(record))
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        if dataclasses.is_dataclass(value):
            continue  # a table of its own, below
        yield from (f"# {line}" for line in textwrap.wrap(docs.get(item.name, ""), COMMENT_WIDTH))
        origin = origins.get(f"{path}.{item.name}", Origin.DEFAULT)
        size = f", {format_size(value)}" if item.name.endswith(("_bytes", "_memory")) else ""
        yield f"{item.name} = {_toml(value)}  # {origin}{size}"


def _toml(value: object) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(entry) for entry in cast("tuple[object, ...]", value)) + "]"
    # JSON's strings, numbers and booleans are TOML's, except that TOML wants DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
