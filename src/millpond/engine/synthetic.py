"""The synthetic engine: an `Engine` without a model, whose text proves that every KV byte was right.

    bytes of (block, row) = stream keyed by (hash of the block's prefix, row)
    next token            = digest over every KV byte of the sequence, modulo the vocabulary
    step time             = a timed wait from a cost table

A block that is not full yet is named by the hash of its predecessor and its tokens so far, so its bytes
change with every token. Before bytes of a growing block are replaced, the old ones are compared with what
they should be; if they differ, the new ones become wrong too, or a bad handoff would heal unseen.

Source: interfaces A.8.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from millpond.config.synthetic_params import SyntheticParams
from millpond.core.errors import ConfigError, InvariantBroken
from millpond.core.events import RankReport, SampledToken
from millpond.core.hashing import HashChain, block_hash, root_digest
from millpond.core.ids import BlockId, RequestId, SlotId
from millpond.core.kv_layout import KvLayout, uniform_layout
from millpond.core.plan import DecodeRow, PrefillChunk, RankPlan, SequenceStart
from millpond.core.ports import LayerObserver
from millpond.core.request import SamplingParams
from millpond.core.units import BLOCK_TOKENS, SECOND_NS, num_blocks_for
from millpond.engine.splitmix import GOLDEN_GAMMA, mix64
from millpond.engine.word_tokenizer import FIRST_WORD

_SCRATCH_WORDS = 1 << 13
"""Most words generated at once: 64 KiB. Larger temporaries are mapped afresh by the allocator each time,
which made a step of 32 sequences 2.5 times slower."""


@dataclass(slots=True)
class _Sequence:
    token_ids: array[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_table: list[BlockId]
    chain: HashChain = field(repr=False)
    """Over the tokens whose KV is in place."""


class SyntheticEngine:
    """One DP rank of a model that does not exist. Implements `core.ports.Engine`.

    The text depends on the tokens only; with temperature > 0 on seed and choice too. A wrong, late, stale
    or missing KV byte changes every token from then on.
    """

    def __init__(self, params: SyntheticParams) -> None:
        check_params(params)
        self._params = params
        self.layout: KvLayout = make_layout(params)
        self.num_blocks = params.num_blocks
        self.num_home_blocks = 0
        self.num_slots = int(params.max_num_seqs * 1.2) + 1
        self.vocab_size = params.vocab_size
        self.max_model_len = params.max_model_len
        self.min_computed_tokens = 1
        self.max_drafts = 0
        self.replay_tokens = 0
        self._root = make_root(self.layout)
        row_words = self.layout.rows[0].num_bytes // 8
        self._words = np.zeros((params.num_blocks + 1, params.num_layers, row_words), np.uint64)
        self._counters = np.arange(row_words, dtype=np.uint64) * GOLDEN_GAMMA
        self._keys: list[bytes | None] = [None] * (params.num_blocks + 1)
        """Key whose stream a block holds; None once others wrote to it."""
        self._digests: list[bytes | None] = [None] * (params.num_blocks + 1)
        """Digest of the bytes a block holds; None until computed."""
        self._sequences: dict[RequestId, _Sequence] = {}
        self._interrupted = threading.Event()

    def execute(self, plan: RankPlan, observer: LayerObserver | None = None) -> RankReport:
        """Carry out one step and take as long as the cost table says."""
        start_ns = time.monotonic_ns()
        for request_id in plan.forget:
            self.forget(request_id)
        for start in plan.start:
            self._start(start)
        cost_ns = self._cost_ns(plan)
        writes: list[tuple[BlockId, bytes]] = []
        for chunk in plan.chunks:
            writes += self._advance(self._sequence(chunk.request_id), chunk.begin, chunk.end)
        for row in plan.rows:
            sequence = self._sequence(row.request_id)
            sequence.block_table.extend(row.new_blocks)
            writes += self._advance(sequence, row.position, row.position + 1)
        num_rows = len(self.layout.rows)
        for layer in range(num_rows):
            if plan.chunks and observer is not None:
                observer.on_row_needed(layer)
            self._fill(writes, layer)
            if plan.chunks:
                self._wait_until(start_ns + cost_ns * (layer + 1) // num_rows)
                if observer is not None:
                    observer.on_row_ready(layer)
        self._wait_until(start_ns + cost_ns)
        ends: list[PrefillChunk | DecodeRow] = [
            *(chunk for chunk in plan.chunks if chunk.is_last),
            *plan.rows,
        ]
        return RankReport(
            plan.rank, tuple(self._sample(self._sequence(item.request_id), item) for item in ends)
        )

    def read_row(self, block: BlockId, row: int) -> memoryview:
        """Bytes of one row of one block: a read-only view of the memory itself."""
        return memoryview(self._words[block, row]).cast("B").toreadonly()

    def write_row(self, block: BlockId, row: int, data: memoryview) -> None:
        """Replace one row of one block."""
        self._check_usable(block)
        target = self._words[block, row]
        if len(data) != target.nbytes:
            raise InvariantBroken(f"row of {len(data)} bytes for block {block}, expected {target.nbytes}")
        self._keys[block] = self._digests[block] = None
        target.view(np.uint8)[:] = np.frombuffer(data, np.uint8)
        self._digests[block] = None  # a digest taken while the bytes changed is void

    def write_rows(
        self, blocks: Sequence[BlockId], row: int, source: memoryview, items: Sequence[int]
    ) -> None:
        """Replace one row of several blocks."""
        pieces = np.asarray(source)
        for block, item in zip(blocks, items, strict=True):
            self.write_row(block, row, memoryview(pieces[item]))

    def read_state(self, slot: SlotId) -> memoryview:
        """Empty: plain decoders have no state."""
        return memoryview(b"")

    def write_state(self, slot: SlotId, data: memoryview) -> None:
        """Accept the empty state."""
        if len(data):
            raise InvariantBroken(f"{len(data)} bytes of state for a model without state")

    def forget(self, request_id: RequestId) -> None:
        """Drop the record of a sequence; unknown ids are ignored."""
        self._sequences.pop(request_id, None)

    def interrupt(self) -> None:
        """End the running wait and skip all later ones, so that a process can stop at once."""
        self._interrupted.set()

    # --- one step -----------------------------------------------------------------------------

    def _start(self, start: SequenceStart) -> None:
        self._sequences[start.request_id] = _Sequence(
            array("i", start.token_ids),
            start.num_prompt_tokens,
            start.sampling,
            list(start.block_table),
            HashChain(self._root),
        )

    def _sequence(self, request_id: RequestId) -> _Sequence:
        try:
            return self._sequences[request_id]
        except KeyError:
            raise InvariantBroken(f"plan names unknown sequence {request_id}") from None

    def _cost_ns(self, plan: RankPlan) -> int:
        params = self._params
        cost_ns = params.prefill_token_ns * sum(chunk.end - chunk.begin for chunk in plan.chunks)
        if plan.rows:
            kv_tokens = sum(row.position + 1 for row in plan.rows)
            cost_ns += params.decode_step_ns + params.decode_row_ns * len(plan.rows)
            cost_ns += params.decode_kv_token_ns * kv_tokens
        return cost_ns

    def _advance(self, sequence: _Sequence, begin: int, end: int) -> list[tuple[BlockId, bytes]]:
        """Hash tokens `[begin, end)` and tell which blocks must hold which stream afterwards."""
        tokens, chain, table = sequence.token_ids, sequence.chain, sequence.block_table
        if not chain.num_tokens <= begin < end <= len(tokens):
            raise InvariantBroken(f"tokens [{begin}, {end}) after {chain.num_tokens} of {len(tokens)}")
        if num_blocks_for(end) > len(table):
            raise InvariantBroken(f"{len(table)} blocks do not hold {end} tokens")
        chain.extend(tokens[chain.num_tokens : begin])
        old_key = block_hash(chain.growing_digest())
        chain.extend(tokens[begin:end])
        digests = [*chain.digests[begin // BLOCK_TOKENS :], chain.growing_digest()]
        blocks = table[begin // BLOCK_TOKENS : num_blocks_for(end)]
        writes: list[tuple[BlockId, bytes]] = [
            (block, block_hash(digest)) for block, digest in zip(blocks, digests, strict=False)
        ]
        if begin % BLOCK_TOKENS and not self._holds(blocks[0], old_key):
            writes[0] = (blocks[0], xxhash.xxh3_128_digest(writes[0][1] + self._digest(blocks[0])))
        return writes

    def _holds(self, block: BlockId, key: bytes) -> bool:
        if self._keys[block] is not None:
            return self._keys[block] == key
        rows = self._words[block]
        return all(np.array_equal(row, self._streams([key], layer)[0]) for layer, row in enumerate(rows))

    def _fill(self, writes: list[tuple[BlockId, bytes]], layer: int) -> None:
        at_once = max(1, _SCRATCH_WORDS // len(self._counters))
        for begin in range(0, len(writes), at_once):
            part = writes[begin : begin + at_once]
            for block, key in part:
                self._check_usable(block)
                self._keys[block], self._digests[block] = key, None
            self._words[[block for block, _ in part], layer] = self._streams([key for _, key in part], layer)

    def _streams(self, keys: list[bytes], layer: int) -> npt.NDArray[np.uint64]:
        """Bytes of one row for every key: [keys, row words], uint64."""
        suffix = struct.pack("<I", layer)
        seeds = np.array([xxhash.xxh3_64_intdigest(key + suffix) for key in keys], np.uint64)
        return mix64(seeds[:, np.newaxis] + self._counters)

    def _digest(self, block: BlockId) -> bytes:
        digest = self._digests[block]
        if digest is None:
            digest = self._digests[block] = xxhash.xxh3_128_digest(self._words[block])
        return digest

    def _sample(self, sequence: _Sequence, item: PrefillChunk | DecodeRow) -> SampledToken:
        position = item.end if isinstance(item, PrefillChunk) else item.position + 1
        if position != len(sequence.token_ids):
            raise InvariantBroken(
                f"{item.request_id}: sampling after {position} of {len(sequence.token_ids)} tokens"
            )
        digests = b"".join(self._digest(block) for block in sequence.block_table[: num_blocks_for(position)])
        num_output = position - sequence.num_prompt_tokens
        token_id = pick_token(digests, self.vocab_size, sequence.sampling, num_output)
        sequence.token_ids.append(token_id)
        return make_sample(item.request_id, position, token_id, self.vocab_size, sequence.sampling)

    def _check_usable(self, block: BlockId) -> None:
        if not 1 <= block <= self.num_blocks:
            raise InvariantBroken(f"write to block {block}, usable are 1 ... {self.num_blocks}")

    def _wait_until(self, deadline_ns: int) -> None:
        rest_ns = deadline_ns - time.monotonic_ns()
        if rest_ns > 0:
            self._interrupted.wait(rest_ns / SECOND_NS)


def check_params(params: SyntheticParams) -> None:
    """Refuse shapes that cannot exist.

    Raises:
        ConfigError: Names the field.
    """
    least = {"num_layers": 1, "kv_bytes_per_token": 1, "num_blocks": 1, "max_num_seqs": 1}
    least |= {"max_model_len": 2, "vocab_size": FIRST_WORD + 1}
    least |= dict.fromkeys(("prefill_token_ns", "decode_step_ns", "decode_row_ns", "decode_kv_token_ns"), 0)
    for name, minimum in least.items():
        if getattr(params, name) < minimum:
            raise ConfigError(
                f"synthetic.{name} is {getattr(params, name)}; it must be at least {minimum}",
                param=f"synthetic.{name}",
            )


def make_layout(params: SyntheticParams) -> KvLayout:
    """Layout of the synthetic model's blocks."""
    return uniform_layout(params.num_layers, params.kv_bytes_per_token, "u8")


