"""The vision tower and the aligner, one patch and head at a time."""

from __future__ import annotations

import math

import torch

from millpond.core.work import Mechanism, WorkKind
from millpond.engine.model.config import VisionConfig
from millpond.engine.model.vision import Affine, VisionBlock, VisionWeights
from millpond.engine.ref.attention import rms_norm_ref
from millpond.engine.ref.tally import count, inside, multiply_ref


def rotate_grid_ref(row: torch.Tensor, patch_row: int, patch_column: int, theta: float) -> torch.Tensor:
    """Rotate one head's channels [dim]: channel i with channel i + dim / 2."""
    half = len(row) // 2
    out = row.float().clone()
    for i in range(half):
        place, k = (patch_row, i) if i < half // 2 else (patch_column, i - half // 2)
        angle = torch.tensor(place * theta ** (-2 * k / half))
        a, b = row[i].float(), row[half + i].float()
        out[i], out[half + i] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return out


def join_cells_ref(grid: torch.Tensor, size: int) -> torch.Tensor:
    """Cells of size x size patches of a grid [rows, columns, channels], channel by channel; zero outside."""
    rows, columns, channels = grid.shape
    out = []
    for top in range(0, rows, size):
        for left in range(0, columns, size):
            cell = torch.zeros(channels, size, size)
            for y in range(top, min(top + size, rows)):
                for x in range(left, min(left + size, columns)):
                    cell[:, y - top, x - left] = grid[y, x]
            out.append(cell.flatten())
    return torch.stack(out)


def embed_image_ref(
    patches: torch.Tensor, rows: int, columns: int, w: VisionWeights, config: VisionConfig
) -> torch.Tensor:
    """Embeddings [tokens, hidden] of an image's patches [rows * columns, 3 * patch size squared], float32."""
    places = [(row, column) for row in range(rows) for column in range(columns)]
    with inside(Mechanism.VISION):
        stream = [_affine_ref(w.patch, patch) for patch in patches]
        for block in w.blocks:
            normed = [rms_norm_ref(x, block.norm1, 1e-6) for x in stream]
            mixed = _attention_ref(normed, places, block, config)
            stream = [x + _affine_ref(block.out, out) for x, out in zip(stream, mixed, strict=True)]
            for number, x in enumerate(stream):
                gate, up = _affine_ref(block.gate_up, rms_norm_ref(x, block.norm2, 1e-6)).chunk(2)
                stream[number] = x + _affine_ref(block.down, gate / (1 + torch.exp(-gate)) * up)
        grid = torch.stack([rms_norm_ref(x, w.norm, 1e-6) for x in stream]).unflatten(0, (rows, columns))
        first, second = w.aligner
        out = []
        for cell in join_cells_ref(grid, config.downsample):
            inner = _affine_ref(first, cell)
            out.append(_affine_ref(second, inner * (1 + torch.erf(inner / math.sqrt(2))) / 2))
    return torch.stack(out)


def _affine_ref(layer: Affine, row: torch.Tensor) -> torch.Tensor:
    out = multiply_ref(layer.weight, row)
    return out if layer.bias is None else out + layer.bias


def _attention_ref(
    normed: list[torch.Tensor], places: list[tuple[int, int]], block: VisionBlock, config: VisionConfig
) -> list[torch.Tensor]:
    """Every patch over all patches of its image, head by head."""
    heads = config.num_heads
    turned: list[tuple[list[torch.Tensor], list[torch.Tensor], tuple[torch.Tensor, ...]]] = []
    for x, (row, column) in zip(normed, places, strict=True):
        query, key, value = (part.chunk(heads) for part in _affine_ref(block.qkv, x).chunk(3))
        spun = [[rotate_grid_ref(head, row, column, config.rope_theta) for head in p] for p in (query, key)]
        turned.append((spun[0], spun[1], value))
    out = []
    for query, _, _ in turned:
        mixed = []
        for head in range(heads):
            keys = torch.stack([other[1][head] for other in turned])
            values = torch.stack([other[2][head] for other in turned])
            count(WorkKind.ATTENTION, keys.numel() + values.numel())
            weights = torch.softmax(keys @ query[head] * len(query[head]) ** -0.5, dim=0)
            mixed.append(weights @ values)
        out.append(torch.cat(mixed))
    return out
