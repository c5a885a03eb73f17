"""Every parameter record is frozen, has a default for every field, and explains every field."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "millpond"
IDENTITY_TABLES = frozenset({"HostParams", "GroupParams", "StorageParams", "LinkParams", "TenantParams"})
"""Tables whose names and addresses have no sensible default."""


def params_classes() -> list[tuple[str, ast.ClassDef]]:
    return [
        (f"{path.relative_to(PACKAGE)}:{node.name}", node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Params") and node.name != "SamplingParams"
    ]


def is_docstring(node: ast.stmt | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@pytest.mark.parametrize(("name", "node"), params_classes(), ids=[name for name, _ in params_classes()])
def test_every_field_is_explained(name: str, node: ast.ClassDef):
    fields = [
        (item, after) for item, after in pairwise([*node.body, None]) if isinstance(item, ast.AnnAssign)
    ]
    silent = [ast.unparse(item.target) for item, after in fields if not is_docstring(after)]
    assert silent == [], f"{name}: no docstring under these fields"
    if node.name not in IDENTITY_TABLES:
        assert [ast.unparse(item.target) for item, _ in fields if item.value is None] == []


@pytest.mark.parametrize(("name", "node"), params_classes(), ids=[name for name, _ in params_classes()])
def test_is_frozen_and_slotted(name: str, node: ast.ClassDef):
    decorators = " ".join(ast.unparse(item) for item in node.decorator_list)
    assert "frozen=True" in decorators, name
    assert "slots=True" in decorators, name