def make_root(layout: KvLayout) -> bytes:
    """Digest that the synthetic model's block chains start from."""
    return root_digest(b"synthetic", layout.fingerprint, b"", b"")


def pick_token(digests: bytes, vocab_size: int, sampling: SamplingParams, num_output: int) -> int:
    """Next token of a sequence: always a word, so the text is printable and ends by length.

    Args:
        digests: Digests of all KV blocks of the sequence, joined.
        vocab_size: Token ids.
        sampling: Seed and choice count when the temperature is not 0; `min_tokens` holds off stop tokens.
        num_output: Output tokens before this one.
    """
    seed = 0
    if sampling.temperature > 0:
        seed = xxhash.xxh3_64_intdigest(struct.pack("<QI", sampling.seed, sampling.choice))
    num_words = vocab_size - FIRST_WORD
    word = xxhash.xxh3_64_intdigest(digests, seed) % num_words
    if num_output < sampling.min_tokens:
        for _ in range(num_words):
            if FIRST_WORD + word not in sampling.stop_token_ids:
                break
            word = (word + 1) % num_words
    return FIRST_WORD + word


def make_sample(
    request_id: RequestId, position: int, token_id: int, vocab_size: int, sampling: SamplingParams
) -> SampledToken:
    """Report a token; all words are equally likely, which its logprobs say."""
    if sampling.num_logprobs < 0:
        return SampledToken(request_id, position, token_id)
    num_words = vocab_size - FIRST_WORD
    logprob = -math.log(num_words)
    word = token_id - FIRST_WORD
    top = [
        (FIRST_WORD + (word + i) % num_words, logprob) for i in range(min(sampling.num_logprobs, num_words))
    ]
    return SampledToken(request_id, position, token_id, logprob, tuple(top))


