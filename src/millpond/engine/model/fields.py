"""Typed access to a config record; every complaint names the file and the field."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NoReturn

from millpond.core.errors import ModelFormatError

MAX_INTEGER = 2**31 - 1
"""No size of a model is larger; checking larger ones could take for ever."""
_REQUIRED = object()


class Fields:
    """One JSON object of a config file."""

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        """Read from `values`; `source` opens every message, for example `config.json: text_config`."""
        self._values = values
        self._source = source

    def refuse(self, field: str, what: str) -> NoReturn:
        """Raise `ModelFormatError` about a field."""
        raise ModelFormatError(f"{self._source}: {field} {what}", code="model.config", param=field)

    def get(self, field: str) -> object:
        """Return a field's raw value, None where it is absent."""
        return self._values.get(field)

    def section(self, field: str) -> Fields:
        """Return a nested object."""
        value = self._values.get(field)
        if not isinstance(value, dict):
            self.refuse(field, "is missing or not an object")
        return Fields(value, f"{self._source}: {field}")

    def must_be(self, field: str, wanted: object, default: object = _REQUIRED) -> None:
        """Refuse any other value; without a default the field must be there."""
        value = self._values.get(field, default)
        if value is _REQUIRED:
            self.refuse(field, "is missing")
        if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
            self.refuse(field, f"is {value!r}; this engine runs {wanted!r} only")

    def integer(self, field: str, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """Return an integer from `minimum` to `maximum`."""
        value = self._values.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.refuse(field, f"is {value!r}, not an integer from {minimum} to {maximum}")
        return value

    def number(self, field: str, *, minimum: float = 0.0) -> float:
        """Return a number of at least `minimum`."""
        value = self._values.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(field, f"is {value!r}, not a number")
        if not minimum <= value <= sys.float_info.max:
            self.refuse(field, f"is {value!r}, not a number >= {minimum:g}")
        return float(value)

    def token(self, field: str, vocab_size: int) -> int:
        """Return a token id."""
        value = self.integer(field, minimum=0)
        if value >= vocab_size:
            self.refuse(field, f"is {value}, outside the vocabulary of {vocab_size}")
        return value

    def integers(self, field: str) -> tuple[int, ...]:
        """Return a list of integers from 0 to `MAX_INTEGER`."""
        value = self._values.get(field)
        if not isinstance(value, list):
            self.refuse(field, f"is {value!r}, not a list")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_INTEGER:
                self.refuse(field, f"holds {item!r}, not an integer from 0 to {MAX_INTEGER}")
        return tuple(value)
