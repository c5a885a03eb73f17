"""Golden sets: where they are, how to open them, and how many tensors were compared."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file

IN_REPO = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[3] / "shared" / "goldens" / "v41"
NUM_COMPARED = {"tensors": 0}


def golden_folder(name: str) -> Path | None:
    """The complete set beside the repository where there is one, else the part kept in the repository."""
    for folder in (SHARED / name, IN_REPO / name):
        if folder.is_dir():
            return folder
    return None


def golden_cases(pattern: str) -> list[tuple[str, str]]:
    """(set, case) of every case file that matches, in every model set."""
    cases = []
    for root in (SHARED, IN_REPO):
        for file in sorted(root.glob(f"*/{pattern}.safetensors")):
            case = (file.parent.name, file.stem)
            if case not in cases and not file.name.startswith("quirk"):
                cases.append(case)
    return cases


@lru_cache(maxsize=8)
def load_golden(folder: str, name: str) -> dict[str, torch.Tensor]:
    root = golden_folder(folder)
    assert root is not None
    return load_file(root / f"{name}.safetensors")


def counted(num_tensors: int = 1) -> None:
    NUM_COMPARED["tensors"] += num_tensors


def check_equal(actual: torch.Tensor, golden: torch.Tensor, what: str) -> None:
    counted()
    assert tuple(actual.shape) == tuple(golden.shape), (
        f"{what}: {tuple(actual.shape)}, not {tuple(golden.shape)}"
    )
    wrong = actual.to(golden.dtype) != golden
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} differ"


def check_close(actual: torch.Tensor, golden: torch.Tensor, tolerance: float, what: str) -> None:
    """Largest absolute difference at most `tolerance`."""
    counted()
    assert tuple(actual.shape) == tuple(golden.shape), (
        f"{what}: {tuple(actual.shape)}, not {tuple(golden.shape)}"
    )
    if golden.numel():
        difference = (actual.double() - golden.double()).abs().max().item()
        assert difference <= tolerance, f"{what}: differs by {difference:.3g}, allowed {tolerance:.3g}"


def check_ulps(actual: torch.Tensor, golden: torch.Tensor, max_ulps: int, what: str) -> None:
    """bf16 tensors: at most `max_ulps` representable numbers apart."""
    counted()
    assert actual.dtype == golden.dtype == torch.bfloat16
    assert tuple(actual.shape) == tuple(golden.shape), (
        f"{what}: {tuple(actual.shape)}, not {tuple(golden.shape)}"
    )

    def order(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(torch.int16).to(torch.int32)
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    distance = (order(actual) - order(golden)).abs()
    assert distance.max() <= max_ulps, f"{what}: {int(distance.max())} ulps apart"


def row_errors(actual: torch.Tensor, golden: torch.Tensor) -> torch.Tensor:
    """Relative L2 difference of each row; [rows, ...] -> [rows]."""
    a, g = actual.double().flatten(1), golden.double().flatten(1)
    return (a - g).norm(dim=1) / g.norm(dim=1).clamp_min(1e-30)
