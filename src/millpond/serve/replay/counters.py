"""The service's own counters around a run, from its `/metrics`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_KINDS = ("source", "outcome", "reason")
"""Labels that tell counts apart; groups, ranks and models are summed up."""
_GAUGES_THAT_COUNT = frozenset({"millpond_handoff_send_num_bytes", "millpond_handoff_send_num_sent"})

Counts = dict[str, float]
"""By series, as the exposition names it; differences by `name`, or `name:kind` where a label tells kinds
apart."""


def read_counters(text: str) -> Counts:
    """Counters of the service in an exposition, by series; nothing of a server that is not ours."""
    counts: Counts = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        name = found[1]
        if name.startswith("millpond_") and (name.endswith("_total") or name in _GAUGES_THAT_COUNT):
            counts[line.rpartition(" ")[0]] = float(found[3])
    return counts


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> Counts:
    """What was counted meanwhile, summed over processes; nothing where nothing was.

    A counter that fell is that of a process that restarted, and began at 0 again. What it had counted since
    `before` is lost.
    """
    changes: defaultdict[str, float] = defaultdict(float)
    for series, value in sorted(after.items()):
        change = value - before.get(series, 0.0)
        changes[_name_of(series)] += change if change >= 0 else value
    return {name: change for name, change in changes.items() if change}


def _name_of(series: str) -> str:
    name, _, text = series.partition("{")
    labels = dict(_LABEL.findall(text))
    kind = next((labels[key] for key in _KINDS if labels.get(key)), "")
    return f"{name}:{kind}" if kind else name
