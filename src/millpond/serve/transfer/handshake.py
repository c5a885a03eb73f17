"""Both ends of a data connection prove that they hold the cluster's token, and agree on layout and ring.

Each proof is an HMAC over both nonces, so none can be replayed, and over everything that the sender says.
The proofs admit a connection; they do not encrypt or sign what follows.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from pathlib import Path

from millpond.core.errors import DataError, TransferFailed, WireVersionMismatch
from millpond.serve.transfer.frames import PROTOCOL_VERSION, Challenge, Frame, Hello, Refuse, Welcome, encode
from millpond.serve.transfer.ring import Ring
from millpond.serve.transfer.stream import FrameStream

HANDSHAKE_S = 5.0
NONCE_BYTES = 32


def greet_receiver(stream: FrameStream, token: bytes, fingerprint: bytes, ring: Ring | None) -> bool:
    """Introduce this sender.

    Returns:
        Whether the receiver mapped the ring.

    Raises:
        TransferFailed: It refused, or is no member.
    """
    challenge = stream.wait(HANDSHAKE_S)
    if not isinstance(challenge, Challenge):
        raise _unexpected(challenge)
    if challenge.version != PROTOCOL_VERSION:
        raise WireVersionMismatch(f"the receiver speaks version {challenge.version}", code="handoff.version")
    nonce = secrets.token_bytes(NONCE_BYTES)
    hello = Hello(
        nonce=nonce,
        proof=b"",
        fingerprint=fingerprint,
        num_slots=ring.num_slots if ring is not None else 0,
        slot_bytes=ring.slot_bytes if ring is not None else 0,
        ring_path=str(ring.path) if ring is not None else "",
    )
    proof = _sender_proof(token, challenge.nonce, hello)
    stream.send(encode(Hello(nonce, proof, fingerprint, hello.num_slots, hello.slot_bytes, hello.ring_path)))
    answer = stream.wait(HANDSHAKE_S)
    if isinstance(answer, Refuse):
        raise TransferFailed(f"refused: {answer.why}", code="handoff.refused")
    if not isinstance(answer, Welcome):
        raise _unexpected(answer)
    expected = _receiver_proof(token, challenge.nonce, nonce, uses_ring=answer.uses_ring)
    if not hmac.compare_digest(answer.proof, expected):
        raise TransferFailed("the receiver does not hold the cluster's token", code="handoff.token")
    return answer.uses_ring


def greet_sender(stream: FrameStream, token: bytes, fingerprint: bytes, min_slot_bytes: int) -> Ring | None:
    """Check and welcome a sender.

    Returns:
        Its ring, if it has one that can be mapped here.

    Raises:
        TransferFailed: It is no member, or has another layout.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    stream.send(encode(Challenge(PROTOCOL_VERSION, nonce)))
    hello = stream.wait(HANDSHAKE_S)
    if not isinstance(hello, Hello):
        raise _unexpected(hello)
    if not hmac.compare_digest(hello.proof, _sender_proof(token, nonce, hello)):
        raise TransferFailed("the sender does not hold the cluster's token", code="handoff.token")
    if hello.fingerprint != fingerprint:
        why = "the layouts of the two ranks differ: another model or KV precision"
        stream.send(encode(Refuse(why)))
        raise TransferFailed(why, code="handoff.layout")
    ring = _attach(hello) if hello.slot_bytes >= min_slot_bytes else None
    proof = _receiver_proof(token, nonce, hello.nonce, uses_ring=ring is not None)
    stream.send(encode(Welcome(proof, ring is not None)))
    return ring


def _attach(hello: Hello) -> Ring | None:
    try:
        return Ring.attach(Path(hello.ring_path), hello.num_slots, hello.slot_bytes)
    except (OSError, DataError):
        return None  # the sender learns it from Welcome and sends inline


def _sender_proof(token: bytes, receiver_nonce: bytes, hello: Hello) -> bytes:
    text = struct.pack("<II", hello.num_slots, hello.slot_bytes) + hello.ring_path.encode()
    return hmac.digest(token, b"sender" + receiver_nonce + hello.nonce + hello.fingerprint + text, "sha256")


def _receiver_proof(token: bytes, receiver_nonce: bytes, sender_nonce: bytes, *, uses_ring: bool) -> bytes:
    return hmac.digest(token, b"receiver" + sender_nonce + receiver_nonce + bytes([uses_ring]), "sha256")


def _unexpected(frame: Frame) -> DataError:
    return DataError(f"unexpected {type(frame).__name__} in the handshake", code="handoff.unexpected")
