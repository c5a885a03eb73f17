"""Reading prompts and traces."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.chance import Chance
from millpond.core.errors import DataError
from millpond.serve.loadgen.arrivals import Arrivals, arrival_times
from millpond.serve.loadgen.inputs import (
    InputFormat,
    TraceScale,
    guess_format,
    read_mooncake,
    read_plain,
    read_sharegpt,
    read_text,
)

VOCABULARY = list(range(100, 400))


def trace(*records: tuple[float, int, int, list[int]]) -> str:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    return "\n".join(json.dumps(dict(zip(keys, record, strict=True))) for record in records)


def shared_prefix(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def test_formats_are_told_by_name():
    assert guess_format(Path("a.jsonl.gz")) is InputFormat.MOONCAKE
    assert guess_format(Path("a.json")) is InputFormat.SHAREGPT
    assert guess_format(Path("a.txt")) is InputFormat.PLAIN


def test_plain_prompts_skip_blank_lines():
    assert [request.prompt for request in read_plain("one\n\n  \ntwo\n", 5)] == ["one", "two"]


def test_sharegpt_takes_first_turn_and_the_length_of_its_reply():
    text = json.dumps(
        [
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "a b c"}]},
            {"conversations": [{"from": "gpt", "value": "no human"}, {"from": "human", "value": "x"}]},
            {"conversations": [{"from": "human", "value": "only one turn"}]},
            {"conversations": [{"from": "user", "value": "long"}, {"from": "gpt", "value": "w " * 100}]},
        ]
    )
    requests = read_sharegpt(text, 64, lambda reply: len(reply.split()))
    assert [(request.prompt, request.max_tokens) for request in requests] == [("Hi", 3), ("long", 64)]


def test_equal_hash_ids_are_equal_blocks_of_512_tokens():
    text = trace((0, 1200, 7, [1, 2, 3]), (1500, 1100, 9, [1, 2, 4]))
    first, second = read_mooncake(text, TraceScale(), VOCABULARY)
    assert (len(first.prompt), first.max_tokens, first.arrival_ns) == (1200, 7, 0)
    assert (len(second.prompt), second.max_tokens, second.arrival_ns) == (1100, 9, 1_500_000_000)
    assert shared_prefix(first.prompt, second.prompt) == 1024
    assert set(first.prompt) <= set(VOCABULARY)


def test_scaling_keeps_shared_prefixes_shared():
    text = trace((0, 1200, 8, [1, 2, 3]), (1000, 1100, 8, [1, 2, 4]))
    first, second = read_mooncake(text, TraceScale(length_ratio=0.125, time_ratio=0.5), VOCABULARY)
    assert (len(first.prompt), first.max_tokens) == (150, 1)
    assert second.arrival_ns == 500_000_000
    assert shared_prefix(first.prompt, second.prompt) == 128


def test_bug_62_hash_ids_beyond_32_bits_and_negative_ones_stay_distinct():
    ids = [5, 5 + (1 << 32), 5 + (1 << 64), -5, -5 + (1 << 32), -1]
    requests = read_mooncake(trace(*((0, 512, 1, [hash_id]) for hash_id in ids)), TraceScale(), VOCABULARY)
    assert len({request.prompt for request in requests}) == len(ids)


@given(st.lists(st.tuples(st.integers(1, 3000), st.lists(st.integers(), max_size=6)), min_size=1, max_size=5))
def test_prompts_have_the_length_of_the_trace(shapes: list[tuple[int, list[int]]]):
    text = trace(*((0, length, 1, ids) for length, ids in shapes))
    requests = read_mooncake(text, TraceScale(), VOCABULARY)
    assert [len(request.prompt) for request in requests] == [length for length, _ in shapes]


@pytest.mark.parametrize("line", ["{}", "nonsense", '{"timestamp": 0}', "[]", "3"])
def test_a_bad_line_is_named(line: str):
    with pytest.raises(DataError, match="line 2"):
        list(read_mooncake(trace((0, 1, 1, [])) + "\n" + line, TraceScale(), VOCABULARY))


def test_gzipped_files_are_read(tmp_path: Path):
    path = tmp_path / "prompts.txt.gz"
    path.write_bytes(gzip.compress(b"hello"))
    assert read_text(path) == "hello"
    path.write_bytes(b"not gzip")
    with pytest.raises(DataError, match="cannot read"):
        read_text(path)


def test_poisson_arrivals_have_the_asked_mean_and_spread():
    times_ns = arrival_times(Arrivals.POISSON, 100.0, 20_001, Chance(1, "test"))
    gaps_s = [(after - before) / 1e9 for before, after in pairwise(times_ns)]
    mean = sum(gaps_s) / len(gaps_s)
    variance = sum((gap - mean) ** 2 for gap in gaps_s) / len(gaps_s)
    assert mean == pytest.approx(0.01, rel=0.05)
    assert variance == pytest.approx(0.0001, rel=0.1)


def test_fixed_arrivals_are_even():
    assert arrival_times(Arrivals.FIXED, 4.0, 3, Chance(1, "test")) == [0, 250_000_000, 500_000_000]
