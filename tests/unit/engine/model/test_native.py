"""The native kernels against the torch code that serves without them."""

from __future__ import annotations

import pytest
import torch

from millpond.engine.model import dense, native
from millpond.engine.model.attention import KvPart, attend
from millpond.engine.model.engram import EngramWeights, add_engram
from millpond.engine.model.formats import Fp4IndexRows, Fp4MainRows, Fp8Rows, quantise_fp8
from millpond.engine.model.indexer import score_entries
from millpond.engine.model.mhc import MixWeights, collapse, compute_mix, expand
from millpond.engine.model.moe import ExpertWeights, MoeWeights, _group, mix_experts, route
from millpond.engine.model.numerics import BF16, rms_norm
from millpond.engine.model.rope import Rotation, rope_frequencies
from millpond.engine.model.selection import choose_largest

BF16_STEP = 2.0**-7
"""Largest distance of neighbours, relative: sums in another order may round to the next number."""
FORMATS = (Fp8Rows(), Fp4MainRows(), Fp4IndexRows())


@pytest.fixture
def noise():
    return torch.Generator().manual_seed(7)


def both(monkeypatch, work):
    """Results of an operation with kernels and with torch."""
    assert native.load_kernels() is not None, "this machine has a C compiler, so the kernels must build"
    ours = work()
    with monkeypatch.context() as patch:
        patch.setattr(native, "load_kernels", lambda: None)
        patch.setattr(dense, "load_kernels", lambda dtype: None)
        return ours, work()


def assert_near(ours, theirs, tolerance=BF16_STEP):
    largest = theirs.float().abs().max().item()
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=1e-3 * largest)
    assert (ours == theirs).float().mean() > 0.95, "almost all numbers round alike"


@pytest.mark.parametrize("row_format", FORMATS, ids=lambda f: type(f).__name__)
def test_packed_rows_are_the_same_bytes(monkeypatch, noise, row_format):
    rows = torch.randn(40, 64, generator=noise) * 10.0 ** torch.randint(-9, 7, (40, 1), generator=noise)
    rows[3], rows[4, 5] = 0, -0.0
    rows[5] = torch.tensor([0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0, 6.0]).repeat(8)  # ties
    rows = rows.bfloat16()
    ours, theirs = both(monkeypatch, lambda: row_format.encode(rows))
    assert torch.equal(ours, theirs)
    ours, theirs = both(monkeypatch, lambda: row_format.decode(theirs, 64))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("row_format", FORMATS, ids=lambda f: type(f).__name__)
def test_any_bytes_unpack_alike(monkeypatch, noise, row_format):
    size = row_format.row_bytes(64)
    memory = torch.randint(0, 256, (5, 7, size + 3), generator=noise, dtype=torch.uint8)[:, :, :size]
    first, second = torch.tensor([4, 0, 2, 2]), torch.tensor([6, 0, 3, 1])
    for places in ((first, second), (first, None)):
        ours, theirs = both(monkeypatch, lambda places=places: row_format.read(memory, *places, 64))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_rounding_for_linears_is_the_same(monkeypatch, noise):
    rows = (torch.randn(30, 64, generator=noise) * 10.0 ** torch.arange(-9, 6, 0.5)[:, None]).bfloat16()
    ours, theirs = both(monkeypatch, lambda: BF16.quantised_input(rows))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 64, 150])
def test_quantised_linears_round_before_and_after(monkeypatch, noise, dtype, num_rows):
    rows = torch.randn(num_rows, 96, generator=noise).bfloat16()
    weight = torch.randn(41, 96, generator=noise).to(dtype)
    ours = BF16.quantised_linear(rows, weight)
    assert torch.equal(ours, dense.multiply(BF16.quantised_input(rows), weight).bfloat16())


@pytest.mark.parametrize("row_format", FORMATS, ids=lambda f: type(f).__name__)
def test_rows_read_before_others_are_those_read_alone(monkeypatch, noise, row_format):
    size = row_format.row_bytes(64)
    memory = torch.randint(0, 126, (5, 7, size), generator=noise, dtype=torch.uint8)
    data, first, second = memory[3, :3].clone(), torch.tensor([4, 0, 2]), torch.tensor([6, 0, 3])
    ours, theirs = both(monkeypatch, lambda: row_format.read_before(memory, first, second, data, 64))
    alone = torch.cat([row_format.read(memory, first, second, 64), row_format.decode(data, 64)])
    assert torch.equal(ours, alone)
    assert torch.equal(theirs, alone)


