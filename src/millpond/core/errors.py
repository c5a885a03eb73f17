"""The error tree.

    MillpondError            code (stable), retryable, detail
      ClientError            the caller's request is at fault: HTTP 4xx
        InvalidRequest, ContextTooLong, UnknownModel, Unauthorized, Forbidden, BodyTooLarge,
        RateLimited(retry_after_s)
      OverloadError          the service has no room: HTTP 503, retry_after_s
      TransientError         worth another try elsewhere: WorkerLost, TransferFailed, DeadlineExceeded
      DataError              bytes are not what they should be: ChecksumMismatch, WireVersionMismatch,
                             ModelFormatError, BadFrame
      PoolError              the pool's answer to one extent: ExtentAbsent, WriteInProgress, ExtentLost,
                             QuotaExceeded, StaleEpoch, NodeRefused, ArenaFull; corrupt bytes are
                             ChecksumMismatch, late ones DeadlineExceeded
      ConfigError            at start only; exit status 2
    InvariantBroken          our own bug; not a MillpondError, so that no handler swallows it

An ordinary "no" is not an error but an outcome (`Fit`, `Admission`); see style 5.6.
"""

from __future__ import annotations


class MillpondError(Exception):
    """Base of every error that a caller can act on.

    Attributes:
        code: Stable machine-readable name, for example `request.context_too_long`.
        retryable: Whether the same call may succeed later or elsewhere.
        param: The offending field, if there is one.
    """

    retryable = False

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class ClientError(MillpondError):
    """The request is at fault."""

    status = 400


class InvalidRequest(ClientError):
    """A field has a value that cannot be honoured."""


class ContextTooLong(ClientError):
    """Prompt and requested output do not fit the model's context."""


class UnknownModel(ClientError):
    """The named model is not served here."""

    status = 404


class Unauthorized(ClientError):
    """No key, or a key that is not known."""

    status = 401


class Forbidden(ClientError):
    """The key is known but may not do this."""

    status = 403


class BodyTooLarge(ClientError):
    """The request body exceeds the configured limit."""

    status = 413


class RateLimited(ClientError):
    """The tenant's own limit is reached."""

    status = 429
    retryable = True

    def __init__(self, message: str, *, code: str, retry_after_s: int, param: str | None = None) -> None:
        super().__init__(message, code=code, param=param)
        self.retry_after_s = retry_after_s


class OverloadError(MillpondError):
    """The service as a whole has no room or is shutting down."""

    status = 503
    retryable = True

    def __init__(self, message: str, *, code: str, retry_after_s: int) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class TransientError(MillpondError):
    """Failed here, may succeed elsewhere."""

    retryable = True


class WorkerLost(TransientError):
    """The process that held the request is gone."""


class TransferFailed(TransientError):
    """KV did not arrive."""


class DeadlineExceeded(TransientError):
    """Another process did not answer in time."""


class DataError(MillpondError):
    """Bytes are not what they claim to be."""


class ChecksumMismatch(DataError):
    """Content does not match its checksum."""


class WireVersionMismatch(DataError):
    """A peer speaks another version or an unknown message kind."""


class BadFrame(DataError):
    """What a peer sent is no frame, or more than it may be."""


class ModelFormatError(DataError):
    """A model file is missing, truncated or not what its config says."""


class PoolError(MillpondError):
    """The pool cannot do what was asked with this extent or node."""


class ExtentAbsent(PoolError):
    """No such extent: an ordinary miss where a caller insisted on a hit."""


class WriteInProgress(PoolError):
    """Another writer holds the put lease."""

    retryable = True


class ArenaFull(PoolError):
    """The host's memory has no room now: nothing is held for who asked."""

    retryable = True


class ExtentLost(PoolError):
    """Fewer than k shards can be read."""


class QuotaExceeded(PoolError):
    """The tenant's bytes or bytes per second are used up."""


class StaleEpoch(PoolError):
    """The location or the pool map is older than what the peer knows."""

    retryable = True


class NodeRefused(PoolError):
    """A storage node is full, read-only or failing."""

    retryable = True


class ConfigError(MillpondError):
    """The configuration cannot be used. The message carries the path inside the file."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, code="config.invalid", param=param)


class InvariantBroken(Exception):
    """A law of the program does not hold. The process reports it and dies."""
