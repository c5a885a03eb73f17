"""`Connection`: a client's end of a TCP connection to a storage node or metadata shard.

Many requests are in flight at once; a receiver thread matches answers to requests by their id and lands
payloads where the request wants them. A request that was cancelled never has its buffer written again.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

from millpond.core.errors import (
    BadFrame,
    DeadlineExceeded,
    ExtentAbsent,
    InvariantBroken,
    MillpondError,
    NodeRefused,
    QuotaExceeded,
    StaleEpoch,
    TransferFailed,
    WireVersionMismatch,
)
from millpond.core.units import SECOND_NS
from millpond.store.net.framing import DEFAULT_LIMITS, VERSION, Bytes, FrameLimits, FrameSocket, Head, greet
from millpond.store.net.messages import CancelRead, Failed, Hello, Message

CLOSE_DEADLINE_S = 5

Landing: TypeAlias = Callable[[Message, int], Sequence[memoryview]]
"""(answer, payload bytes) -> the places the payload is received into, in order, of exactly that many bytes.
Called in the receiver thread; may raise a `DataError`, which becomes the request's outcome."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the peer said."""

    message: Message
    payload: memoryview
    """Empty if a landing took it."""


class Call:
    """A request in flight. Its outcome is set once: an answer, an error or a cancellation."""

    def __init__(self, request: int, landing: Landing | None, on_done: Callable[[Call], None] | None) -> None:
        self.request = request
        self.landing = landing
        self._on_done = on_done
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._outcome: Answer | MillpondError | None = None

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._done.is_set()

    def result(self) -> Answer:
        """The answer of a call that is done.

        Raises:
            MillpondError: What went wrong instead; an answer `Failed` becomes the error it names.
        """
        if isinstance(self._outcome, Answer):
            return self._outcome
        if self._outcome is None:
            raise InvariantBroken("the call is not done")
        raise self._outcome

    def wait(self, deadline_ns: int) -> bool:
        """Wait until the call is done or the deadline passes; whether it is done."""
        return self._done.wait(max(0, deadline_ns - time.monotonic_ns()) / SECOND_NS)

    def finish(self, outcome: Answer | MillpondError) -> bool:
        """Set the outcome unless there is one. After it returns, the landing's places are not written."""
        with self._lock:
            if self._outcome is not None:
                return False
            self._outcome = outcome
        self._done.set()
        if self._on_done is not None:
            self._on_done(self)
        return True

    def land(self, frames: FrameSocket, view: memoryview) -> int | None:
        """Receive what is there into `view`; None if the call has its outcome and `view` is not ours."""
        with self._lock:
            return None if self._outcome is not None else frames.receive_some(view)


