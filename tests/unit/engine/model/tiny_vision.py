"""A small vision tower with random weights."""

from __future__ import annotations

import torch

from millpond.engine.model.config import VisionConfig
from millpond.engine.model.vision import Affine, VisionBlock, VisionWeights


def small_tower() -> tuple[VisionConfig, VisionWeights]:
    """Patches of 2 x 2 pixels, cells of 3 x 3 patches, embeddings of 20 channels."""
    config = VisionConfig(
        num_layers=2, hidden_size=16, num_heads=2, width=24, patch_size=2, rope_theta=1e4, downsample=3,
        max_image_tokens=24, min_pixels=1,
    )  # fmt: skip
    noise = torch.Generator().manual_seed(5)

    def values(*size):
        return torch.randn(size, generator=noise) / size[-1] ** 0.5

    def affine(rows, columns, has_bias=True):
        return Affine(values(rows, columns), values(rows) if has_bias else None)

    blocks = tuple(
        VisionBlock(
            norm1=1 + values(16), qkv=affine(48, 16), out=affine(16, 16), norm2=1 + values(16),
            gate_up=affine(48, 16, has_bias=False), down=affine(16, 24, has_bias=False),
        )
        for _ in range(2)
    )  # fmt: skip
    w = VisionWeights(affine(16, 12), blocks, 1 + values(16), (affine(20, 144), affine(20, 20)), marks={})
    return config, w
