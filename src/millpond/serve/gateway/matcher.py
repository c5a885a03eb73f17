"""`PrefixMatcher`: how much of a prompt is kept somewhere, asked once per prompt before it is scheduled.

    disks     the longest prefix that the metadata know
    memories  behind it, block after block as long as some host has it

The answer is a hint and has a deadline. Without one in time the prompt is computed, and that is counted.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import structlog
from starlette.concurrency import run_in_threadpool

from millpond.core.errors import DataError, DeadlineExceeded, MillpondError
from millpond.core.hashing import BLOCK_HASH_BYTES
from millpond.core.request import CachedPrefix, KvIdentity
from millpond.core.units import BLOCK_TOKENS, MILLISECOND_NS, SECOND_NS
from millpond.serve.gateway.chain_cache import ChainCache
from millpond.store.metadata.client import MetadataClient
from millpond.store.metadata.directory import BLOCKS
from millpond.store.net.messages import Match, Matched
from millpond.store.remote_directory import find_places

NUM_THREADS = 4
"""Questions at once; others wait, within their deadline."""
INLINE_BLOCKS = 64
"""Longer chains are hashed in a thread, so that running streams do not stutter."""

ASK_RATIO = 0.8
"""Share of the deadline in which the metadata have to answer; the rest is for threads to be scheduled."""

log = structlog.get_logger(__name__)


class MatchOutcome(StrEnum):
    """What became of a question."""

    HIT = "hit"
    MISS = "miss"
    PARTIAL = "partial"
    """What the disks have, or nothing; which host has what in memory was not heard in time."""
    LATE = "late"
    """No answer in time: everything is computed."""
    FAILED = "failed"
    """The metadata cannot be reached or answered something else: everything is computed."""


@dataclass(frozen=True, slots=True)
class MatchResult:
    """What is known of a prompt."""

    cached: CachedPrefix | None
    """None: nothing of it, as far as is known."""
    outcome: MatchOutcome
    num_seconds: float
    """From the question to the answer, hashing included."""

    @property
    def is_whole(self) -> bool:
        """Whether all were heard that could know of the prompt."""
        return self.outcome in {MatchOutcome.HIT, MatchOutcome.MISS}


class PrefixMatcher:
    """See module.

    Args:
        metadata: Of the pool; the matcher closes it.
        window: Blocks of a full extent.
        deadline_ms: Time that the questions about one prompt may take together.
    """

    def __init__(self, metadata: MetadataClient, *, window: int, deadline_ms: int) -> None:
        self._metadata = metadata
        self._window = window
        self._deadline_ns = deadline_ms * MILLISECOND_NS
        self._chains = ChainCache()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="match")

    async def match(self, kv: KvIdentity, prompt_ids: array[int]) -> MatchResult:
        """Find out how much of a prompt is kept: whole blocks, and at least one token is left to compute."""
        began_ns = time.monotonic_ns()
        num_blocks = (len(prompt_ids) - 1) // BLOCK_TOKENS
        if num_blocks <= 0:
            return MatchResult(None, MatchOutcome.MISS, 0.0)
        if num_blocks <= INLINE_BLOCKS:
            digests = self._chains.digests(kv.root, prompt_ids, num_blocks)
        else:
            digests = await run_in_threadpool(self._chains.digests, kv.root, prompt_ids, num_blocks)
        hashes = b"".join(digest[:BLOCK_HASH_BYTES] for digest in digests)
        cached, outcome = await self._ask_in_time(kv, hashes)
        return MatchResult(cached, outcome, (time.monotonic_ns() - began_ns) / SECOND_NS)

    def close(self) -> None:
        """Answer no more questions; those that wait end by their deadline."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._metadata.close()

    async def _ask_in_time(self, kv: KvIdentity, hashes: bytes) -> tuple[CachedPrefix | None, MatchOutcome]:
        deadline_ns = time.monotonic_ns() + int(self._deadline_ns * ASK_RATIO)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._deadline_ns / SECOND_NS):
                return await loop.run_in_executor(self._threads, self._ask, kv, hashes, deadline_ns)
        except (TimeoutError, DeadlineExceeded):
            return None, MatchOutcome.LATE
        except MillpondError as error:
            log.info("prefix not matched", code=error.code, error=error.message)
            return None, MatchOutcome.FAILED

    def _ask(
        self, kv: KvIdentity, hashes: bytes, deadline_ns: int
    ) -> tuple[CachedPrefix | None, MatchOutcome]:
        question = Match(kv.tenant, kv.root[:BLOCK_HASH_BYTES], 0, self._window)
        on_disk = self._metadata.call(question, hashes, prefix=hashes, deadline_ns=deadline_ns)
        if not isinstance(on_disk, Matched) or on_disk.num_blocks < 0:
            raise DataError(f"match is answered with {type(on_disk).__name__}", code="pool.answer")
        end = min(on_disk.num_blocks * BLOCK_HASH_BYTES, len(hashes))
        is_whole = True
        if end < len(hashes):
            try:
                end += self._num_in_memory(hashes[end:], deadline_ns) * BLOCK_HASH_BYTES
            except MillpondError as error:
                log.info("memories not matched", code=error.code, error=error.message)
                is_whole = False
        cached = None
        if end:
            num_tokens = end // BLOCK_HASH_BYTES * BLOCK_TOKENS
            cached = CachedPrefix(num_tokens, msgspec.msgpack.encode(on_disk))
        if not is_whole:
            return cached, MatchOutcome.PARTIAL
        return cached, MatchOutcome.MISS if cached is None else MatchOutcome.HIT

    def _num_in_memory(self, hashes: bytes, deadline_ns: int) -> int:
        """Leading blocks that are in some host's memory."""
        places = find_places(self._metadata, BLOCKS, hashes, deadline_ns=deadline_ns).places
        return next((index for index, place in enumerate(places) if place is None), len(places))
