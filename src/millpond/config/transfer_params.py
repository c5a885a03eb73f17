"""Parameters of the KV handoff."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferParams:
    """Buffers and deadlines of the handoff from prefill to decode."""

    shm_dir: str = "/dev/shm"  # noqa: S108 - names are unguessable, files exclusive and unlinked at once
    """Folder in shared memory for the rings between processes of one host."""
    ring_bytes: int = 4 * 1024 * 1024
    """Shared memory per connection, 64 KiB ... 1 GiB; more is taken where four rows of a block need it. Small
    enough to stay in the caches."""
    max_open_requests: int = 1024
    """Requests that senders may have announced to one receiver before it expects them."""
    lease_s: float = 120.0
    """How long one side waits for the other to take part in a request at all."""
    gap_s: float = 300.0
    """Longest pause between two pieces of one request; covers the computation of a chunk."""
    stall_s: float = 15.0
    """Longest time that a connection with something to move stands still before it is given up."""
