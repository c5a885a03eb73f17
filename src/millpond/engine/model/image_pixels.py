"""From an RGB image to the vision tower's patches."""

from __future__ import annotations

import torch
from torch.nn import functional

from millpond.engine.model.image_plan import ImagePlan

_GREY = 127


def make_patches(rgb: torch.Tensor, plan: ImagePlan, patch_size: int) -> torch.Tensor:
    """Resize an image without changing its proportions, pad it with grey and cut it up.

    Args:
        rgb: [height, width, 3], uint8.
        plan: Its sizes.
        patch_size: Pixels per patch side.

    Returns:
        [patches, 3, patch, patch], bf16, in [-1, 1], row after row.
    """
    height, width = rgb.shape[:2]
    target_height, target_width = plan.pixel_height, plan.pixel_width
    new_height, new_width = target_height, target_width
    if width * target_height > target_width * height:
        new_height = round(height / width * target_width)
    elif width * target_height < target_width * height:
        new_width = round(width / height * target_height)
    image = rgb.permute(2, 0, 1)[None]
    if (new_height, new_width) != (height, width):
        image = functional.interpolate(image, (new_height, new_width), mode="bicubic", antialias=True)
    canvas = torch.full((3, target_height, target_width), _GREY, dtype=torch.uint8)
    top, left = round((target_height - new_height) * 0.5), round((target_width - new_width) * 0.5)
    canvas[:, top : top + new_height, left : left + new_width] = image[0]
    pixels = ((canvas.float() / 255 - 0.5) / 0.5).to(torch.bfloat16)
    grid = pixels.unfold(1, patch_size, patch_size).unfold(2, patch_size, patch_size)
    return grid.permute(1, 2, 0, 3, 4).flatten(0, 1).contiguous()
