"""A storage target dies at any point of its work: never wrong bytes, loss only of what was not synced."""

from __future__ import annotations

import pytest

from millpond.core.chance import Chance
from tests.unit.store.crash_run import Life

SHORT_ROUNDS = 300
ROUNDS_PER_LIFE = 10


@pytest.mark.campaign("crash")
def test_campaign_crash_loses_only_what_was_not_synced(num_rounds):
    rounds = num_rounds or SHORT_ROUNDS
    crashes = lost = 0
    for number in range(rounds // ROUNDS_PER_LIFE):
        life = Life(Chance(number, "crash"))
        for _ in range(ROUNDS_PER_LIFE):
            life.round(num_steps=60, crash_within=80)
        crashes += life.num_crashes
        lost += life.num_lost
    assert crashes == rounds // ROUNDS_PER_LIFE * ROUNDS_PER_LIFE
    assert lost, "no crash ever hit an unsynced record: the campaign shows nothing"