def test_norms_and_rotations(monkeypatch, noise):
    rows = torch.randn(9, 3, 32, generator=noise).bfloat16()
    wide = torch.randn(9, 96, generator=noise).bfloat16()
    weight = torch.rand(32, generator=noise)
    rotation = Rotation(rope_frequencies(1e4, 16, None), torch.arange(9) * 37)
    for work in (
        lambda: rms_norm(rows, weight, 1e-20),
        lambda: rms_norm(wide[:, 32:64], weight, 1e-20),
        lambda: rotation.apply(rows),
        lambda: rotation.undo(wide),
    ):
        assert_near(*both(monkeypatch, work))


def test_hyper_connections(monkeypatch, noise):
    stream = torch.randn(19, 4, 32, generator=noise).bfloat16()
    out = torch.randn(19, 32, generator=noise).bfloat16()
    w = MixWeights(
        torch.randn(24, 128, generator=noise) * 0.3,
        torch.randn(24, generator=noise),
        torch.tensor([1, 0.5, 2]),
    )
    ours, theirs = both(monkeypatch, lambda: compute_mix(stream, w, BF16, norm_eps=1e-20, iters=20, eps=1e-6))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert_near(*both(monkeypatch, lambda: collapse(stream, theirs.pre)))
    assert_near(*both(monkeypatch, lambda: expand(stream, out, theirs)))


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 11])
def test_attention(monkeypatch, noise, heads):
    query = torch.randn(6, heads, 32, generator=noise).bfloat16()
    sink = torch.randn(heads, generator=noise)
    rows = [torch.randn(count, 32, generator=noise) for count in (60, 9)]
    index = [torch.randint(-1, len(part), (6, 45), generator=noise) for part in rows]
    index[0][2], index[1][2] = -1, -1
    parts = [KvPart(*part) for part in zip(rows, index, strict=True)]
    ours, theirs = both(monkeypatch, lambda: attend(query, parts, sink, torch.bfloat16))
    assert_near(ours, theirs)
    assert not ours[2].any()


@pytest.mark.parametrize("heads", [3, 8])
def test_index_scores(monkeypatch, noise, heads):
    query = torch.randn(7, heads, 32, generator=noise)
    weights = torch.randn(7, heads, generator=noise).bfloat16()
    keys, visible = torch.randn(150, 32, generator=noise), torch.tensor([0, 1, 150, 149, 64, 128, 3])
    theirs = score_entries(query, weights, keys, visible, BF16)
    kernels = native.load_kernels()
    ours = kernels.score_entries(query, weights, keys, torch.zeros(7, dtype=torch.int64), visible, 150)
    assert torch.equal(ours.isinf(), theirs.isinf())
    seen = ~theirs.isinf()
    # three roundings to bf16 on the way: a product may fall to the other side of each
    torch.testing.assert_close(ours[seen].float(), theirs[seen].float(), rtol=2 * BF16_STEP, atol=0.1)
    assert (ours == theirs)[seen].float().mean() > 0.9
    begin = torch.tensor([100, 3, 0, 1, 80, 20, 140])
    moved = kernels.score_entries(query, weights, keys, begin, visible.clamp_max(10), 10)
    for row in range(7):
        own = keys[begin[row] : begin[row] + 10]
        wanted = kernels.score_entries(
            query, weights, own, torch.zeros_like(begin), visible.clamp_max(10), 10
        )
        assert torch.equal(moved[row], wanted[row])


