"""Frames of the handoff connection: fixed little-endian structs.

    frame = u32 body bytes, u8 kind, 3 zero bytes, body

    receiver               sender
    Challenge  ------->
               <-------    Hello        membership, layout, ring
    Welcome    ------->                 (or Refuse)
               <-------    Open         one request
    Ready      ------->                 blocks are there (or Reject)
               <-------    Piece ...    one row of one block each, inline or by ring slot
    Free       ------->                 ring slots that were read
               <-------    Finish       every piece was sent (or Abort)
    Done       ------->                 every piece is in place (or Reject)

A body is the struct of the frame's fields in order; a last field of text or payload takes the rest.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from millpond.core.errors import DataError

PROTOCOL_VERSION = 2
PREFIX = struct.Struct("<IB3x")
INLINE = 0xFFFF_FFFF
"""In place of a ring slot: the payload follows the piece's header."""
MAX_CONTROL_BYTES = 4096
"""Longest body of any frame without its payload."""
MAX_WHY_CHARS = 200


@dataclass(frozen=True, slots=True)
class Challenge:
    """First word of the receiver."""

    version: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """The sender proves membership and says what it is going to send."""

    nonce: bytes
    proof: bytes
    fingerprint: bytes
    """Of the sender's `KvLayout`."""
    num_slots: int
    """Slots of the ring file; 0 without one."""
    slot_bytes: int
    ring_path: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The receiver proves membership; the connection is up."""

    proof: bytes
    uses_ring: bool
    """False if it could not map the file: pieces must come inline."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The receiver will not work with this member. Followed by the end of the connection."""

    why: str


@dataclass(frozen=True, slots=True)
class Open:
    """A request is about to be sent. `handle` names it on this connection from now on."""

    handle: int
    """Larger than every earlier one of the connection."""
    attempt: int
    num_tokens: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The request is expected; pieces may come."""

    handle: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One row of one block, or the state slot (`row` = number of rows)."""

    handle: int
    block_index: int
    """Position in the sequence's block table; 0 for the state."""
    row: int
    num_bytes: int
    slot: int
    """Ring slot, or `INLINE`."""
    checksum: int
    """`protocol.checksum` of payload and identity."""
    payload: memoryview = field(default=memoryview(b""), repr=False)
    """The bytes if inline, else empty. A received one is valid until the next read."""


@dataclass(frozen=True, slots=True)
class Free:
    """The receiver is done with the next `num_slots` ring slots, in the order of sending."""

    num_slots: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Every piece was sent, and the first token is known."""

    handle: int
    num_pieces: int
    first_token_id: int
    is_approximate: bool = False
    """As `HandoffArrived.is_approximate`."""


@dataclass(frozen=True, slots=True)
class Done:
    """Every byte of the request is in place and verified."""

    handle: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The sender gives the request up."""

    handle: int
    why: str


@dataclass(frozen=True, slots=True)
class Reject:
    """The receiver gives the request up, or never wanted it."""

    handle: int
    why: str


Frame: TypeAlias = (
    Challenge | Hello | Welcome | Refuse | Open | Ready | Piece | Free | Finish | Done | Abort | Reject
)


class _Shape:
    """How the fields of one frame lie in its body."""

    def __init__(self, kind: int, frame: type[Frame], head: str) -> None:
        names = [item.name for item in dataclasses.fields(frame)]
        self.kind = kind
        self.frame: type[Any] = frame
        self.head = struct.Struct("<" + head)
        num_in_head = len(self.head.unpack(bytes(self.head.size)))
        self.head_names = names[:num_in_head]
        self.tail_name = names[num_in_head] if len(names) > num_in_head else None
        self.has_payload = frame is Piece

    def pack(self, frame: Frame) -> bytes:
        head = self.head.pack(*[getattr(frame, name) for name in self.head_names])
        if self.tail_name is None:
            return head
        tail = getattr(frame, self.tail_name)
        return head + (bytes(tail) if self.has_payload else tail.encode())

    def parse(self, body: memoryview) -> Frame:
        if self.tail_name is None:
            return self.frame(*self.head.unpack(body))
        tail = body[self.head.size :]
        return self.frame(
            *self.head.unpack(body[: self.head.size]), tail if self.has_payload else str(tail, "utf-8")
        )


_SHAPES = (
    _Shape(1, Challenge, "H32s"),
    _Shape(2, Hello, "32s32s32sII"),
    _Shape(3, Welcome, "32s?"),
    _Shape(4, Refuse, ""),
    _Shape(5, Open, "III"),
    _Shape(6, Ready, "I"),
    _Shape(7, Piece, "IIIIIQ"),
    _Shape(8, Free, "I"),
    _Shape(9, Finish, "IIi?"),
    _Shape(10, Done, "I"),
    _Shape(11, Abort, "I"),
    _Shape(12, Reject, "I"),
)
_BY_KIND = {shape.kind: shape for shape in _SHAPES}
_BY_FRAME = {shape.frame: shape for shape in _SHAPES}
PIECE_HEADER_BYTES = _BY_FRAME[Piece].head.size
FRAMES = tuple(_BY_FRAME)


def encode(frame: Frame) -> bytes:
    """Make the bytes of one frame, prefix included."""
    shape = _BY_FRAME[type(frame)]
    body = shape.pack(frame)
    return PREFIX.pack(len(body), shape.kind) + body


def encode_piece_header(piece: Piece, num_inline_bytes: int) -> bytes:
    """Make the bytes of a piece up to its payload, which the caller sends itself."""
    shape = _BY_FRAME[Piece]
    head = shape.head.pack(
        piece.handle, piece.block_index, piece.row, piece.num_bytes, piece.slot, piece.checksum
    )
    return PREFIX.pack(len(head) + num_inline_bytes, shape.kind) + head


def decode(kind: int, body: memoryview) -> Frame:
    """Make the frame of a complete body.

    Raises:
        DataError: Unknown kind, or a body of another shape.
    """
    shape = _BY_KIND.get(kind)
    if shape is None:
        raise DataError(f"unknown frame kind {kind}", code="handoff.malformed")
    try:
        frame = shape.parse(body)
    except (struct.error, UnicodeDecodeError) as error:
        raise DataError(f"malformed {shape.frame.__name__}: {error}", code="handoff.malformed") from error
    if isinstance(frame, Piece) and len(frame.payload) != (frame.num_bytes if frame.slot == INLINE else 0):
        raise DataError("the payload is not as long as its header says", code="handoff.malformed")
    return frame