def expected_tokens(
    params: SyntheticParams, prompt_ids: array[int], sampling: SamplingParams, num_tokens: int
) -> array[int]:
    """Text of an undisturbed engine, computed without one: the slow twin that tests compare with.

    Returns:
        `num_tokens` output ids, int32.
    """
    layout = make_layout(params)
    num_words = layout.rows[0].num_bytes // 8
    known = array("i", prompt_ids)
    full_digests: list[bytes] = []
    while len(known) < len(prompt_ids) + num_tokens:
        chain = HashChain(make_root(layout))
        chain.extend(known)
        num_full = len(chain.digests)
        names = chain.digests[len(full_digests) :]
        full_digests += [_block_digest_ref(block_hash(name), params.num_layers, num_words) for name in names]
        growing = b""
        if len(known) > num_full * BLOCK_TOKENS:
            growing = _block_digest_ref(block_hash(chain.growing_digest()), params.num_layers, num_words)
        num_output = len(known) - len(prompt_ids)
        known.append(pick_token(b"".join(full_digests) + growing, params.vocab_size, sampling, num_output))
    return known[len(prompt_ids) :]


def _block_digest_ref(key: bytes, num_layers: int, num_words: int) -> bytes:
    block = b""
    for layer in range(num_layers):
        seed = xxhash.xxh3_64_intdigest(key + struct.pack("<I", layer))
        states = np.array(
            [(seed + i * int(GOLDEN_GAMMA)) & ((1 << 64) - 1) for i in range(num_words)], np.uint64
        )
        block += mix64(states).tobytes()
    return xxhash.xxh3_128_digest(block)
