"""Everything that may cross a process border or stand in a journal is frozen, slotted and typed."""

from __future__ import annotations

import dataclasses

import pytest

from millpond.core import events, plan, request, views

MESSAGES = (*events.ALL, *plan.ALL)
ALL_DATACLASSES = sorted(
    {
        value
        for module in (events, plan, request, views)
        for value in vars(module).values()
        if dataclasses.is_dataclass(value) and isinstance(value, type)
    },
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize("cls", ALL_DATACLASSES, ids=lambda cls: cls.__name__)
def test_is_a_frozen_slotted_dataclass(cls: type):
    assert cls.__dataclass_params__.frozen
    assert "__slots__" in vars(cls)
    assert cls.__doc__


def test_kind_names_are_unique():
    names = [cls.__name__ for cls in MESSAGES]
    assert sorted(set(names)) == sorted(names)
