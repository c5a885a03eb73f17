"""A change of src comes with a news fragment, and the fragments render."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def git(*args: str) -> str:
    return subprocess.run(
        ["git", *args], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    ).stdout.strip()


def test_fragments_render():
    result = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "0.0", "--date", "2000-01-01"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for fragment in (ROOT / "newsfragments").glob("*.md"):
        first_line = fragment.read_text().strip().splitlines()[0]
        assert first_line[:40] in result.stdout, f"{fragment.name} is not of a known kind"


def test_a_change_of_src_has_a_fragment():
    last_release = git("log", "-1", "--format=%H", "--diff-filter=M", "--", "CHANGELOG.md")
    changed = git(
        "diff", "--name-only", last_release or git("rev-list", "--max-parents=0", "HEAD"), "--", "src"
    )
    assert not changed or list((ROOT / "newsfragments").glob("*.md")), (
        "add newsfragments/+short-name.feature.md"
    )
