"""What the documents show exists: links, make targets, commands, and a config that loads."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from millpond.cli.main import app
from millpond.config.resolve import resolve
from millpond.config.schema import check

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def parts(pattern: str) -> list[str]:
    return re.findall(pattern, (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path):
    links = re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_config_of_the_readme_loads():
    configs = parts(r"^```toml\n(.*?)^```")
    assert configs
    for config in configs:
        resolve(check(tomllib.loads(config)))


def test_the_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for line in parts(r"^    make ([a-z ]+)") for word in line.split()}
    assert named
    assert named <= targets


def test_the_commands_of_the_readme_exist_and_every_command_is_in_it():
    def names(command, prefix: str = "") -> set[str]:
        if not hasattr(command, "commands"):
            return set() if command.hidden else {prefix.strip()}
        return {name for key, inner in command.commands.items() for name in names(inner, f"{prefix} {key}")}

    table = "\n".join(parts(r"^\| `millpond (.*?)`"))
    real = names(get_command(app)) - {"version"}
    assert {name for name in real if not re.search(rf"^{name}\b", table, re.MULTILINE)} == set()
    assert len(table.splitlines()) == len(real)


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    reasons = (ROOT / "docs" / "dependencies.md").read_text()
    everything = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = [re.match(r"[A-Za-z0-9-]+", requirement)[0] for requirement in everything]
    silent = [name for name in names if name.removeprefix("pytest-") not in reasons]
    assert silent == []


def test_every_pin_satisfies_its_range():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        assert pins[requirement.name.lower()] in requirement.specifier, text
