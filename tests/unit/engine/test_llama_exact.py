"""Exact numerics: a row's bits depend on its sequence alone, in the native kernels and in their twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.ids import DpRank, RequestId
from millpond.core.plan import PrefillChunk, RankPlan
from millpond.engine.torch_layers import TorchLayers
from tests.unit.engine.tiny_llama import Hand, tiny_engine, write_checkpoint

_PROMPTS = [[(7 * i + 3 * j) % 160 for i in range(n)] for j, n in enumerate((1, 60, 131, 200, 257))]


def _engine(folder, layers, dtype):
    engine = tiny_engine(folder, dtype=dtype, numerics="exact", kv_memory=12 << 20)
    native = engine._layers
    if layers == "torch":
        engine._layers = TorchLayers(engine._config, native._weights, engine._kv, native._rope, is_exact=True)
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def alone(folder):
    """Per (layers, dtype): logits and KV of each prompt prefetched whole and decoded alone."""
    found = {}

    def get(layers, dtype):
        if (layers, dtype) not in found:
            found[layers, dtype] = [_run_alone(_engine(folder, layers, dtype), p) for p in _PROMPTS]
        return found[layers, dtype]

    return get


def _run_alone(engine, prompt):
    hand = Hand(engine)
    tokens = [hand.prefill("a", prompt)]
    tokens += [hand.decode("a")[0] for _ in range(3)]
    return tokens, hand.logits, hand.kv_bytes("a")


@pytest.mark.parametrize("layers", ["native", "torch"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@settings(max_examples=6)
@given(data=st.data())
def test_bits_do_not_depend_on_chunks_or_batch(folder, alone, layers, dtype, data):
    expected = alone(layers, dtype)
    picked = data.draw(st.lists(st.integers(0, len(_PROMPTS) - 1), min_size=1, max_size=4))
    engine = _engine(folder, layers, dtype)
    hand = Hand(engine)
    names = [f"s{i}" for i in range(len(picked))]
    starts = [hand.start(name, _PROMPTS[p]) for name, p in zip(names, picked, strict=True)]
    done = dict.fromkeys(names, 0)
    got = {name: [] for name in names}
    texts = {name: [] for name in names}
    while any(done[name] < len(_PROMPTS[p]) for name, p in zip(names, picked, strict=True)):
        chunks, ended = [], []
        for name, p in zip(names, picked, strict=True):
            left = len(_PROMPTS[p]) - done[name]
            count = data.draw(st.integers(0 if chunks else min(1, left), left))
            if count:
                begin, end = done[name], done[name] + count
                chunks.append(PrefillChunk(RequestId(name), begin, end, end == len(_PROMPTS[p])))
                done[name] = end
                if chunks[-1].is_last:
                    ended.append(name)
        if not chunks:
            continue
        report = engine.execute(RankPlan(DpRank(0), start=tuple(starts), chunks=tuple(chunks)))
        starts = []
        for i, name in enumerate(ended):
            got[name].append(hand.logits[-1][i])
            texts[name].append(report.sampled[i].token_id)
            hand.lengths[name] += 1
    for _ in range(3):
        order = data.draw(st.permutations(names))
        for i, (name, token) in enumerate(zip(order, hand.decode(*order), strict=True)):
            got[name].append(hand.logits[-1][i])
            texts[name].append(token)
    for name, p in zip(names, picked, strict=True):
        tokens, logits, kv = expected[p]
        assert texts[name] == tokens
        for mine, theirs in zip(got[name], logits, strict=True):
            assert torch.equal(mine, theirs[0])
        assert hand.kv_bytes(name) == kv
