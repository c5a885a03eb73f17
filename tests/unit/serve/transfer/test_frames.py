"""Frames come back as they were sent, and nothing else is a frame."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.errors import DataError
from millpond.serve.transfer import frames
from millpond.serve.transfer.frames import FRAMES, INLINE, PREFIX, Frame, Hello, Piece


def values_of(frame: type[Frame]) -> st.SearchStrategy[Frame]:
    """Frames of one kind with any content that fits their struct."""
    if frame is Piece:
        return st.builds(
            lambda handle, payload: Piece(handle, 1, 2, len(payload), INLINE, 2**64 - 1, memoryview(payload)),
            st.integers(0, 2**32 - 1),
            st.binary(max_size=50),
        )
    fields: dict[str, st.SearchStrategy[object]] = {}
    for name, kind in typing.get_type_hints(frame).items():
        if kind is bytes:
            fields[name] = st.binary(min_size=32, max_size=32)
        elif kind is bool:
            fields[name] = st.booleans()
        elif kind is int:
            fields[name] = st.integers(0, 2**16 - 1 if name == "version" else 2**31 - 1)
        else:
            fields[name] = st.text(max_size=50)
    return st.builds(frame, **fields)


@given(data=st.data())
def test_every_frame_survives_the_wire(data: st.DataObject) -> None:
    frame = data.draw(st.sampled_from(FRAMES).flatmap(values_of))
    encoded = memoryview(frames.encode(frame))
    num_bytes, kind = PREFIX.unpack_from(encoded)
    assert num_bytes == len(encoded) - PREFIX.size
    assert frames.decode(kind, encoded[PREFIX.size :]) == frame


@given(kind=st.integers(0, 255), body=st.binary(max_size=200))
def test_any_body_is_a_frame_or_a_typed_error(kind: int, body: bytes) -> None:
    try:
        frame = frames.decode(kind, memoryview(body))
    except DataError:
        return
    assert frames.encode(frame) == PREFIX.pack(len(body), kind) + body or isinstance(frame, frames.Welcome)


def test_a_piece_header_is_the_piece_without_its_payload() -> None:
    piece = Piece(1, 2, 3, 5, INLINE, 4, memoryview(b"bytes"))
    assert frames.encode_piece_header(piece, 5) + b"bytes" == frames.encode(piece)


@pytest.mark.parametrize("num_bytes", [0, 4, 6])
def test_a_payload_of_another_length_than_announced_is_refused(num_bytes: int) -> None:
    encoded = memoryview(frames.encode(Piece(1, 2, 3, 5, INLINE, 4, memoryview(b"x" * num_bytes))))
    with pytest.raises(DataError, match="payload"):
        frames.decode(7, encoded[PREFIX.size :])


def test_nothing_in_a_hello_is_cut_off() -> None:
    hello = Hello(b"n" * 32, b"p" * 32, b"f" * 32, 7, 4096, "folder/ring")
    assert [getattr(hello, item.name) for item in dataclasses.fields(hello)][-1] == "folder/ring"
    assert frames.decode(2, memoryview(frames.encode(hello))[PREFIX.size :]) == hello
