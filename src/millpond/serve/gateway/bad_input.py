"""Refusals: what is wrong with a request, in words that name field, value and remedy."""

from __future__ import annotations

import json
import re
from typing import NoReturn, TypeVar

import msgspec

from millpond.core.errors import InvalidRequest

_Body = TypeVar("_Body", bound=msgspec.Struct)
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>[^`]*)`)?")
_MISSING_FIELD = re.compile(r"missing required field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>[^`]*)`)?")
_PAIR = re.compile(rb"\\u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
"""What the parser calls truncated or malformed."""
_AT = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


def refuse(param: str, value: object, remedy: str) -> NoReturn:
    """Raise the 400 for one bad value."""
    shown = json.dumps(value, ensure_ascii=False, default=str)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    raise InvalidRequest(f"`{param}` is {shown}: {remedy}", code="invalid_value", param=param)


def refuse_unsupported(param: str, why: str) -> NoReturn:
    """Raise the 400 for a field of the OpenAI schema that cannot be honoured."""
    raise InvalidRequest(f"`{param}` is not supported: {why}", code="unsupported_parameter", param=param)


def decode_body(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    """Parse a request body.

    Raises:
        InvalidRequest: Not UTF-8, not JSON, an unknown or missing field, or a value of the wrong type.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        if half := _HALF_PAIR.search(_PAIR.sub(b"", body)):
            raise InvalidRequest(
                f"the body holds half of a surrogate pair, {half.group().decode()}: send whole characters",
                code="invalid_unicode",
            ) from None
        raise InvalidRequest(
            f"the body is not valid JSON in UTF-8: {error}", code="invalid_json", param=None
        ) from None


def _explain(text: str) -> InvalidRequest:
    if found := _UNKNOWN_FIELD.search(text):
        name = ".".join(part for part in (found["path"], found["name"]) if part)
        return InvalidRequest(f"`{name}` is not a known field: remove it", code="unknown_field", param=name)
    if found := _MISSING_FIELD.search(text):
        name = ".".join(part for part in (found["path"], found["name"]) if part)
        return InvalidRequest(f"`{name}` is missing: add it", code="missing_field", param=name)
    found = _AT.search(text)
    param = found["path"] if found else None
    what = _AT.sub("", text)
    if param is None:
        return InvalidRequest(f"the body is wrong: {what}", code="invalid_type")
    if param.endswith(".type") and what.startswith("Invalid value"):
        return InvalidRequest(
            f"`{param}` is not supported: {what}; only text parts are",
            code="unsupported_parameter",
            param=param,
        )
    return InvalidRequest(f"`{param}` is wrong: {what}", code="invalid_type", param=param)
