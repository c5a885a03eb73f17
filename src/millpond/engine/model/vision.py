"""The vision tower and the aligner: patches of one image to the embeddings of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from millpond.engine.model.checkpoint import Checkpoint
from millpond.engine.model.config import VisionConfig
from millpond.engine.model.context import Observe, ignore
from millpond.engine.model.image_plan import ImagePlan, TokenType
from millpond.engine.model.numerics import Numerics, rms_norm

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Affine:
    """A linear map, float32; bias None where it has none."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor, numerics: Numerics) -> torch.Tensor:
        """Map rows [n, in]; the result is rounded once."""
        out = numerics.product(rows.float(), self.weight)
        return (out if self.bias is None else out + self.bias).to(numerics.dtype)


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """One block of the tower."""

    norm1: torch.Tensor
    qkv: Affine
    out: Affine
    norm2: torch.Tensor
    gate_up: Affine
    down: Affine


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """Tower, aligner and the embeddings of a span's marks."""

    patch: Affine
    blocks: tuple[VisionBlock, ...]
    norm: torch.Tensor
    aligner: tuple[Affine, Affine]
    marks: dict[TokenType, torch.Tensor]


def load_vision(source: Checkpoint, vision: VisionConfig) -> VisionWeights:
    """Read the tower from a checkpoint.

    Raises:
        ModelFormatError: A shard cannot be read.
    """

    def affine(name: str, *, has_bias: bool = True) -> Affine:
        bias = source.plain(name + ".bias") if has_bias else None
        return Affine(source.plain(name + ".weight"), bias)

    blocks = []
    for number in range(vision.num_layers):
        name = f"vision.blocks.{number}."
        blocks.append(
            VisionBlock(
                norm1=source.plain(name + "norm1.weight"),
                qkv=affine(name + "attn.wqkv"),
                out=affine(name + "attn.wo"),
                norm2=source.plain(name + "norm2.weight"),
                gate_up=affine(name + "mlp.w1", has_bias=False),
                down=affine(name + "mlp.w2", has_bias=False),
            )
        )
    return VisionWeights(
        patch=affine("vision.patch_embed.proj"),
        blocks=tuple(blocks),
        norm=source.plain("vision.norm.weight"),
        aligner=(affine("aligner.w1"), affine("aligner.w2")),
        marks={
            TokenType.START: source.plain("image_start"),
            TokenType.NEWLINE: source.plain("image_newline"),
            TokenType.END: source.plain("image_end"),
        },
    )


class GridRotation:
    """Two-dimensional positions: half of the angles follow the patch row, half the column."""

    def __init__(self, rows: int, columns: int, head_dim: int, theta: float) -> None:
        """Cosines and sines [patches, 1, head_dim / 2]."""
        frequencies = 1.0 / theta ** (
            torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
        )
        row = torch.arange(rows).repeat_interleave(columns)[:, None] * frequencies
        column = torch.arange(columns).repeat(rows)[:, None] * frequencies
        angles = torch.cat([row, column], dim=-1)[:, None]
        self.cos, self.sin = angles.cos(), angles.sin()

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate [patches, heads, head_dim]: channel i turns with channel i + head_dim / 2."""
        first, second = x.float().chunk(2, dim=-1)
        turned = [first * self.cos - second * self.sin, second * self.cos + first * self.sin]
        return torch.cat(turned, dim=-1).to(x.dtype)


class VisionTower:
    """Embeds images."""

    def __init__(self, config: VisionConfig, weights: VisionWeights, numerics: Numerics) -> None:
        """Take the weights of `load_vision`."""
        self._config = config
        self._w = weights
        self._numerics = numerics

    def embed(self, patches: torch.Tensor, plan: ImagePlan, observe: Observe = ignore) -> torch.Tensor:
        """Embeddings of an image's IMAGE tokens, row after row: [grid rows * columns, hidden]."""
        config, numerics, w = self._config, self._numerics, self._w
        head_dim = config.hidden_size // config.num_heads
        rotation = GridRotation(plan.patch_rows, plan.patch_columns, head_dim, config.rope_theta)
        x = w.patch(patches.flatten(1).to(numerics.dtype), numerics)
        observe("patch_embed", x)
        for block in w.blocks:
            x = x + self._attention(rms_norm(x, block.norm1, _NORM_EPS), block, rotation)
            gate, up = block.gate_up(rms_norm(x, block.norm2, _NORM_EPS), numerics).chunk(2, dim=-1)
            x = x + block.down(functional.silu(gate) * up, numerics)
            observe("block", x)
        x = rms_norm(x, w.norm, _NORM_EPS)
        observe("norm", x)
        return self._align(x, plan)

    def span(self, rows: torch.Tensor, plan: ImagePlan) -> torch.Tensor:
        """Embeddings of a whole span: IMAGE tokens from `embed`, the marks learned."""
        types = torch.tensor(plan.token_types())
        out = torch.empty(len(types), rows.shape[1], dtype=rows.dtype)
        for mark, value in self._w.marks.items():
            out[types == mark] = value.to(rows.dtype)
        out[types == TokenType.IMAGE] = rows
        return out

    def _attention(self, x: torch.Tensor, block: VisionBlock, rotation: GridRotation) -> torch.Tensor:
        numerics, heads = self._numerics, self._config.num_heads
        query, key, value = block.qkv(x, numerics).unflatten(-1, (3, heads, -1)).unbind(1)
        query, key = rotation.apply(query), rotation.apply(key)
        query, key, value = (part.float().transpose(0, 1) for part in (query, key, value))
        weights = (torch.bmm(query, key.transpose(1, 2)) * query.shape[-1] ** -0.5).softmax(-1)
        mixed = torch.bmm(weights, value).transpose(0, 1).flatten(1).to(numerics.dtype)
        return block.out(mixed, numerics)

    def _align(self, x: torch.Tensor, plan: ImagePlan) -> torch.Tensor:
        """Join cells of neighbouring patches and project them to the stream's width."""
        cells = join_cells(x.unflatten(0, (plan.patch_rows, plan.patch_columns)), self._config.downsample)
        first, second = self._w.aligner
        return second(functional.gelu(first(cells, self._numerics)), self._numerics)


def join_cells(grid: torch.Tensor, size: int) -> torch.Tensor:
    """Cells of size x size patches of a grid [rows, columns, channels], zero outside it.

    Returns:
        [cells, channels * size * size], channel by channel, row after row.
    """
    rows, columns, _ = grid.shape
    padded = functional.pad(grid.permute(2, 0, 1), (0, -columns % size, 0, -rows % size))
    return functional.unfold(padded[None].float(), size, stride=size)[0].T.to(grid.dtype)
