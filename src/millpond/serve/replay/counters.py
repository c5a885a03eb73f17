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
"""By `name`, or `name:kind` where a label tells kinds apart."""


def read_counters(text: str) -> Counts:
    """Counters of the service in an exposition; nothing of a server that is not ours."""
    counts: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        name, labels, value = found[1], dict(_LABEL.findall(found[2] or "")), float(found[3])
        if not name.startswith("millpond_") or not (name.endswith("_total") or name in _GAUGES_THAT_COUNT):
            continue
        kind = next((labels[key] for key in _KINDS if labels.get(key)), "")
        counts[f"{name}:{kind}" if kind else name] += value
    return dict(counts)


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> Counts:
    """What was counted meanwhile, nothing where nothing was. A process that restarted began at 0 again."""
    changes = {name: value - before.get(name, 0.0) for name, value in sorted(after.items())}
    return {name: change if change > 0 else after[name] for name, change in changes.items() if change}
