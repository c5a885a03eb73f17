"""A Llama-family model over a real node daemon: warm and cold texts are equal, wherever the hit ends."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from millpond.control.group_scheduler import GroupRole
from tests.unit.engine.tiny_llama import tiny_engine, write_checkpoint
from tests.unit.serve.workers.kv_service import kv_service

NUM_OUTPUT = 9


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_warm_equals_cold(tmp_path, numerics):
    folder = write_checkpoint(tmp_path / "model")
    with kv_service() as service:
        prefill, decode = (tiny_engine(folder, numerics=numerics) for _ in range(2))
        service.start_daemon(prefill, num_slots=120)
        service.add_group("p0", GroupRole.PREFILL, prefill)
        service.add_group("d0", GroupRole.DECODE, decode)
        for length in range(120, 420, 31):
            prompt = array("i", np.random.default_rng(length).integers(0, 160, length).tolist())
            cold = service.ask(f"cold{length}", prompt, NUM_OUTPUT)
            assert cold.num_cached_tokens == 0
            service.settle()
            warm = service.ask(f"warm{length}", prompt, NUM_OUTPUT)
            assert warm.num_cached_tokens == (length - 1) // 128 * 128
            assert warm.token_ids == cold.token_ids
            begun = prompt + cold.token_ids[:4]
            further = service.ask(f"further{length}", begun, NUM_OUTPUT - 4)
            assert further.num_cached_tokens == min(len(begun) - 1, length + NUM_OUTPUT - 1) // 128 * 128
            assert further.token_ids == cold.token_ids[4:]
