"""A prefill process for tests: `ADDRESS SHM_DIR NUM_TOKENS NUM_ROWS`.

Prefills prompt `i, i+1, ...` for request `r<i>`, one for each line `i` of its input; stops telling the
sender about rows after NUM_ROWS of them, and then only waits to be killed.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass

from millpond.config.synthetic_params import SyntheticParams
from millpond.config.transfer_params import TransferParams
from millpond.core.ids import BlockId, DpRank, GroupId, RankRef, RequestId, SlotId
from millpond.core.plan import HandoffSend, PrefillChunk, RankPlan, SequenceStart
from millpond.core.request import SamplingParams
from millpond.core.units import num_blocks_for
from millpond.engine.synthetic import SyntheticEngine
from millpond.serve.transfer.sender import HandoffSender

TOKEN = b"t" * 32
PARAMS = SyntheticParams(
    num_layers=3,
    kv_bytes_per_token=8,
    num_blocks=64,
    prefill_token_ns=0,
    decode_step_ns=0,
    decode_row_ns=0,
    decode_kv_token_ns=0,
)
GREEDY = SamplingParams(max_tokens=64, seed=0, temperature=0.0)


@dataclass
class Progress:
    """Passes on the first rows only."""

    sender: HandoffSender
    request_id: RequestId
    num_blocks: int
    max_rows: int

    def on_row_needed(self, row: int) -> None:
        pass

    def on_row_ready(self, row: int) -> None:
        if row < self.max_rows:
            self.sender.rows_ready(self.request_id, 0, row, self.num_blocks)


def prompt_of(i: int, num_tokens: int) -> array[int]:
    return array("i", range(i, i + num_tokens))


def prefill(
    engine: SyntheticEngine, sender: HandoffSender, i: int, address: str, num_tokens: int, max_rows: int
) -> int:
    """Prefill one prompt and hand it off; returns the first token."""
    request_id, slot = RequestId(f"r{i}"), SlotId(0)
    num_blocks = num_blocks_for(num_tokens)
    first = 1 + (i * num_blocks) % (PARAMS.num_blocks - num_blocks)
    table = tuple(BlockId(first + k) for k in range(num_blocks))
    to = RankRef(GroupId("d0"), DpRank(0))
    sender.start(HandoffSend(request_id, 0, DpRank(0), to, address, num_tokens, table, slot))
    start = SequenceStart(request_id, 0, prompt_of(i, num_tokens), num_tokens, GREEDY, table, slot)
    half = num_tokens // 2
    progress = Progress(sender, request_id, half // 128, max_rows)
    chunk = PrefillChunk(request_id, 0, half, is_last=False)
    engine.execute(RankPlan(DpRank(0), start=(start,), chunks=(chunk,)), progress)
    progress.num_blocks = num_blocks
    chunk = PrefillChunk(request_id, half, num_tokens, is_last=True)
    report = engine.execute(RankPlan(DpRank(0), chunks=(chunk,)), progress)
    first_token_id = report.sampled[0].token_id
    if max_rows >= PARAMS.num_layers:
        sender.finish(request_id, 0, first_token_id)
    return first_token_id


def main() -> None:
    address, shm_dir, num_tokens, max_rows = sys.argv[1:]
    engine = SyntheticEngine(PARAMS)
    sender = HandoffSender(
        engine, TOKEN, TransferParams(shm_dir=shm_dir), lambda event: print(event, flush=True)
    )
    for line in sys.stdin:
        prefill(engine, sender, int(line), address, int(num_tokens), int(max_rows))


if __name__ == "__main__":
    main()
