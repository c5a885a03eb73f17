"""What to send: prompts from plain text, ShareGPT files and Mooncake traces."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from millpond.core.chance import Chance
from millpond.core.errors import DataError

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens that one hash id of a Mooncake trace stands for. Source: the trace's own description."""


class InputFormat(StrEnum):
    """Layout of an input file."""

    PLAIN = "plain"
    """One prompt a line."""
    SHAREGPT = "sharegpt"
    """JSON list of conversations; the first human turn is the prompt, the reply sets the output length."""
    MOONCAKE = "mooncake"
    """JSON lines with timestamp (ms), input_length, output_length, hash_ids (512-token blocks)."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send."""

    prompt: str | tuple[int, ...]
    """Text is sent as a chat message, token ids to the completions route."""
    max_tokens: int
    arrival_ns: int | None = None
    """Since the start of the run; None: the arrival process decides."""


@dataclass(frozen=True, slots=True)
class TraceScale:
    """How a trace is shrunk to a smaller model or a shorter run."""

    length_ratio: float = 1.0
    """Factor on input, output and block lengths, > 0. Shared prefixes stay shared."""
    time_ratio: float = 1.0
    """Factor on arrival times, >= 0."""


def guess_format(path: Path) -> InputFormat:
    """Tell the format by the file's name: .jsonl is a trace, .json ShareGPT, anything else plain text."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".jsonl"):
        return InputFormat.MOONCAKE
    return InputFormat.SHAREGPT if name.endswith(".json") else InputFormat.PLAIN


def read_text(path: Path) -> str:
    """Text of a file, which may be gzipped.

    Raises:
        DataError: It cannot be read.
    """
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.name.endswith(".gz") else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}", code="bench.input") from error


def read_plain(text: str, max_tokens: int) -> list[LoadRequest]:
    """One request for each line that is not blank."""
    return [LoadRequest(line, max_tokens) for line in text.splitlines() if line.strip()]


def read_sharegpt(text: str, max_tokens: int, count_tokens: Callable[[str], int]) -> list[LoadRequest]:
    """One request for each conversation that begins with a human turn and its reply.

    Args:
        text: The file.
        max_tokens: Upper limit of the output length.
        count_tokens: Length of a reply in the served model's tokens.

    Raises:
        DataError: The file is no list of conversations.
    """
    conversations = _parse(text, "a JSON list of conversations")
    if not isinstance(conversations, list):
        raise DataError("not a JSON list of conversations", code="bench.input")
    requests: list[LoadRequest] = []
    for conversation in cast("list[dict[str, Any]]", conversations):
        turns = conversation.get("conversations") or conversation.get("conversation") or []
        texts = [str(turn.get("value", "")) for turn in turns[:2]]
        if len(texts) == 2 and turns[0].get("from") in {"human", "user"} and all(texts):
            requests.append(LoadRequest(texts[0], max(1, min(max_tokens, count_tokens(texts[1])))))
    return requests


def read_mooncake(text: str, scale: TraceScale, vocabulary: Sequence[int]) -> Iterator[LoadRequest]:
    """Requests of a Mooncake-style trace, in file order.

    Equal hash ids become equal tokens, whatever their size or sign, so prefixes are shared exactly as in the
    trace. The last block is cut to the input length.

    Args:
        text: The trace.
        scale: How to shrink it.
        vocabulary: Ordinary token ids of the served model to draw from, not empty.

    Raises:
        DataError: A line is not as described; the line is named.
    """
    block_tokens = max(1, round(MOONCAKE_BLOCK_TOKENS * scale.length_ratio))
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        record = _parse(line, f"JSON on line {number}")
        try:
            timestamp_ms, input_length, output_length = (
                float(record[key]) for key in ("timestamp", "input_length", "output_length")
            )
            hash_ids = [int(hash_id) for hash_id in record["hash_ids"]]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"line {number}: needs timestamp, input_length, output_length, hash_ids ({error})",
                code="bench.input",
            ) from error
        num_tokens = max(1, round(input_length * scale.length_ratio))
        yield LoadRequest(
            prompt=_trace_prompt(hash_ids, num_tokens, block_tokens, vocabulary, number),
            max_tokens=max(1, round(output_length * scale.length_ratio)),
            arrival_ns=round(timestamp_ms * 1e6 * scale.time_ratio),
        )


def _trace_prompt(
    hash_ids: list[int], num_tokens: int, block_tokens: int, vocabulary: Sequence[int], line: int
) -> tuple[int, ...]:
    tokens: list[int] = []
    for hash_id in hash_ids:
        tokens += _block_tokens(f"block/{hash_id}", min(block_tokens, num_tokens - len(tokens)), vocabulary)
        if len(tokens) == num_tokens:
            return tuple(tokens)
    # Rounding, or a trace whose last block has no id: the rest is this request's own.
    return tuple(tokens + _block_tokens(f"tail/{line}", num_tokens - len(tokens), vocabulary))


def _block_tokens(name: str, num_tokens: int, vocabulary: Sequence[int]) -> list[int]:
    stream = Chance(0, name)
    return [vocabulary[stream.below(len(vocabulary))] for _ in range(num_tokens)]


def _parse(text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"not {expected}: {error}", code="bench.input") from error
