"""Arrivals and what is reported about them."""

from __future__ import annotations

import itertools

import pytest

from millpond.config.sections import Config
from millpond.core.chance import Chance
from millpond.core.errors import ConfigError
from millpond.core.request import FinishReason
from millpond.core.units import SECOND_NS
from millpond.sim.report import percentile, summarise
from millpond.sim.run import run_simulation
from millpond.sim.sim_gateway import Stream
from millpond.sim.workload import Arrival, poisson, read_trace
from tests.sim.making import make_spec


def test_poisson_has_the_rate_and_is_the_same_for_a_seed():
    arrivals = poisson(Chance(3, "arrivals"), 4000, 20.0, 100, 10)
    assert arrivals == poisson(Chance(3, "arrivals"), 4000, 20.0, 100, 10)
    assert arrivals != poisson(Chance(4, "arrivals"), 4000, 20.0, 100, 10)
    assert arrivals[-1].time_ns / SECOND_NS == pytest.approx(200, rel=0.1)
    gaps = [b.time_ns - a.time_ns for a, b in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(mean, rel=0.1)


def test_trace_of_the_mooncake_form(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 3000, "input_length": 7, "output_length": 2, "hash_ids": [1, 2]}\n\n'
        '{"timestamp": 27.5, "input_length": 6955, "output_length": 52}\n'
    )
    assert read_trace(path) == [
        Arrival(27_500_000, 6955, 52),
        Arrival(3_000_000_000, 7, 2, piece_ids=(1, 2)),
    ]


def test_prompts_begin_alike_as_far_as_their_pieces_have_the_same_names():
    one, two = (Arrival(0, 1300, 1, piece_ids=(5, 6, last)) for last in (7, 8))
    assert one.prompt_ids(1)[:1024] == two.prompt_ids(2)[:1024]
    assert one.prompt_ids(1)[1024:] != two.prompt_ids(2)[1024:]
    assert len(one.prompt_ids(1)) == 1300
    bare = Arrival(0, 1300, 1)
    assert bare.prompt_ids(1)[:128] != bare.prompt_ids(2)[:128]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[1]",
        '{"timestamp": 1, "input_length": 5}',
        '{"timestamp": 1, "input_length": 0, "output_length": 1}',
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 2"):
        read_trace(path)


def test_percentile_is_a_value_of_the_list():
    values = list(range(1, 101))
    assert [percentile(values, p) for p in (1, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert percentile([7.0], 50) == 7.0
    assert percentile([], 50) == 0.0


def test_summary_counts_from_submission_to_tokens():
    def stream(name, submitted, times, reason):
        found = Stream(make_spec(name), submitted * SECOND_NS, [t * SECOND_NS for t in times])
        found.reason = reason
        return found

    report = summarise(
        [
            stream("a", 0, [2, 3, 5], FinishReason.LENGTH),
            stream("b", 1, [2], FinishReason.LENGTH),
            stream("c", 1, [9], FinishReason.ABORTED),
        ]
    )
    assert report["reasons"] == {"aborted": 1, "length": 2}
    assert report["ttft_s"] == {"mean": 1.5, "p50": 1.0, "p90": 2.0, "p99": 2.0}
    assert report["tpot_s"]["mean"] == 1.5
    assert (report["seconds"], report["num_output_tokens"], report["output_tokens_per_s"]) == (5.0, 5, 1.0)


def test_a_simulation_of_the_default_config_adds_up():
    report = run_simulation(Config(), poisson(Chance(0, "arrivals"), 20, 2.0, 100, 10))
    assert report["reasons"] == {"length": 20}
    assert report["num_output_tokens"] == 200
    # One prefill token costs 1 ms, and a prompt has a hundred.
    assert report["ttft_s"]["p50"] >= 0.1
    assert report["num_steps"]["p0"] >= 1


def test_a_workload_that_never_ends_is_an_error():
    with pytest.raises(ConfigError, match="still open"):
        run_simulation(Config(), [Arrival(0, 100, 50)], limit_s=0.2)
