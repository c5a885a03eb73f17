"""Attention of the vision tower, one head and patch at a time."""

from __future__ import annotations

import torch


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
