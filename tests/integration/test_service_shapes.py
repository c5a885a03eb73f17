"""The same texts from every shape of service: several ranks, several groups, several hosts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.conftest import Service
from tests.integration.test_service_life import run_streams

SEVERAL_RANKS = """
[[group]]
name = "p0"
role = "prefill"
ranks = 2
[[group]]
name = "d0"
role = "decode"
ranks = 2
[[group]]
name = "d1"
role = "decode"
"""

MIXED_RANKS = """
[[group]]
name = "m0"
role = "mixed"
ranks = 2
"""

TWO_HOSTS = """
[[host]]
name = "h0"
[[host]]
name = "h1"
cnic = "127.0.0.2"
[[group]]
name = "p0"
role = "prefill"
hosts = ["h0"]
[[group]]
name = "d0"
role = "decode"
hosts = ["h1"]
"""


@pytest.mark.timeout(300)
def test_every_shape_gives_the_same_texts(
    start_service: Callable[..., Service], synthetic_toml: str, free_port: Callable[[], int]
) -> None:
    texts: list[list[str]] = []
    # Two hosts: control on TCP with CURVE, KV inline on TCP instead of through shared memory.
    several_hosts = TWO_HOSTS.replace("[[host]]", f"[supervise]\ncontrol_port = {free_port()}\n[[host]]", 1)
    for shape in (SEVERAL_RANKS, MIXED_RANKS, several_hosts):
        service = start_service(synthetic_toml + shape)
        texts.append(run_streams(service))
        service.wait_empty()
        service.stop()
    assert texts[0] == texts[1] == texts[2]
