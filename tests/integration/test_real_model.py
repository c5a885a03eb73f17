"""The default model, end to end: streams that survive kill -9 of every worker, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.conftest import Service
from tests.integration.test_service_life import NUM_STREAMS, run_streams

MODEL = "smollm2-135m"
EXACT = '[engine]\nnumerics = "exact"\n'


@pytest.mark.timeout(600)
def test_bug_24_exact_texts_survive_kill_9_of_both_workers(start_service: Callable[..., Service]) -> None:
    service = start_service(EXACT)

    def kill_both() -> None:
        service.kill("d0")
        service.kill("p0")

    undisturbed = run_streams(service, max_tokens=16, model=MODEL)
    assert len(set(undisturbed)) == NUM_STREAMS
    disturbed = run_streams(service, kill_both, max_tokens=16, model=MODEL, num_begun=NUM_STREAMS // 2)
    assert disturbed == undisturbed
    service.wait_empty(60)
