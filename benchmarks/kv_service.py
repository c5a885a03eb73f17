"""Sessions of agents with and without the KV that is kept: hits, job completion time, what keeping costs.

8 sessions at once, 12 turns each (quick: 3 x 5): a first prompt of 1,536 tokens, 256 new ones per turn, 48
generated; prompts are token ids, so that nothing is lost to tokenising answers anew. Pool off is
`gateway.match = false`: everything is kept as ever, and nothing is found. Each run has a service and a state
folder of its own. The ideal comes from `kv_ideal`, which knows only the log of what was asked.

A quick run has one model, the small V4.1, and one service, exact throughout, so that the last turn computed
cold must equal what was answered warm. For the job time without the pool it plays one session alone, once as
ever and once with a salt of its own for each turn, so that none finds anything.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.harness import Report, Result, say
from benchmarks.kv_ideal import sums
from benchmarks.kv_overlap import OverlapBench
from benchmarks.kv_runs import NEW_TOKENS, Played, Service, growing_sessions, running_service
from benchmarks.kv_vllm import measure_against_vllm
from millpond.engine.model.config import read_config
from millpond.engine.model.init import init_checkpoint
from millpond.serve.replay.figures import make_figures

SMOLLM = "smollm2-135m"
V41 = "v41-small"
MEMORY = {SMOLLM: "engine.kv_memory=1280 MiB", V41: "engine.kv_memory=512 MiB"}
NO_MATCH = ("gateway.match=false", "gateway.token_deadline_s=3600")
"""Without the pool the last of eight prompts waits for minutes until the others are computed."""
EXACT = "engine.numerics=exact"
EXACT_FIELDS = {"state_restore": "exact"}
EXACT_TURNS = 3
SIZE = (8, 12)
"""Sessions and turns of each."""
QUICK_SIZE = (3, 5)
SESSION_LEVELS = ("hit_tokens_vs_ideal", "jct_vs_pool_off", "persist_step_overhead", "hit_after_restart")


def run(*, quick: bool, only: set[str]) -> Result:
    """Measure the levels of [kv_service]."""
    torch.set_num_threads(1)  # here only models are written: two threads wait for each other
    report = Report("kv_service", quick, only)
    with tempfile.TemporaryDirectory(prefix="mp-") as name:
        folder = Path(name)
        models = {SMOLLM: SMOLLM, V41: str(folder / "v41")}
        config = Path(__file__).with_name("configs") / "v41_small.json"
        init_checkpoint(read_config(config), folder / "v41", seed=1)
        if quick:
            _measure_quick(report, folder, models[V41])
            return report.finish()
        if report.wants(*SESSION_LEVELS):
            _measure_sessions(report, folder, models)
        if report.wants("cold_warm_equal_exact"):
            _measure_equality(report, folder, models)
        measure_against_vllm(report, folder, MEMORY[SMOLLM], SIZE)
    if report.wants("load_hidden_fraction"):
        _measure_overlap(report)
    return report.finish()


@contextmanager
def _service(folder: Path, model: str, *settings: str) -> Iterator[Service]:
    """A service whose state is gone with it."""
    folder.mkdir()
    try:
        with running_service(folder, model, *settings) as service:
            yield service
    finally:
        shutil.rmtree(folder)


def _measure_quick(report: Report, folder: Path, model: str) -> None:
    """What a minute is enough for."""
    sessions = growing_sessions(*QUICK_SIZE)
    with _service(folder / "on", model, MEMORY[V41], EXACT) as service:
        on = service.play(sessions, fields=EXACT_FIELDS)
        last = on.log[-1]
        cold, _ = service.complete(last["prompt"], cache_salt="cold", **EXACT_FIELDS)
        alone = growing_sessions(1, QUICK_SIZE[1], "alone")
        warm_s, cold_s = (
            service.play(alone, fields=EXACT_FIELDS, is_cold=is_cold).jct_s for is_cold in (False, True)
        )
    found = sums(on.log)
    report.figures[V41] = {"jct_on_s": on.jct_s, "alone_on_s": warm_s, "alone_off_s": cold_s, "tokens": found}
    values = {
        "hit_tokens_vs_ideal": found["cached"] / found["ideal"],
        "persist_step_overhead": _overhead(on),
        "cold_warm_equal_exact": float(cold == last["output"] and last["cached"] > 0),
        "jct_vs_pool_off": warm_s / cold_s,
    }
    for level, value in values.items():
        if report.wants(level):
            report.add(level, value, V41)


def _measure_sessions(report: Report, folder: Path, models: dict[str, str]) -> None:
    hits: dict[str, float] = {}
    ratios: dict[str, float] = {}
    overheads: dict[str, float] = {}
    after: dict[str, float] = {}
    for name, model in models.items():
        sessions = growing_sessions(*SIZE)
        say(f"{name}: {SIZE[0]} sessions x {SIZE[1]} turns, pool off")
        with _service(folder / "off", model, MEMORY[name], *NO_MATCH) as service:
            off = service.play(sessions)
        say(f"{name}: mean job {off.jct_s:.2f} s; pool on")
        (folder / "on").mkdir()
        with running_service(folder / "on", model, MEMORY[name]) as service:
            on = service.play(sessions)
            if report.wants("hit_after_restart"):
                service.wait_written()
                service.kill()
        if report.wants("hit_after_restart"):
            after[name] = _hit_after_loss(folder / "on", model, MEMORY[name], on)
        shutil.rmtree(folder / "on")
        found = sums(on.log)
        hits[name] = found["cached"] / found["ideal"]
        ratios[name] = on.jct_s / off.jct_s
        overheads[name] = _overhead(on)
        report.figures[name] = _figures(on, off, found)
    _add_worst(report, "hit_tokens_vs_ideal", hits, min)
    _add_worst(report, "jct_vs_pool_off", ratios, max)
    _add_worst(report, "persist_step_overhead", overheads, max)
    if after:
        _add_worst(report, "hit_after_restart", after, min)


def _add_worst(
    report: Report, level: str, by_model: dict[str, float], worst: Callable[[Iterable[float]], float]
) -> None:
    """The level holds for every model: its value is the worst one."""
    if report.wants(level):
        note = ", ".join(f"{name} {value:.4g}" for name, value in by_model.items())
        report.add(level, worst(by_model.values()), note)


def _overhead(played: Played) -> float:
    """CPU time that ranks spend on keeping blocks, in CPU time of their steps."""
    kept, computed = (
        played.counts.get(f"millpond_{name}_seconds_total", 0.0) for name in ("persist", "compute")
    )
    return kept / computed if computed else float("nan")


def _figures(on: Played, off: Played, found: dict[str, int]) -> dict[str, object]:
    figures = make_figures(on.sessions, on.counts)
    return {
        "jct_on_s": on.jct_s,
        "jct_off_s": off.jct_s,
        "cached_off": sums(off.log)["cached"],
        "tokens": found,
        "lost_to_retokenisation": figures.num_answers_not_told,
        "loaded_share_by_level": figures.loaded_share_by_level,
        "bytes_by_link": figures.bytes_by_link,
        "fallbacks": figures.fallbacks,
        "ttft_on_s": figures.ttft_s.p50,
        "ttft_off_s": make_figures(off.sessions, off.counts).ttft_s.p50,
    }


def _hit_after_loss(folder: Path, model: str, memory: str, before: Played) -> float:
    """Share of the ideal that the next turn of each session has after everything was killed at once."""
    last = {turn["session"]: {**turn, "cached": 0} for turn in before.log}
    log = list(last.values())
    with running_service(folder, model, memory) as service:
        for name, turn in last.items():
            prompt = turn["prompt"] + turn["output"] + turn["prompt"][:NEW_TOKENS]
            output, cached = service.complete(prompt)
            log.append({"session": name, "prompt": prompt, "output": output, "cached": cached})
    found = sums(log)
    return found["cached"] / found["ideal"]


def _measure_equality(report: Report, folder: Path, models: dict[str, str]) -> None:
    """Answers to one prompt, with all that is kept and with nothing: equal, token for token."""
    num_equal = num_turns = 0
    for name, model in models.items():
        say(f"{name}: warm against cold, exact")
        with _service(folder / "exact", model, MEMORY[name], EXACT) as service:
            played = service.play(growing_sessions(1, EXACT_TURNS))
            for index, turn in enumerate(played.log):
                service.complete(turn["prompt"], **EXACT_FIELDS)  # exact requests find what exact ones left
                warm, cached = service.complete(turn["prompt"], **EXACT_FIELDS)
                cold, _ = service.complete(turn["prompt"], cache_salt=f"cold{index}", **EXACT_FIELDS)
                num_equal += warm == cold and cached > 0
                num_turns += 1
    report.add("cold_warm_equal_exact", num_equal / num_turns, f"{num_equal} of {num_turns} turns")


def _measure_overlap(report: Report) -> None:
    """Loads as long as half a step, and as a whole one: the worse of the two."""
    bench = OverlapBench()
    hidden = {share: bench.hidden_fraction(share) for share in (0.5, 1.0)}
    report.figures["load_hidden_by_share"] = hidden
    report.add("load_hidden_fraction", min(hidden.values()), "a 512-token chunk after a hit of 2,048 tokens")
