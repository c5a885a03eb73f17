"""Twelve senders and one receiver behind a slow link with a shallow queue, in network namespaces."""

from __future__ import annotations

import pytest

from benchmarks.pool_incast import BOUNDED, incast
from millpond.serve.testbed import netns

REASON = netns.why_not()


@pytest.mark.skipif(REASON is not None, reason=f"no testbed: {REASON}")
def test_bounded_reads_over_a_shallow_queue_all_arrive_and_stay_in_bounds():
    found = incast(BOUNDED, num_reads=12)
    assert (found.num_reads, found.num_failed) == (12, 0)
    assert 0 < found.peak_in_flight_bytes <= BOUNDED.max_in_flight_bytes
