"""Strict checking of what a file says: pydantic models derived from the parameter records.

Nobody writes a field twice: `strict_model` makes a model with the same fields, defaults and types as a
record, refuses unknown keys, and `make_record` turns a checked model back into the record.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, cast, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails

from millpond.config.sections import TABLE_BY_FIELD, Config, section_types
from millpond.config.sizes import parse_rate, parse_size
from millpond.core.errors import ConfigError

_PARSER_BY_LAST_WORD: dict[str, Callable[[str], int]] = {
    "bytes": parse_size,
    "memory": parse_size,
    "arena": parse_size,
    "dram": parse_size,
    "capacity": parse_size,
    "rate": parse_rate,
}
"""Whole numbers that may also be written with a unit, by the last word of the field's name."""


@cache
def strict_model(record: type) -> type[BaseModel]:
    """Make the model of a frozen dataclass: same fields, strict types, no unknown key, no negative number.

    Args:
        record: Its fields are bool, int, float, str, enums, literals, tuples of these, and records.
    """
    hints = get_type_hints(record)
    fields: dict[str, Any] = {}
    for item in dataclasses.fields(record):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            inner = strict_model(cast("type", hint))
            fields[item.name] = (inner, Field(default_factory=inner))
        else:
            default = ... if item.default is dataclasses.MISSING else item.default
            fields[item.name] = (_strict_type(item.name, hint), default)
    return create_model(
        record.__name__,
        __config__=ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=()),
        **fields,
    )


def make_record(record: type, model: BaseModel) -> Any:
    """Make the record of a model that `strict_model(record)` has checked."""
    hints = get_type_hints(record)
    values = {item.name: getattr(model, item.name) for item in dataclasses.fields(record)}
    return record(
        **{
            name: make_record(hints[name], value) if isinstance(value, BaseModel) else value
            for name, value in values.items()
        }
    )


def table_type(field_name: str) -> type:
    """Record type of the entries of a repeated table, by the name of its field in `Config`."""
    return get_type_hints(Config)[field_name].__args__[0]


def check(data: Mapping[str, Any]) -> Config:
    """Make a `Config` of a nested mapping with the keys of the file.

    Args:
        data: Sections and repeated tables; what is missing keeps its default.

    Raises:
        ConfigError: The first thing that is wrong, with its path, its value and what to do.
    """
    records = section_types()
    tables = {key: field_name for field_name, key in TABLE_BY_FIELD.items()}
    values: dict[str, Any] = {}
    for key, content in data.items():
        if key in records:
            values[key] = check_record(records[key], key, content)
        elif key in tables:
            values[tables[key]] = _check_table(table_type(tables[key]), key, content)
        else:
            raise ConfigError(f"{key}: no such section; {_suggest(key, [*records, *tables])}", param=key)
    return Config(**values)


def _check_table(record: type, key: str, content: object) -> tuple[Any, ...]:
    if not isinstance(content, list):
        raise ConfigError(f"{key}: write [[{key}]], once for each {key}", param=key)
    entries = cast("list[object]", content)
    return tuple(check_record(record, f"{key}[{index}]", entry) for index, entry in enumerate(entries))


def check_record(record: type, path: str, content: object) -> Any:
    """Make one record of what the file says at `path`.

    Raises:
        ConfigError: As `check`.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{path} = {content!r}: must be a table, [{path}]", param=path)
    model = strict_model(record)
    try:
        # Checked as JSON: there a list is a tuple's strict form, and a string an enum's.
        checked = model.model_validate_json(json.dumps(content, default=str))
    except ValidationError as error:
        raise _config_error(record, path, error.errors(include_url=False)[0]) from None
    return make_record(record, checked)


def _strict_type(name: str, hint: Any) -> Any:
    parse = _PARSER_BY_LAST_WORD.get(name.rsplit("_", 1)[-1])
    if hint is int:
        bounds = Field(ge=0, le=65535) if name == "port" else Field(ge=0)
        if parse is None:
            return Annotated[int, bounds]
        return Annotated[
            int, BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value), bounds
        ]
    if hint is float:
        return Annotated[float, Field(ge=0, allow_inf_nan=False)]
    return hint


def _config_error(record: type, path: str, details: ErrorDetails) -> ConfigError:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
    param = f"{path}{where}"
    key = str(details["loc"][-1]) if details["loc"] else ""
    match details["type"]:
        case "extra_forbidden":
            problem = f"no such setting; {_suggest(key, _known_keys(record, details['loc'][:-1]))}"
            return ConfigError(f"{param}: {problem}", param=param)
        case "missing":
            return ConfigError(f"{param}: must be given, it has no default", param=param)
        case "value_error":
            problem = str(details.get("ctx", {}).get("error", details["msg"]))
        case _:
            problem = details["msg"].removeprefix("Input should be ").removeprefix("Input ")
            problem = f"must be {problem}"
    return ConfigError(f"{param} = {details['input']!r}: {problem}", param=param)


def _known_keys(record: type, path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        record = get_type_hints(record)[str(part)]
    return [item.name for item in dataclasses.fields(record)]


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(sorted(known))}"