@pytest.mark.parametrize("count", [1, 6, 29, 40])
def test_selection(monkeypatch, noise, count):
    scores = torch.randint(-3, 4, (200, 29), generator=noise).bfloat16()  # many ties
    scores[:50] *= torch.rand(50, 29, generator=noise).bfloat16()
    scores[scores == 0] *= -1.0
    visible = torch.randint(0, 30, (200,), generator=noise)
    scores = scores.masked_fill(torch.arange(29) >= visible[:, None], -torch.inf)
    ours, theirs = both(monkeypatch, lambda: choose_largest(scores, count))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("has_images", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_routing_and_grouping(monkeypatch, noise, count, has_images):
    biases = torch.randn(2, 9, generator=noise)
    w = MoeWeights(torch.randn(9, 32, generator=noise), biases[0], biases[1], None, None)
    x = torch.randn(33, 32, generator=noise).bfloat16()
    is_image = torch.arange(33) % 3 == 0 if has_images else None
    ours, theirs = both(monkeypatch, lambda: route(x, w, is_image, count, 1.5, BF16))
    assert torch.equal(ours.experts, theirs.experts)
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-5, atol=0)
    for mine, other in zip(*both(monkeypatch, lambda: _group(ours, 9, torch.bfloat16)), strict=True):
        assert torch.equal(mine, other)


def test_experts(monkeypatch, noise):
    experts = ExpertWeights(
        torch.randn(5, 64, 32, generator=noise) * 0.3,
        torch.randn(5, 32, 32, generator=noise) * 0.3,
    )
    shared = ExpertWeights(experts.gate_up[0], experts.down[1])
    gate, bias = torch.randn(5, 32, generator=noise), torch.randn(5, generator=noise)
    w = MoeWeights(gate, bias, None, experts, shared)
    x = torch.randn(33, 32, generator=noise).bfloat16()
    routing = route(x, w, None, 2, 1.5, BF16)
    ours, theirs = both(monkeypatch, lambda: mix_experts(x, w, routing, 0.8, BF16))
    # inner rows are rounded to FP8: one that falls to the other side moves a whole row of outputs
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.05)
    assert (ours == theirs).float().mean() > 0.9


@pytest.mark.parametrize("has_images", [False, True])
def test_engram(monkeypatch, noise, has_images):
    data, scales = quantise_fp8(torch.randn(20, 32, generator=noise))
    kv = torch.randn(160, 64, generator=noise) * 0.3
    norms = torch.rand(2, 4, 32, generator=noise)
    w = EngramWeights(data, scales, kv, norms[0], norms[1])
    stream = torch.randn(9, 4, 32, generator=noise).bfloat16()
    rows = torch.randint(0, 20, (9, 2), generator=noise)
    is_text = torch.arange(9) % 3 > 0 if has_images else None
    ours, theirs = both(monkeypatch, lambda: add_engram(stream, w, rows, is_text, 1e-20, BF16))
    assert_near(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_columns", [1, 2, 5, 24, 33])
def test_products_do_not_depend_on_the_other_rows(noise, dtype, num_columns):
    rows, weight = (
        torch.randn(9, 96, generator=noise),
        torch.randn(num_columns, 96, generator=noise).to(dtype),
    )
    together = dense.multiply(rows, weight)
    exact = rows.double() @ weight.double().T
    torch.testing.assert_close(together.double(), exact, rtol=1e-5, atol=1e-4)
    for begin in range(9):
        for end in range(begin + 1, 10):
            assert torch.equal(dense.multiply(rows[begin:end], weight), together[begin:end])


def test_grouped_products_are_those_of_each_group(noise):
    rows, weight = torch.randn(7, 3, 32, generator=noise), torch.randn(3, 5, 32, generator=noise).bfloat16()
    grouped = dense.multiply_groups(rows, weight)
    loads = torch.tensor([2, 0, 5])
    by_expert = dense.multiply_by_expert(rows[:, 0], weight, loads)
    for group, own in enumerate(weight):
        assert torch.equal(grouped[:, group], dense.multiply(rows[:, group], own))
    for expert, part in enumerate(by_expert.split(loads.tolist())):
        begin = int(loads[:expert].sum())
        assert torch.equal(part, dense.multiply(rows[begin : begin + len(part), 0], weight[expert]))


def test_only_what_bf16_holds_exactly_is_kept_in_it(noise):
    weight = torch.randn(4, 32, generator=noise)
    assert dense.narrow_exact(weight).dtype == torch.float32
    assert dense.narrow_exact(weight.bfloat16().float()).dtype == torch.bfloat16
    assert dense.narrow_exact(torch.ones(4, 24)).dtype == torch.float32  # a width the kernels cannot take
