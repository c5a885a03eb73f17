"""Every operation against its plain twin, on random numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from millpond.core.work import Mechanism
from millpond.engine.model.attention import KvPart, attend
from millpond.engine.model.compressor import CompressorWeights, make_latents
from millpond.engine.model.config import RopeScaling
from millpond.engine.model.engram import EngramWeights, add_engram, look_up
from millpond.engine.model.engram_ids import NgramHash, look_back
from millpond.engine.model.formats import (
    Fp4IndexRows,
    Fp4MainRows,
    Fp8Rows,
    dequantise_fp4_weight,
    dequantise_fp8,
    dequantise_tiles,
    quantise_fp8,
    round_fp8,
)
from millpond.engine.model.indexer import score_entries, score_single_rows
from millpond.engine.model.mhc import Mix, MixWeights, collapse, compute_mix, expand
from millpond.engine.model.moe import ExpertWeights, MoeWeights, mix_experts, route
from millpond.engine.model.numerics import FP32, FP32_QUANTISED, rms_norm
from millpond.engine.model.rope import Rotation, rope_frequencies
from millpond.engine.model.selection import choose_candidates, choose_largest
from millpond.engine.model.step import Rows, Span
from millpond.engine.model.vision import GridRotation, join_cells
from millpond.engine.ref.attention import (
    SeenRows,
    attend_ref,
    choose_candidates_ref,
    choose_largest_ref,
    make_latents_ref,
    rms_norm_ref,
    rope_frequencies_ref,
    rotate_ref,
    score_entries_ref,
    window_ref,
)
from millpond.engine.ref.experts import (
    add_engram_ref,
    engram_rows_ref,
    expert_ref,
    look_back_ref,
    route_ref,
)
from millpond.engine.ref.formats import (
    dequantise_fp4_weight_ref,
    dequantise_fp8_ref,
    dequantise_tiles_ref,
    round_fp4_index_ref,
    round_fp4_main_ref,
    round_fp8_ref,
)
from millpond.engine.ref.mhc import collapse_ref, compute_mix_ref, expand_ref
from millpond.engine.ref.vision import join_cells_ref, rotate_grid_ref
from tests.unit.engine.model.test_config import tiny

CPU = torch.device("cpu")


@pytest.fixture
def noise():
    return torch.Generator().manual_seed(11)


def close(ours, wanted, tolerance=2e-6):
    torch.testing.assert_close(ours.float(), wanted.float(), rtol=tolerance, atol=tolerance)


def test_formats(noise):
    rows = torch.randn(6, 64, generator=noise) * torch.tensor([1e-5, 0.03, 1.0, 7.0, 300.0, 1e5])[:, None]
    for row_format, ref in (
        (Fp8Rows(), round_fp8_ref),
        (Fp4IndexRows(), round_fp4_index_ref),
        (Fp4MainRows(), round_fp4_main_ref),
    ):
        ours = row_format.decode(row_format.encode(rows), 64)
        assert torch.equal(ours, torch.stack([ref(row) for row in rows])), type(row_format).__name__
    assert torch.equal(round_fp8(rows), torch.stack([round_fp8_ref(row) for row in rows]))


def test_stored_weights(noise):
    values = torch.randn(40, 96, generator=noise)
    data = values.to(torch.float8_e4m3fn).view(torch.uint8)
    tiles = torch.randint(120, 131, (2, 3), generator=noise).to(torch.uint8)
    assert torch.equal(dequantise_tiles(data, tiles), dequantise_tiles_ref(data, tiles))
    codes = torch.randint(0, 256, (5, 32), generator=noise).to(torch.uint8)
    scales = torch.randint(120, 131, (5, 2), generator=noise).to(torch.uint8)
    assert torch.equal(dequantise_fp4_weight(codes, scales), dequantise_fp4_weight_ref(codes, scales))
    table, exponents = quantise_fp8(values[:9])
    for row in range(9):
        wanted = dequantise_fp8_ref(table[row], exponents[row])
        assert torch.equal(dequantise_fp8(table[row], exponents[row]), wanted)


def test_hyper_connections(noise):
    stream = torch.randn(5, 4, 16, generator=noise)
    fn, base = torch.randn(24, 64, generator=noise) * 0.3, torch.randn(24, generator=noise)
    w = MixWeights(fn, base, torch.tensor([1.0, 0.5, 2.0]))
    mix = compute_mix(stream, w, FP32, norm_eps=1e-6, iters=20, eps=1e-6)
    out = torch.randn(5, 16, generator=noise)
    for t in range(5):
        wanted = compute_mix_ref(stream[t], w.fn, w.base, w.scale, norm_eps=1e-6, iters=20, eps=1e-6)
        for ours, theirs in zip(mix, wanted, strict=True):
            close(ours[t], theirs, 1e-5)
        one = Mix(*(x[t : t + 1] for x in mix))
        close(collapse(stream[t : t + 1], one.pre)[0], collapse_ref(stream[t], mix.pre[t]))
        close(
            expand(stream[t : t + 1], out[t : t + 1], one)[0],
            expand_ref(stream[t], out[t], mix.post[t], mix.comb[t]),
        )


def test_norm_and_rotation(noise):
    rows, weight = torch.randn(4, 3, 32, generator=noise), torch.rand(32, generator=noise)
    close(rms_norm(rows, weight, 1e-6)[2, 1], rms_norm_ref(rows[2, 1], weight, 1e-6))
    frequencies = rope_frequencies(1e4, 16, None)
    rotation = Rotation(frequencies, torch.tensor([0, 5, 63, 300]))
    close(rotation.apply(rows)[3, 2], rotate_ref(rows[3, 2], 300, frequencies))
    close(rotation.undo(rows)[1, 0], rotate_ref(rows[1, 0], 5, frequencies, sign=-1))


@pytest.mark.parametrize("scaling", [None, RopeScaling(16, 32, 1, 64), RopeScaling(8, 8, 2, 4096)])
def test_frequencies(scaling):
    yarn = scaling and (scaling.factor, scaling.beta_fast, scaling.beta_slow, scaling.original_positions)
    ours = rope_frequencies(160000.0, 32, scaling)
    torch.testing.assert_close(ours, rope_frequencies_ref(160000.0, 32, yarn), rtol=1e-6, atol=0)


def test_attention(noise):
    query, sink = torch.randn(6, 3, 32, generator=noise), torch.randn(3, generator=noise)
    first, second = torch.randn(20, 32, generator=noise), torch.randn(9, 32, generator=noise)
    a = torch.randint(-1, 20, (6, 7), generator=noise)
    b = torch.randint(-1, 9, (6, 4), generator=noise)
    a[2], b[2] = -1, -1
    out = attend(query, [KvPart(first, a), KvPart(second, b)], sink, torch.float32)
    for q in range(6):
        seen = [
            SeenRows(mechanism, [rows[i] for i in index[q].tolist() if i >= 0])
            for mechanism, rows, index in ((Mechanism.WINDOW, first, a), (Mechanism.SELECTED, second, b))
        ]
        close(out[q], attend_ref(query[q], seen, sink))


def test_windows():
    from millpond.engine.model.config import parse_config

    shape = replace(parse_config(tiny()).shape, window=5)
    ids = np.zeros(30, np.int32)
    spans = (Span(ids, 2, 3, (3,), 2), Span(ids, 0, 3, (1,), 0), Span(ids, 20, 29, (2,), 1, window_begin=18))
    rows = Rows(spans, shape, CPU)
    at = rows.window
    buffer = list(zip(at.read_slots.tolist(), at.read_rows.tolist(), strict=True))
    buffer += [
        (spans[s].slot, p % shape.ring_rows)
        for s, p in zip(rows.sequences.tolist(), rows.positions.tolist(), strict=True)
    ]
    for row, (sequence, position) in enumerate(
        zip(rows.sequences.tolist(), rows.positions.tolist(), strict=True)
    ):
        span = spans[sequence]
        wanted = [(span.slot, p % shape.ring_rows) for p in window_ref(position, 5, span.window_begin)]
        assert [buffer[i] for i in at.index[row].tolist() if i >= 0] == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selection(noise, dtype):
    scores = torch.randint(-3, 4, (12, 29), generator=noise).to(dtype)  # many ties
    visible = torch.randint(0, 30, (12,), generator=noise)
    scores = scores.masked_fill(torch.arange(29) >= visible[:, None], -torch.inf)
    chosen = choose_largest(scores, 6)
    mask = choose_candidates(scores, visible, 3, 4)
    for row in range(12):
        assert chosen[row].tolist() == choose_largest_ref(scores[row].tolist(), 6)
        assert mask[row].tolist() == choose_candidates_ref(scores[row].tolist(), int(visible[row]), 3, 4)


@pytest.mark.parametrize("is_exact", [False, True])
def test_index_scores(noise, is_exact):
    query, weights = torch.randn(7, 4, 16, generator=noise), torch.randn(7, 4, generator=noise)
    keys, visible = torch.randn(150, 16, generator=noise), torch.tensor([0, 1, 150, 149, 64, 128, 3])
    ours = score_entries(query, weights, keys, visible, replace(FP32, is_exact=is_exact))
    for row in range(7):
        wanted = score_entries_ref(query[row], weights[row], keys, int(visible[row]))
        close(ours[row], torch.tensor(wanted), 1e-5)


def test_index_scores_of_single_rows(noise):
    query, weights = torch.randn(3, 4, 16, generator=noise), torch.randn(3, 4, generator=noise)
    keys, visible = torch.randn(150, 16, generator=noise), torch.tensor([40, 0, 22])
    keys[140:] = torch.nan  # room of the last block, never written
    ours = score_single_rows(query, weights, keys, (0, 64, 118), visible, 40, FP32)
    for row, begin in enumerate((0, 64, 118)):
        own = functional.pad(keys[begin : begin + int(visible[row])], (0, 0, 0, 40 - int(visible[row])))
        wanted = score_entries_ref(query[row], weights[row], own, int(visible[row]))
        close(ours[row], torch.tensor(wanted), 1e-5)


def test_compressor(noise):
    from millpond.engine.model.caches import Caches
    from millpond.engine.model.config import parse_config

    shape = parse_config(tiny()).shape
    w = CompressorWeights(
        kv=torch.randn(128, 64, generator=noise) * 0.2,
        norm=torch.rand(64, generator=noise),
        index_key=torch.empty(0),
        index_norm=torch.empty(0),
    )
    x, caches = torch.randn(9, 64, generator=noise), Caches(shape, FP32, 1, 1, CPU)
    latents = []
    for begin, end in ((0, 3), (3, 4), (4, 9)):
        entries = Rows((Span(np.zeros(9, np.int32), begin, end, (1,), 0),), shape, CPU).entries(2)
        latents.append(make_latents(x[begin:end], w, entries, caches.compressors[2], 1e-6, FP32))
    values, gates = (x @ w.kv.T).chunk(2, dim=-1)
    close(torch.cat(latents), make_latents_ref(values, gates, w.norm, 2, 1e-6))


@pytest.mark.parametrize("numerics", [FP32, FP32_QUANTISED])
@pytest.mark.parametrize("is_exact", [False, True])
def test_experts(noise, numerics, is_exact):
    numerics = replace(numerics, is_exact=is_exact)
    experts = ExpertWeights(
        torch.randn(5, 64, 32, generator=noise) * 0.3, torch.randn(5, 32, 32, generator=noise) * 0.3
    )
    shared = ExpertWeights(experts.gate_up[0] * 0.5, experts.down[1])
    gate, bias = torch.randn(5, 32, generator=noise), torch.randn(5, generator=noise)
    w = MoeWeights(gate, bias, -bias, experts, shared)
    x, is_image = torch.randn(9, 32, generator=noise), torch.arange(9) % 3 == 0
    routing = route(x, w, is_image, 2, 1.5, numerics)
    ours = mix_experts(x, w, routing, 0.8, numerics)
    for t in range(9):
        wanted = route_ref(x[t], gate, -bias if is_image[t] else bias, 2, 1.5)
        weights = dict(zip(routing.experts[t].tolist(), routing.weights[t].tolist(), strict=True))
        assert weights == pytest.approx(wanted, rel=1e-5)
        out = torch.zeros(32)
        for e in sorted(weights):
            parts = (experts.gate_up[e], experts.down[e], weights[e], 0.8)
            out += expert_ref(x[t], *parts, is_quantised=numerics.is_quantised)
        out += expert_ref(x[t], shared.gate_up, shared.down, 1.0, 0.8, is_quantised=numerics.is_quantised)
        close(ours[t], out, 1e-5)


def test_look_back():
    ids = np.array([5, 6, 7, 8, 9, 10, 11])
    is_dead = np.array([False, False, True, False, False, False, False])
    ours = look_back(ids, is_dead, 3, 1, 4)
    wanted = [look_back_ref(ids.tolist(), is_dead.tolist(), position, 3, 4) for position in range(1, 7)]
    assert ours.tolist() == wanted


def test_engram(noise):
    own = NgramHash(np.array([3, 77, 1001, 5]), np.array([[11, 13], [17, 19], [23, 29]]))
    recent = np.random.default_rng(5).integers(0, 200, (6, 4))
    rows = own.rows(recent)
    for t in range(6):
        assert rows[t].tolist() == engram_rows_ref(
            recent[t].tolist(), own.multipliers.tolist(), own.primes.tolist()
        )
    data, scales = quantise_fp8(torch.randn(112, 32, generator=noise))
    copies, hidden = 4, 16
    w = EngramWeights(
        data, scales, torch.randn(5 * hidden, 6 * 32, generator=noise) * 0.1,
        torch.rand(copies, hidden, generator=noise), torch.rand(copies, hidden, generator=noise),
    )  # fmt: skip
    stream = torch.randn(6, copies, hidden, generator=noise)
    is_text = torch.tensor([True, True, False, True, True, True])
    ours, gates = add_engram(stream, w, torch.from_numpy(rows), is_text, 1e-6, FP32)
    mixed = look_up(w, torch.from_numpy(rows)) @ w.kv.T
    for t in range(6):
        keys, value = mixed[t, : copies * hidden].view(copies, hidden), mixed[t, copies * hidden :]
        wanted = add_engram_ref(stream[t], keys, value, w.query_norm * w.key_norm, 1e-6)
        close(ours[t], wanted if is_text[t] else stream[t], 1e-5)
    assert (gates[2] == 0).all()


def test_vision_grid(noise):
    rotation, x = GridRotation(3, 4, 16, 1e4), torch.randn(12, 2, 16, generator=noise)
    ours = rotation.apply(x)
    close(ours[7, 1], rotate_grid_ref(x[7, 1], 1, 3, 1e4), 1e-5)
    grid = torch.randn(4, 5, 6, generator=noise)
    assert torch.equal(join_cells(grid, 3), join_cells_ref(grid, 3))
