"""All processes of a service mean the same model, as long as it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.engine.model.init import init_checkpoint
from tests.integration.conftest import Service

CONFIG = Path(__file__).parents[1] / "golden" / "data" / "tiny_a" / "config.json"
END_S = 120.0
"""Ten times what it takes to load torch, compare and drain."""


def flip_last_byte(file: Path) -> None:
    """In place: neither name nor size nor inode change."""
    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        (byte,) = opened.read(1)
        opened.seek(-1, 2)
        opened.write(bytes([byte ^ 1]))


@pytest.mark.timeout(300)
def test_a_restarted_rank_refuses_weights_that_changed_under_the_service(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    """It would keep what it computes with them under the names of what the old ones gave."""
    model = tmp_path / "model"
    init_checkpoint(json.loads(CONFIG.read_text(encoding="utf-8")), model, seed=5)
    toml = f'[engine]\nmodel = "{model}"\nkv_memory = 4000000\nmax_num_seqs = 8\n'
    service = start_service(toml + '[[group]]\nname = "m0"\nrole = "mixed"\n')
    flip_last_byte(min(model.glob("*.safetensors")))
    service.kill("m0")
    assert service.process.wait(END_S) == 2
    (line,) = [text for text in service.log_file.read_text().splitlines() if text.startswith("error: ")]
    for words in ("m0-0", str(model), "not those with which this service started", "restart the service"):
        assert words in line, line
