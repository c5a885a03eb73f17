"""The independent count of what could have been cached, on logs whose answer is known by heart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import kv_ideal
from benchmarks.kv_runs import NEW_TOKENS, OUTPUT_TOKENS, growing_sessions


def turn(session: str, prompt: list[int], output: list[int], cached: int = 0) -> dict[str, object]:
    return {"session": session, "prompt": prompt, "output": output, "cached": cached}


def test_whole_blocks_of_the_same_session_count_and_one_token_is_left():
    log = [
        turn("a", [1] * 300, [2] * 100),
        turn("b", [1] * 300, [2] * 100, 256),
        turn("a", [1] * 300 + [2] * 100 + [3] * 50, [4], 384),
        turn("b", [1] * 256, [], 128),
    ]
    assert kv_ideal.sums(log) == {"prompt": 300 + 300 + 450 + 256, "cached": 768, "ideal": 384 + 128}


def test_the_script_prints_the_same(tmp_path: Path):
    log = [turn("a", [1] * 200, [2]), turn("a", [1] * 200 + [2] * 9, [3], 128)]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, log)))
    command = [sys.executable, kv_ideal.__file__, str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert json.loads(printed) == kv_ideal.sums(log) == {"prompt": 409, "cached": 128, "ideal": 128}


def test_the_workload_grows_by_answer_and_news():
    sessions = growing_sessions(2, 3)
    assert [turn.num_prompt_tokens for turn in sessions[1].turns] == [1536, 1840, 2144]
    assert NEW_TOKENS + OUTPUT_TOKENS == 304
