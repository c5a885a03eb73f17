"""How large an image is made, how many tokens it takes and which. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import sqrt

from millpond.core.units import align_up, ceil_div
from millpond.engine.model.config import VisionConfig


class TokenType(IntEnum):
    """Part of a token in an image span; text has none."""

    TEXT = -1
    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """Sizes of one image: pixels after padding, patches, and the grid of tokens."""

    pixel_height: int
    pixel_width: int
    patch_rows: int
    patch_columns: int
    grid_rows: int
    grid_columns: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole span: a newline after every row, start and end."""
        return self.grid_rows * (self.grid_columns + 1) + 2

    def token_types(self) -> list[TokenType]:
        """Types of the span's tokens in order."""
        row = [*[TokenType.IMAGE] * self.grid_columns, TokenType.NEWLINE]
        return [TokenType.START, *row * self.grid_rows, TokenType.END]


def plan_image(width: int, height: int, config: VisionConfig) -> ImagePlan:
    """Plan an image of `width` x `height` pixels: at least `min_pixels`, at most `max_image_tokens`."""
    if width * height < config.min_pixels:
        scale = sqrt(config.min_pixels / (width * height))
        width, height = int(width * scale), int(height * scale)
    patch = config.patch_size
    plan = _plan(align_up(max(width, 1), patch), align_up(max(height, 1), patch), config)
    if plan.num_tokens <= config.max_image_tokens:
        return plan
    return _plan(*_shrink(width, height, config), config)


def _plan(width: int, height: int, config: VisionConfig) -> ImagePlan:
    rows, columns = height // config.patch_size, width // config.patch_size
    return ImagePlan(
        height, width, rows, columns, ceil_div(rows, config.downsample), ceil_div(columns, config.downsample)
    )


def _shrink(width: int, height: int, config: VisionConfig) -> tuple[int, int]:
    """Largest size of the same proportions whose tokens fit."""
    patch, cell = config.patch_size, config.patch_size * config.downsample
    room = config.max_image_tokens - 2
    ratio = height / width
    columns = sqrt(room / ratio + 0.25) - 0.5
    rows = columns * ratio
    if columns < 1:
        return cell, room // 2 * cell  # one column: every row takes a newline too
    if rows < 1:
        return (room - 1) * cell, cell
    scale = min(int(columns) * cell / width, int(rows) * cell / height)
    return int(width * scale / patch) * patch, int(height * scale / patch) * patch
