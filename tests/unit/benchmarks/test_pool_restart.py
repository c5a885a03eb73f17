"""The restart benchmark indexes what it made."""

from __future__ import annotations

from benchmarks import pool_restart


def test_a_start_finds_every_record_of_the_footers():
    assert pool_restart.restart_entries_per_s(num_segments=3, repeats=1) > 0
