"""Exact fp32 chooses the tokens that transformers chooses, except where those are nearly tied."""

from __future__ import annotations

from array import array

import torch

from millpond.config.engine_params import EngineParams
from millpond.core.ids import DpRank, RequestId, SlotId
from millpond.core.plan import DecodeRow, RankPlan, SequenceStart
from millpond.engine.load import load_engine
from millpond.engine.model_files import locate_model
from millpond.engine.tokenizer_files import load_tokenizer
from tests.unit.engine.tiny_llama import GREEDY, Hand

_NEAR_TIE = 1e-3
_NUM_PROMPT_TOKENS = 14
_NUM_TOKENS = 24
_TEXTS = [
    "The old mill stood beside the pond, and every morning the miller walked down to the water to",
    "Photosynthesis is the process by which green plants turn sunlight, water and carbon dioxide into",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
]


def test_greedy_text_is_that_of_transformers():
    from benchmarks.transformers_peer import as_transformers, greedy_texts

    torch.set_num_threads(1)
    tokenizer = load_tokenizer(locate_model("smollm2-135m"))
    prompts = [list(tokenizer.encode(text)[:_NUM_PROMPT_TOKENS]) for text in _TEXTS]
    engine = load_engine(EngineParams(dtype="fp32", numerics="exact", kv_memory=24 << 20))
    peer = as_transformers(engine._config, engine._layers._weights)
    expected = greedy_texts(peer, prompts, _NUM_TOKENS)

    hand = Hand(engine)
    names = [f"s{i}" for i in range(len(prompts))]
    chosen = [[hand.prefill(name, prompt, (5,))] for name, prompt in zip(names, prompts, strict=True)]
    for step in range(1, _NUM_TOKENS):
        # Each sequence starts anew with transformers' text so far: one near tie does not end the comparison.
        starts = tuple(
            SequenceStart(
                RequestId(name),
                0,
                array("i", prompt + text.token_ids[:step]),
                len(prompt),
                GREEDY,
                tuple(hand.tables[name]),
                SlotId(0),
            )
            for name, prompt, text in zip(names, prompts, expected, strict=True)
        )
        rows = tuple(DecodeRow(start.request_id, len(start.token_ids) - 1, ()) for start in starts)
        for mine, token in zip(
            chosen, engine.execute(RankPlan(DpRank(0), start=starts, rows=rows)).sampled, strict=True
        ):
            mine.append(token.token_id)

    clear = [
        (mine, theirs)
        for ours, text in zip(chosen, expected, strict=True)
        for mine, theirs, margin in zip(ours, text.token_ids, text.margins, strict=True)
        if margin > _NEAR_TIE
    ]
    assert len(clear) >= 0.9 * len(prompts) * _NUM_TOKENS  # otherwise this would compare next to nothing
    assert [mine for mine, _ in clear] == [theirs for _, theirs in clear]
