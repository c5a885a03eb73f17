"""The codec of sockets and journals gives back what it was given, and refuses everything else."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.config import wire
from millpond.core import events, node_messages, plan
from millpond.core.errors import DataError, WireVersionMismatch

KINDS = events.ALL + plan.ALL + node_messages.ALL
INT64 = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)


@functools.cache
def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Every value that the annotation allows."""
    if isinstance(annotation, typing.NewType):
        return values_of(annotation.__supertype__)
    if annotation is array:
        return st.lists(INT32, max_size=20).map(lambda ids: array("i", ids))
    if annotation is type(None):
        return st.none()
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(values_of(argument) for argument in arguments))
    if origin is tuple and arguments[-1] is ...:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_of(argument) for argument in arguments))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return st.sampled_from(annotation)
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        fields = {field.name: values_of(hints[field.name]) for field in dataclasses.fields(annotation)}
        return st.builds(annotation, **fields)
    plain = {
        int: INT64,
        str: st.text(max_size=20),
        bytes: st.binary(max_size=40),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
    }
    return plain[annotation]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_kind_survives_the_wire(kind: type, data: st.DataObject) -> None:
    message = data.draw(values_of(kind))
    encoded = wire.encode(message)
    assert wire.decode(encoded) == message
    assert wire.decode(memoryview(encoded)) == message
    assert wire.encode(wire.decode(encoded)) == encoded


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_with_a_typed_error(data: bytes) -> None:
    with pytest.raises(DataError):
        wire.decode(data)


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_message_is_a_message_or_a_typed_error(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    damaged = bytearray(wire.encode(data.draw(values_of(kind))))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(0, len(damaged))) :]
    try:
        message = wire.decode(bytes(damaged))
    except DataError:
        return
    assert type(message) in KINDS


def test_token_ids_travel_as_little_endian_int32() -> None:
    start = plan.SequenceStart(
        request_id=plan.RequestId("r"),
        attempt=0,
        token_ids=array("i", [1, -2, 0x01020304]),
        num_prompt_tokens=3,
        sampling=plan.SamplingParams(max_tokens=1, seed=0),
        block_table=(),
        slot=plan.SlotId(0),
    )
    encoded = wire.encode(plan.RankPlan(plan.DpRank(0), start=(start,)))
    body = msgspec.msgpack.decode(encoded)[2]
    assert body["start"][0]["token_ids"] == b"\x01\0\0\0\xfe\xff\xff\xff\x04\x03\x02\x01"


def test_ids_that_are_not_whole_int32_are_refused() -> None:
    good = msgspec.msgpack.decode(wire.encode(events.Submit(make_spec())))
    good[2]["spec"]["prompt_ids"] = b"\x01\0\0"
    with pytest.raises(DataError, match="int32"):
        wire.decode(msgspec.msgpack.encode(good))


def make_spec() -> plan.RequestSpec:
    """A small request."""
    return plan.RequestSpec(
        request_id=plan.RequestId("r"),
        attempt=0,
        gateway=events.GatewayId("g"),
        reply_to="ipc://tokens",
        prompt_ids=array("i", [5, 6]),
        sampling=plan.SamplingParams(max_tokens=1, seed=0),
    )


@pytest.mark.parametrize(
    "envelope",
    [
        [wire.WIRE_VERSION + 1, "Tick", {}],
        [wire.WIRE_VERSION, "RankView", {}],
        [wire.WIRE_VERSION, "os.system", {}],
    ],
)
def test_another_version_or_an_unknown_kind_is_a_version_mismatch(envelope: list[object]) -> None:
    with pytest.raises(WireVersionMismatch):
        wire.decode(msgspec.msgpack.encode(envelope))


def test_a_message_over_the_limit_is_refused_unread() -> None:
    encoded = wire.encode(events.Tick())
    assert wire.decode(encoded, max_bytes=len(encoded)) == events.Tick()
    with pytest.raises(DataError, match="limit"):
        wire.decode(encoded, max_bytes=len(encoded) - 1)


@pytest.mark.parametrize(
    "data",
    [
        b"\x93\x01\xa4Tick" + b"\x91" * 100_000 + b"\xc0",  # nested beyond any depth
        b"\x93\x01\xa9TokensOut\x82\xa5group\xa1g\xa6tokens\xdd\xff\xff\xff\xff",  # claims 2**32 - 1 tokens
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_bytes_that_claim_more_than_they_hold_are_refused(data: bytes) -> None:
    with pytest.raises(DataError):
        wire.decode(data)


def test_only_messages_of_the_table_can_be_sent() -> None:
    with pytest.raises(TypeError):
        wire.encode({"kind": "Tick"})
