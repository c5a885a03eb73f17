"""Random services with random faults: `make soak S=control N=5000`, or twenty seconds of it."""

from __future__ import annotations

from collections import Counter

import pytest

from millpond.sim.campaign import run_scenario

NUM_SHORT = 24


@pytest.mark.campaign("control")
def test_campaign_control_every_request_ends_once_and_nothing_is_left(num_rounds):
    outcomes = [run_scenario(seed) for seed in range(num_rounds or NUM_SHORT)]
    reasons = sum((outcome.reasons for outcome in outcomes), Counter())
    assert sum(reasons.values()) == sum(outcome.num_requests for outcome in outcomes)
    if len(outcomes) < NUM_SHORT:
        return
    # The faults really happened.
    assert sum(outcome.num_kills for outcome in outcomes) > len(outcomes)
    assert sum(outcome.num_resubmitted for outcome in outcomes) > len(outcomes)
    assert reasons["length"] > 0.5 * sum(reasons.values())
    assert sum(outcome.num_cached for outcome in outcomes) > 2 * len(outcomes)
    assert sum(outcome.num_broken for outcome in outcomes) > len(outcomes) / 2


@pytest.mark.parametrize("seed", [0, 10, 21])
def test_journals_of_a_scenario_replay(tmp_path, seed):
    outcome = run_scenario(seed, tmp_path)
    assert outcome == run_scenario(seed)
    assert outcome.num_cached > 0
    assert len(list(tmp_path.iterdir())) >= 2
