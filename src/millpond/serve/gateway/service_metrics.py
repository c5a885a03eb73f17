"""What the controller knows about groups and queues, as part of `/metrics`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millpond.core.ids import GatewayId

_RANK_GAUGES = {
    "num_seqs": ("millpond_rank_sequences", "Sequences that hold memory"),
    "num_queued": ("millpond_rank_sequences_queued", "Assigned sequences that hold nothing yet"),
    "queued_tokens": ("millpond_rank_queued_tokens", "Tokens of queued work"),
    "kv_tokens": ("millpond_rank_kv_tokens", "Tokens of the sequences that hold memory"),
    "free_blocks": ("millpond_kv_blocks_free", "Free KV blocks"),
    "free_slots": ("millpond_state_slots_free", "Free state slots"),
}
"""Field of a rank's view -> (metric, text)."""


def render_service(report: str | None, gateway: GatewayId, num_cached_tokens: int) -> bytes:
    """Make the metrics of a `StatusReport`.

    Args:
        report: Its JSON text; None if the controller did not answer.
        gateway: Our name.
        num_cached_tokens: Prompt tokens of answered calls that were loaded: leaders count those that they
            computed, once more if it was done again.
    """
    registry = CollectorRegistry()
    own = {str(gateway): {"millpond_prompt_tokens_total:cached": float(num_cached_tokens)}}
    registry.register(_Service(json.loads(report) if report is not None else None, own))
    return generate_latest(registry)


class _Service(Collector):
    """One report, read once."""

    def __init__(self, report: dict[str, Any] | None, own: dict[str, dict[str, float]]) -> None:
        self._report = report
        self._own = own

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the report."""
        report = self._report
        yield GaugeMetricFamily(
            "millpond_controller_up", "1 while the controller answers", int(report is not None)
        )
        groups: dict[str, Any] = report["groups"] if report is not None else {}
        nodes: dict[str, Any] = report.get("nodes", {}) if report is not None else {}
        yield from _values({name: state["values"] for name, state in (groups | nodes).items()} | self._own)
        if report is None:
            return
        yield GaugeMetricFamily(
            "millpond_queue_requests", "Requests without a group", report["queue"]["num_queued"]
        )
        yield from _rank_gauges(groups)


def _rank_gauges(groups: dict[str, Any]) -> Iterator[Metric]:
    for field, (name, text) in _RANK_GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=("group", "role", "rank"))
        for group, state in groups.items():
            for rank in state["ranks"]:
                gauge.add_metric((group, state["role"], str(rank["rank"])), rank[field])
        yield gauge


def _values(values_by_group: dict[str, dict[str, float]]) -> Iterator[Metric]:
    """Counters and gauges that are reported by name; `name:source` has its source as a label."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for group, values in values_by_group.items():
        for full_name, value in values.items():
            name, _, source = full_name.partition(":")
            family = families.get(name)
            if family is None:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = kind(name, "Reported by leaders and daemons", labels=("group", "source"))
                families[name] = family
            family.add_metric((group, source), value)
    yield from families.values()