class Connection:
    """A greeted connection with its receiver thread. Thread-safe.

    Args:
        address: `host:port`.
        name: Our name, for the peer's log.
        token: Cluster token.
        deadline_ns: When the peer must have answered our greeting.
        limits: What the peer may send.

    Raises:
        TransferFailed, DeadlineExceeded: Nobody answers there.
        WireVersionMismatch, BadFrame, Unauthorized: Not a peer of ours.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        token: str,
        deadline_ns: int,
        limits: FrameLimits = DEFAULT_LIMITS,
    ) -> None:
        self.address = address
        self._frames = FrameSocket(connect(address, deadline_ns), limits)
        try:
            self.peer = greet(self._frames, Hello(VERSION, name, token), deadline_ns=deadline_ns)
        except BaseException:
            self._frames.close()
            raise
        self._ids = itertools.count(1)
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._calls: dict[int, Call] = {}
        self._broken: MillpondError | None = None
        self._receiver = threading.Thread(target=self._receive_all, name=f"receive {address}")
        self._receiver.start()

    @property
    def broken(self) -> bool:
        """Whether the connection ended; every call then fails at once."""
        return self._broken is not None

    @property
    def num_in_flight(self) -> int:
        """Calls without an outcome."""
        return len(self._calls)

    def start(
        self,
        message: Message,
        payload: Sequence[Bytes] = (),
        *,
        deadline_ns: int,
        landing: Landing | None = None,
        on_done: Callable[[Call], None] | None = None,
    ) -> Call:
        """Send a request and return without waiting for its answer.

        Args:
            message: The request.
            payload: Its payload; not touched after the return.
            deadline_ns: When it must have been sent.
            landing: Where the answer's payload goes; by default new memory.
            on_done: Told when the outcome is set, by the receiver thread or by who cancels; must be quick.

        Raises:
            TransferFailed, DeadlineExceeded: It could not be sent.
        """
        call = Call(next(self._ids), landing, on_done)
        with self._state:
            if self._broken is not None:
                raise TransferFailed(f"{self.address}: {self._broken.message}", code="store.peer_lost")
            self._calls[call.request] = call
        self._send(call, message, payload, deadline_ns)
        return call

    def call(
        self,
        message: Message,
        payload: Sequence[Bytes] = (),
        *,
        deadline_ns: int,
        landing: Landing | None = None,
    ) -> Answer:
        """Send a request and wait for its answer.

        Raises:
            DeadlineExceeded: No answer in time; the request is cancelled.
            MillpondError: What the peer answered, or that the connection broke.
        """
        call = self.start(message, payload, deadline_ns=deadline_ns, landing=landing)
        if not call.wait(deadline_ns):
            self.cancel(call)
        return call.result()

    def cancel(self, call: Call) -> None:
        """Give up a call: its outcome is `DeadlineExceeded` unless it has one, its buffer is free."""
        if not call.finish(DeadlineExceeded(f"no answer from {self.address}", code="store.deadline")):
            return
        with contextlib.suppress(TransferFailed, DeadlineExceeded):  # the peer is told as a courtesy
            if self._sending.acquire(blocking=False):
                try:
                    self._frames.send(0, CancelRead(call.request), deadline_ns=time.monotonic_ns())
                except DeadlineExceeded:
                    self._frames.shutdown()  # it may be half sent
                    raise
                finally:
                    self._sending.release()

    def close(self) -> None:
        """End the connection; calls in flight fail."""
        self._frames.shutdown()
        self._receiver.join(CLOSE_DEADLINE_S)
        if self._receiver.is_alive():
            raise InvariantBroken("the receiver does not end")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, call: Call, message: Message, payload: Sequence[Bytes], deadline_ns: int) -> None:
        """Send `call`, or raise; but if the receiver took the call first, it gets its outcome from there."""
        wait_s = max(0, deadline_ns - time.monotonic_ns()) / SECOND_NS
        if not self._sending.acquire(timeout=wait_s):
            if self._forget(call):
                raise DeadlineExceeded(f"{self.address} does not read", code="store.deadline")
            return
        try:
            self._frames.send(call.request, message, payload, deadline_ns=deadline_ns)
        except MillpondError:
            ours = self._forget(call)
            self._frames.shutdown()  # half a frame may be out
            if ours:
                raise
        finally:
            self._sending.release()

    def _forget(self, call: Call) -> bool:
        with self._state:
            return self._calls.pop(call.request, None) is not None

    def _receive_all(self) -> None:
        error: MillpondError = TransferFailed("closed", code="store.peer_lost")
        try:
            while True:
                self._receive_one(self._frames.receive(None))
        except MillpondError as ended:
            error = ended
        finally:
            with self._state:
                self._broken = error  # before the calls are taken, so that no new one is missed
                calls = list(self._calls.values())
                self._calls.clear()
            self._frames.shutdown()
            with self._sending:  # a sender in the kernel still uses the socket's number
                self._frames.close()
            for call in calls:
                call.finish(TransferFailed(f"{self.address}: {error.message}", code="store.peer_lost"))

    def _receive_one(self, head: Head) -> None:
        with self._state:
            call = self._calls.get(head.request)
        deadline_ns = self._frames.frame_deadline_ns()
        if call is None:
            raise BadFrame(
                f"an answer to request {head.request}, which was not asked", code="store.bad_frame"
            )
        outcome = self._receive_payload(call, head, deadline_ns)
        with self._state:
            self._calls.pop(head.request, None)
        call.finish(outcome)

    def _receive_payload(self, call: Call, head: Head, deadline_ns: int) -> Answer | MillpondError:
        payload = memoryview(b"")
        places: Sequence[memoryview] = ()
        outcome: MillpondError | None = None
        if isinstance(head.message, Failed):
            outcome = error_of(head.message)
        elif call.landing is None:
            payload = memoryview(bytearray(head.payload_bytes))
            places = (payload,)
        elif not call.done:
            try:
                places = call.landing(head.message, head.payload_bytes)
            except MillpondError as refused:
                outcome = refused
            else:
                if sum(view.nbytes for view in places) != head.payload_bytes:
                    raise InvariantBroken("a landing of another size than the payload")
        left = head.payload_bytes
        for view in places:
            landed = self._land(call, view, deadline_ns)
            left -= landed
            if landed < view.nbytes:
                break
        self._frames.skip(left, deadline_ns)
        return outcome or Answer(head.message, payload)

    def _land(self, call: Call, view: memoryview, deadline_ns: int) -> int:
        """Fill `view` as long as the call wants it; bytes landed."""
        landed = 0
        while landed < view.nbytes:
            received = call.land(self._frames, view[landed:])
            if received is None:
                break
            landed += received
            if not received:
                self._frames.wait_readable(deadline_ns)
        return landed


def error_of(failed: Failed) -> MillpondError:
    """The error that an answer `Failed` stands for."""
    kinds: dict[str, type[MillpondError]] = {
        "absent": ExtentAbsent,
        "quota": QuotaExceeded,
        "stale": StaleEpoch,
        "redirect": StaleEpoch,
        "deadline": DeadlineExceeded,
        "version": WireVersionMismatch,
        "bad_request": BadFrame,
    }
    return kinds.get(failed.code, NodeRefused)(failed.detail or failed.code, code=f"store.{failed.code}")


def connect(address: str, deadline_ns: int) -> socket.socket:
    """A TCP connection to `host:port`, not greeted.

    Raises:
        TransferFailed, DeadlineExceeded: Nobody answers there.
    """
    host, _, port = address.rpartition(":")
    timeout_s = max(0.001, (deadline_ns - time.monotonic_ns()) / SECOND_NS)
    try:
        return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{address} does not answer", code="store.deadline") from error
    except (OSError, ValueError) as error:
        raise TransferFailed(f"cannot reach {address}: {error}", code="store.peer_lost") from error
