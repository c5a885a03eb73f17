"""Experts kept as FP4: the numbers that were stored, and the bits that bf16 weights give."""

from __future__ import annotations

import pytest
import torch

from millpond.engine.model import dense
from millpond.engine.model.formats import dequantise_fp4_weight
from millpond.engine.model.fp4_experts import Fp4Experts
from millpond.engine.native import load_kernels

pytestmark = pytest.mark.skipif(load_kernels(torch.bfloat16) is None, reason="needs a C compiler")


def stored(noise, num_rows, width, exponents=(118, 126)):
    codes = torch.randint(0, 256, (num_rows, width // 2), generator=noise, dtype=torch.uint8)
    scales = torch.randint(*exponents, (num_rows, width // 32), generator=noise, dtype=torch.uint8)
    return codes.view(torch.int8), scales


@pytest.fixture
def noise():
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize(("num_rows", "width"), [(1, 32), (7, 64), (33, 96), (600, 512)])
def test_products_equal_those_of_bf16_bit_for_bit(noise, num_rows, width):
    parts = [[stored(noise, num_rows, width), stored(noise, 2, width)] for _ in range(7)]
    weight = Fp4Experts.pack(parts)
    floats = torch.stack([torch.cat([dequantise_fp4_weight(*half) for half in expert]) for expert in parts])
    loads = torch.tensor([1, 0, 2, 3, 4, 11, 0])
    rows = torch.randn(21, width, generator=noise)
    ours = weight.multiply(rows, loads)
    assert torch.equal(ours, dense.multiply_by_expert(rows, floats.bfloat16(), loads))
    for expert, own in enumerate(floats):
        assert torch.equal(weight[expert], own)


def test_every_code_at_every_scale_is_exact(noise):
    """A row of ones at one column reads that column's weight."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 16).contiguous()
    weight = Fp4Experts.pack([[(codes, scales)]])
    values = dequantise_fp4_weight(codes, scales)[:253]  # above, some values are beyond float32
    read = weight.multiply(torch.eye(512), torch.tensor([512])).T[:253]
    assert torch.equal(read, values)


def test_a_width_of_no_whole_groups_is_not_packed(noise):
    codes, scales = stored(noise, 4, 96)
    assert Fp4Experts.pack([[(codes[:, :40], scales)]]) is None
