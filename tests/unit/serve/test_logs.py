"""Processes that share one standard error: every record stays a line of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NUM_WRITERS = 3
NUM_RECORDS = 3000
WRITER = f"""
import structlog
from millpond.serve.logs import configure_logging
configure_logging(process="w")
for index in range({NUM_RECORDS}):
    structlog.get_logger().info("event", index=index, text="x" * (index % 300))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_records_of_many_processes_are_lines_of_one_file(tmp_path: Path, unbuffered: str) -> None:
    path = tmp_path / "log"
    with path.open("wb") as log:
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER], stderr=log, env=os.environ | {"PYTHONUNBUFFERED": unbuffered}
            )
            for _ in range(NUM_WRITERS)
        ]
        assert [writer.wait(120) for writer in writers] == [0] * NUM_WRITERS
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(record["index"] for record in records) == sorted(list(range(NUM_RECORDS)) * NUM_WRITERS)
