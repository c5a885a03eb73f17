"""`python -m benchmarks.v41_torch_count FOLDER ...`: the estimator's linear part against torch's counter.

A process of its own, started without a search path: where no compiler is found the engine computes every
product with torch, which is what torch's counter sees. Prints one JSON object: folder -> largest relative
error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.v41_flops import linear_error
from millpond.engine.model.load import load_model
from millpond.engine.model.numerics import BF16
from millpond.policies.cost import v41_cost

_LENGTH, _KEEP_BEGIN = 46, 29
_LIMIT_S = 300


def largest_error(folder: Path) -> float:
    """Largest error over chunks before, across and behind the kept tail's begin, and a decode row."""
    model = load_model(folder, tuple(sorted(folder.glob("*.safetensors"))), BF16, torch.device("cpu"))
    shape = model.config.shape
    ids = [3 + 37 * i % (shape.vocab_size - 64) for i in range(_LENGTH)]
    return linear_error(model, v41_cost(shape), ids, [1, 32], num_decoded=1, keep_begin=_KEEP_BEGIN)


def count_in_process(folders: Sequence[Path]) -> dict[str, float]:
    """Run this module over checkpoint folders in a process that finds no compiler."""
    command = [sys.executable, "-m", "benchmarks.v41_torch_count", *map(str, folders)]
    here = str(Path(__file__).parents[1])
    done = subprocess.run(
        command,
        cwd=here,
        env={"PATH": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=_LIMIT_S,
        check=True,
    )
    return json.loads(done.stdout)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({folder: largest_error(Path(folder)) for folder in sys.argv[1:]}))
