"""Images against the reference: pixels, tower, aligner, and a prompt with two of them."""

from __future__ import annotations

import pytest
import torch

from millpond.engine.model.checkpoint import Checkpoint
from millpond.engine.model.image_pixels import make_patches
from millpond.engine.model.image_plan import plan_image
from millpond.engine.model.model import ImageRows
from millpond.engine.model.vision import VisionTower, load_vision
from tests.golden.goldens import (
    check_close,
    check_equal,
    golden_cases,
    golden_folder,
    load_golden,
    row_errors,
)
from tests.golden.test_v41_tiny import STRICT, check_decode, check_prefill
from tests.golden.v41_case import Case

CASES = golden_cases("vl.*")


def image_names(golden):
    return sorted({name.split(".")[0] for name in golden if name.startswith("image")})


def make_tower(case):
    root = golden_folder(case.folder)
    assert root is not None
    config = case.model.config
    with Checkpoint([root / "weights.safetensors"], config) as checkpoint:
        return VisionTower(config.vision, load_vision(checkpoint, config.vision), case.model.numerics)


def patches_of(folder, image):
    """The fp32 file leaves out what the bf16 file of the same case already holds."""
    return load_golden(folder, "vl.bf16")[f"{image}.patches"], load_golden(folder, "vl.bf16")[f"{image}.rgb"]


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_images(folder, name):
    case = Case(folder, name)
    g, tower = case.golden, make_tower(case)
    rows, values = [], []
    for image in image_names(g):
        width, height, patch_rows, patch_columns, grid_rows, grid_columns, first, length = g[
            f"{image}.grid"
        ].tolist()
        plan = plan_image(width, height, case.model.config.vision)
        assert (plan.patch_rows, plan.patch_columns) == (patch_rows, patch_columns)
        assert (plan.grid_rows, plan.grid_columns, plan.num_tokens) == (grid_rows, grid_columns, length)
        check_equal(torch.tensor(plan.token_types()), g[f"{image}.types"], f"{image} types")
        patches, rgb = patches_of(folder, image)
        ours = make_patches(rgb, plan, case.model.config.vision.patch_size)
        check_close(ours, patches, 3 / 128, f"{image} patches")
        seen = []
        out = tower.embed(patches, plan, lambda what, value, seen=seen: seen.append((what, value)))
        names = ["patch_embed", *(f"block{i}" for i in range(len(seen) - 2)), "norm"]
        for (_, value), what in zip(seen, names, strict=True):
            compare(value, g[f"{image}.vision.{what}"], case.mode, f"{image} {what}")
        compare(out, g[f"{image}.aligner.rows"], case.mode, f"{image} aligner")
        rows.append(torch.arange(first, first + length))
        values.append(tower.span(out, plan))
    images = ImageRows(torch.cat(rows), torch.cat(values))
    if case.mode == "fp32":
        drafts = check_prefill(case, images)
        check_decode(case, drafts)


def compare(ours, golden, mode, what):
    if mode == "fp32":
        check_close(ours, golden, STRICT, what)
    else:
        check_close(row_errors(ours, golden), torch.zeros(len(golden), dtype=torch.float64), 0.02, what)
