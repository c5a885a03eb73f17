"""Messages as bytes: the codec of every socket and every journal (interfaces A.5).

A message is the msgpack array [u16 version, kind name, body]. The kinds are the classes in
`core.events.ALL`, `core.plan.ALL` and `core.node_messages.ALL`; a body is the map of the dataclass's
fields; token arrays travel as little-endian int32 bytes. Nothing is looked up by a name that the sender
chose except in that table.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any, cast

import msgspec

from millpond.core import events, node_messages, plan
from millpond.core.errors import DataError, WireVersionMismatch
from millpond.core.request import TokenIds
from millpond.core.units import MIB

WIRE_VERSION = 1
"""Raised with every change that an older peer could not read."""
MAX_MESSAGE_BYTES = 64 * MIB
"""Default limit of one message: a context of 1 Mi tokens is 4 MiB."""

TOKEN_ID_BYTES = 4


def _encode_array(value: object) -> bytes:
    if not isinstance(value, array):
        raise NotImplementedError(f"no wire form for {type(value).__name__}")
    ids = cast("TokenIds", value)
    if ids.typecode != "i":
        raise NotImplementedError(f"token ids must be array('i'), not array({ids.typecode!r})")
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids.tobytes()


def _decode_array(kind: type, value: object) -> TokenIds:
    if kind is not array or not isinstance(value, bytes) or len(value) % TOKEN_ID_BYTES:
        raise ValueError("token ids must be int32 bytes")
    ids = array("i")
    ids.frombytes(value)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def _make_decoders() -> dict[str, msgspec.msgpack.Decoder[Any]]:
    kinds = events.ALL + plan.ALL + node_messages.ALL
    decoders = {kind.__name__: msgspec.msgpack.Decoder(kind, dec_hook=_decode_array) for kind in kinds}
    if len(decoders) != len(kinds):
        raise TypeError("two kinds of message share a name")
    return decoders


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_envelope = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])
_decoders = _make_decoders()


def encode(message: object) -> bytes:
    """Make the bytes of one message.

    Args:
        message: Instance of a class in one of the `ALL` of core.

    Raises:
        TypeError: The class is in no table: our own bug.
    """
    kind = type(message).__name__
    if kind not in _decoders:
        raise TypeError(f"{kind} is not a wire message")
    return _encoder.encode((WIRE_VERSION, kind, message))


def decode(data: bytes | memoryview, max_bytes: int = MAX_MESSAGE_BYTES) -> object:
    """Make the message that `encode` was given.

    Memory used is proportional to `len(data)`, whatever lengths the bytes claim.

    Args:
        data: One message, complete.
        max_bytes: Refuse longer input before looking at it.

    Raises:
        WireVersionMismatch: Another version, or a kind that is not in the table.
        DataError: Too long, or not a well-formed message.
    """
    if len(data) > max_bytes:
        raise DataError(f"message of {len(data)} bytes, the limit is {max_bytes}", code="wire.too_large")
    try:
        version, kind, body = _envelope.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"not a message: {error}", code="wire.malformed") from error
    decoder = _decoders.get(kind)
    if version != WIRE_VERSION or decoder is None:
        raise WireVersionMismatch(
            f"message {kind[:64]!r} of version {version}; this side speaks version {WIRE_VERSION}",
            code="wire.version",
        )
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise DataError(f"malformed {kind}: {error}", code="wire.malformed") from error
