"""How much of a request log could have come from a cache that forgets nothing. Imports nothing of ours.

A line of the log is one turn: `session`, `prompt` and `output` (token ids), `cached` (what the service said).
Run as a script on a log, it prints the sums.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BLOCK = 128


def sums(turns: list[dict[str, Any]]) -> dict[str, int]:
    """Prompt tokens of a log, in the order of its turns: all, cached, and those that could have been."""
    before: dict[str, list[int]] = {}
    total = {"prompt": 0, "cached": 0, "ideal": 0}
    for turn in turns:
        prompt = turn["prompt"]
        known = before.get(turn["session"], [])
        common = 0
        while common < min(len(prompt), len(known)) and prompt[common] == known[common]:
            common += 1
        total["prompt"] += len(prompt)
        total["cached"] += turn["cached"]
        total["ideal"] += min(common, len(prompt) - 1) // BLOCK * BLOCK
        before[turn["session"]] = prompt + turn["output"]
    return total


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    print(json.dumps(sums([json.loads(line) for line in lines])))
