"""The import contracts of pyproject.toml hold, and each of them breaks when it is violated."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "millpond"
PURE_LAYERS = ("core", "policies", "control")


def lint_imports(cwd: Path) -> subprocess.CompletedProcess[str]:
    """Check the package below `cwd`, which stands first on the path, against the repo's contracts."""
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1));"
        "from importlinter.cli import lint_imports_command as check; check()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(cwd), str(ROOT / "pyproject.toml"), "--no-cache"],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_tree_keeps_every_contract():
    result = lint_imports(ROOT / "src")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("core/ids.py", "import millpond.control", "layers"),
        ("serve/planted.py", "import millpond.sim", "layers"),
        ("newlayer/__init__.py", "", "layers"),
        ("core/ids.py", "import os", "pure core"),
        ("control/planted.py", "import time", "pure core"),
        ("sim/planted.py", "import asyncio", "sim is light"),
        ("engine/planted.py", "import millpond.control", "engine obeys"),
        ("policies/queue_order.py", "import millpond.policies.step_vote", "policies stand alone"),
        ("serve/gateway/link.py", "import torch", "gateway and controller never load torch"),
        ("control/dispatcher.py", "import torch", "gateway and controller never load torch"),
        ("core/ids.py", "import millpond.core.request", "no cycles"),
    ],
)
def test_a_planted_violation_breaks_its_contract(tmp_path: Path, module: str, statement: str, contract: str):
    shutil.copytree(PACKAGE, tmp_path / "millpond", ignore=shutil.ignore_patterns("__pycache__"))
    planted = tmp_path / "millpond" / module
    planted.parent.mkdir(exist_ok=True)
    (planted.parent / "__init__.py").touch()
    before = planted.read_text() if planted.exists() else ""
    planted.write_text(before + f"\n{statement}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{contract} BROKEN" in result.stdout


def imported_names(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return names


def test_pure_layers_use_the_standard_library_only():
    foreign = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for layer in PURE_LAYERS
        for path in sorted((PACKAGE / layer).rglob("*.py"))
        for name in imported_names(path)
        if (top := name.split(".")[0]) != "millpond" and top not in sys.stdlib_module_names
    ]
    assert foreign == []


@pytest.mark.parametrize(
    "module", ["millpond.engine", "millpond.cli.main", "millpond.config", "millpond.sim"]
)
def test_importing_it_loads_no_torch(module: str):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
