"""`RedisMetadata`: the metadata of a pool in one Redis, for sites that run one anyway (extra `redis`).

    b:HASH    block -> extent (digest and number of blocks)        e:NAME    extent, as a msgpack map
    c:NAME    blocks that point to the extent                      l:NAME    put lease: its holder
    p:NAME    pins: holder -> end                                  x:TENANT  extents by their last match
    u:TENANT  KiB used, reserved and allowed                       r:TENANT  leases by their end

Every request is one script, so that it happens at once or not at all. Compared with our own shards a match
costs a round trip to Redis and many times the memory; write rates are not limited.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import msgspec

from millpond.core.errors import ConfigError, InvalidRequest, QuotaExceeded, TransferFailed
from millpond.core.hashing import BLOCK_HASH_BYTES, DIGEST_BYTES
from millpond.core.pool_map import PoolMap
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.store.clock import Clock, SystemClock
from millpond.store.metadata import redis_scripts
from millpond.store.metadata.checkpoint import decode_map, encode_map
from millpond.store.metadata.core import HOUR_S, MetadataParams
from millpond.store.metadata.quotas import stored_kib
from millpond.store.net.messages import (
    LEASE_HELD,
    Abort,
    Commit,
    Done,
    Evict,
    Forget,
    Location,
    Match,
    Matched,
    Message,
    Pin,
    Reserve,
    Reserved,
    Touch,
    Unpin,
)

_SCRIPTS = {
    Match: redis_scripts.MATCH,
    Reserve: redis_scripts.RESERVE,
    Commit: redis_scripts.COMMIT,
    Abort: redis_scripts.ABORT,
    Forget: redis_scripts.FORGET,
    Evict: redis_scripts.EVICT,
    Pin: redis_scripts.PIN,
    Unpin: redis_scripts.UNPIN,
}


class RedisMetadata:
    """`MetadataPort` over Redis. Thread-safe; any number of clients on any number of hosts.

    Args:
        url: For example `redis://host:6379/0`.
        params: Leases, pins, expiry, code.
        max_tenant_mib: Stored MiB of a tenant without its own quota; 0: no limit.
        prefix: Of all keys: one Redis can serve several pools.
        clock: For leases and expiry; clients of one pool must agree within a second.

    Raises:
        ConfigError: The Python package is missing.
    """

    def __init__(
        self,
        url: str,
        params: MetadataParams | None = None,
        *,
        max_tenant_mib: int = 0,
        prefix: str = "millpond:",
        clock: Clock | None = None,
    ) -> None:
        try:
            self._redis: Any = importlib.import_module("redis")
        except ImportError as error:
            raise ConfigError(
                "metadata in Redis needs the extra `redis`: pip install 'millpond[redis]'"
            ) from error
        self._params = params or MetadataParams()
        self._max_tenant_kib = max_tenant_mib * 1024
        self._prefix = prefix.encode()
        self._clock = clock or SystemClock()
        self._server = self._redis.Redis.from_url(url, socket_timeout=5.0, socket_connect_timeout=2.0)
        self._scripts = {
            kind: self._server.register_script(redis_scripts.PRELUDE + text)
            for kind, text in _SCRIPTS.items()
        }

    def call(self, request: Message, payload: bytes = b"", *, prefix: bytes, deadline_ns: int) -> Message:
        """See `MetadataPort`. The deadline is that of the connection, 5 s."""
        if len(payload) % BLOCK_HASH_BYTES or len(payload) > self._params.max_chain_blocks * BLOCK_HASH_BYTES:
            raise InvalidRequest(f"{len(payload)} bytes are no block hashes", code="bad_request")
        match request:
            case Match() | Touch():
                num_blocks, found = self._run(Match, payload)
                locations = tuple(msgspec.msgpack.decode(where, type=Location) for where in found[::2])
                is_match = isinstance(request, Match)
                return Matched(num_blocks, locations, tuple(found[1::2])) if is_match else Done(num_blocks)
            case Reserve():
                return self._reserve(request)
            case Commit():
                return self._commit(request, payload)
            case Abort():
                return Done(self._run(Abort, request.tenant, request.holder, *_names(request.extents)))
            case Forget():
                (name,) = _names([(request.location.digest, request.location.num_blocks)])
                return Done(self._run(Forget, name, msgspec.msgpack.encode(request.location)))
            case Evict():
                return Done(self._run(Evict, payload[max(0, request.first_block) * BLOCK_HASH_BYTES :]))
            case Pin():
                ttl_ns = min(max(request.ttl_ns, 0), int(self._params.max_pin_s * SECOND_NS))
                who = f"{request.tenant}/{request.holder}"
                return Done(self._run(Pin, who, ttl_ns // MILLISECOND_NS, *_names(request.extents)))
            case Unpin():
                who = f"{request.tenant}/{request.holder}"
                return Done(self._run(Unpin, who, *_names(request.extents)))
            case _:
                raise InvalidRequest(f"metadata does not answer {type(request).__name__}", code="bad_request")

    def pool_map(self, *, deadline_ns: int) -> PoolMap:
        """See `MetadataPort`."""
        packed = self._ask(lambda: self._server.get(self._prefix + b"map"))
        if packed is None:
            raise TransferFailed("Redis has no pool map yet", code="pool.no_map")
        return decode_map(packed)

    def update_map(self, pool_map: PoolMap) -> None:
        """Replace the pool map."""
        self._ask(lambda: self._server.set(self._prefix + b"map", encode_map(pool_map)))

    def set_quota(self, tenant: int, max_mib: int) -> None:
        """Limit what a tenant may store; 0: no limit."""
        key = self._prefix + b"u:%d" % tenant
        self._ask(lambda: self._server.hset(key, "max", max_mib * 1024))

    def charged_kib(self, tenant: int) -> tuple[int, int]:
        """KiB used and reserved by a tenant."""
        key = self._prefix + b"u:%d" % tenant
        used, reserved = self._ask(lambda: self._server.hmget(key, "used", "reserved"))
        return int(used or 0), int(reserved or 0)

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    def _reserve(self, request: Reserve) -> Reserved:
        if len(request.extents) != len(request.num_bytes) or min(request.num_bytes, default=0) < 0:
            raise InvalidRequest("reserve names not the bytes of each extent", code="bad_request")
        lease_ms = int(self._params.lease_s * 1000)
        parts: list[bytes | int] = []
        for name, num_bytes in zip(_names(request.extents), request.num_bytes, strict=True):
            parts += [name, name[:BLOCK_HASH_BYTES], stored_kib(num_bytes, self._params.k, self._params.m)]
        limit = self._max_tenant_kib
        given = self._run(Reserve, request.tenant, request.holder, lease_ms, limit, *parts)
        if given is None:
            raise QuotaExceeded(f"tenant {request.tenant} may not store so much", code="quota")
        return Reserved(tuple(ms * MILLISECOND_NS if ms >= 0 else LEASE_HELD for ms in given))

    def _commit(self, request: Commit, hashes: bytes) -> Done:
        where = request.location
        (name,) = _names([(where.digest, where.num_blocks)])
        if len(hashes) != where.num_blocks * BLOCK_HASH_BYTES or not where.digest.startswith(hashes[-16:]):
            raise InvalidRequest("commit without the hashes of its blocks", code="bad_request")
        kib = stored_kib(request.num_bytes, self._params.k, self._params.m)
        packed = msgspec.msgpack.encode(where)
        return Done(
            self._run(Commit, name, request.holder, packed, hashes, request.tenant, request.first_block, kib)
        )

    def _run(self, kind: type[Message], *arguments: bytes | str | int) -> Any:
        now_ms = self._clock.unix_s() * 1000
        ttl_ms = self._params.ttl_hours * HOUR_S * 1000
        script = self._scripts[kind]
        return self._ask(lambda: script(keys=[self._prefix], args=[now_ms, ttl_ms, *arguments]))

    def _ask(self, ask: Any) -> Any:
        try:
            return ask()
        except self._redis.exceptions.RedisError as error:
            raise TransferFailed(f"Redis: {error}", code="pool.redis") from error


def _names(extents: Sequence[tuple[bytes, int]]) -> list[bytes]:
    """33 bytes per extent.

    Raises:
        InvalidRequest: A name that is none.
    """
    if any(len(digest) != DIGEST_BYTES or not 1 <= count <= 0xFF for digest, count in extents):
        raise InvalidRequest("no extent has this name", code="bad_request")
    return [digest + bytes([count]) for digest, count in extents]
