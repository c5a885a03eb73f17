"""Counts the multiply-adds that the plain twins do: those that the mathematics needs, and no others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from millpond.core.errors import InvariantBroken
from millpond.core.work import Mechanism, WorkKind
from millpond.engine.model.packed import Matrix, as_matrix


@dataclass(slots=True)
class Tally:
    """Multiply-adds by mechanism and kind. Norms, rotations, activations and formats are not counted."""

    multiply_adds: Counter[tuple[Mechanism, WorkKind]] = field(default_factory=Counter)
    mechanism: Mechanism | None = None
    """What is being computed now."""


_current: ContextVar[Tally | None] = ContextVar("tally", default=None)


@contextmanager
def counting() -> Iterator[Tally]:
    """Count everything that the twins do inside."""
    tally = Tally()
    token = _current.set(tally)
    try:
        yield tally
    finally:
        _current.reset(token)


@contextmanager
def inside(mechanism: Mechanism) -> Iterator[None]:
    """Book what happens inside on a mechanism; of nested ones the outermost counts."""
    tally = _current.get()
    if tally is None or tally.mechanism is not None:
        yield
        return
    tally.mechanism = mechanism
    try:
        yield
    finally:
        tally.mechanism = None


def count(kind: WorkKind, multiply_adds: int) -> None:
    """Book multiply-adds, if anybody counts.

    Raises:
        InvariantBroken: Outside every mechanism.
    """
    tally = _current.get()
    if tally is None:
        return
    if tally.mechanism is None:
        raise InvariantBroken("multiply-adds outside every mechanism")
    tally.multiply_adds[tally.mechanism, kind] += multiply_adds


def multiply_ref(weight: Matrix, row: torch.Tensor) -> torch.Tensor:
    """Weight [out, in] times one row [in], float32."""
    floats = as_matrix(weight).float()
    count(WorkKind.LINEAR, floats.numel())
    return floats @ row.float()
