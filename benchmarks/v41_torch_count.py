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
from millpond.engine.model.numerics import BF16, FP32
from millpond.policies.cost import v41_cost

_LENGTH = 46
_LIMIT_S = 300


def largest_error(folder: Path) -> float:
    """Largest error over chunks with odd borders and a decode row, with all decoder rows and a kept tail."""
    files = tuple(sorted(folder.glob("*.safetensors")))
    errors = []
    for numerics, keep_begin in ((FP32, 0), (BF16, 29)):
        model = load_model(folder, files, numerics, torch.device("cpu"))
        cost, vocab = v41_cost(model.config.shape), model.config.shape.vocab_size
        ids = [3 + 37 * i % (vocab - 64) for i in range(_LENGTH)]
        errors.append(linear_error(model, cost, ids, [1, 32], num_decoded=1, keep_begin=keep_begin))
    return max(errors)


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
