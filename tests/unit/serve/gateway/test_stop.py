"""Stop strings: the text never shows any part of one, however it is split."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.serve.gateway.stop import StopMatcher

LETTERS = st.text(alphabet="ab👩\u200d", max_size=24)
STOPS = st.lists(st.text(alphabet="ab👩\u200d", min_size=1, max_size=5), max_size=4).map(tuple)


def run(stop: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stop)
    emitted = ""
    for piece in pieces:
        text, is_stopped = matcher.push(piece)
        emitted += text
        if is_stopped:
            return emitted, True
    return emitted + matcher.flush(), False


def cut_ref(stop: tuple[str, ...], text: str) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        found = [word for word in stop if text[:end].endswith(word)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(text=LETTERS, stop=STOPS, cuts=st.lists(st.integers(0, 24), max_size=6))
def test_bug_01_result_is_the_same_for_every_split(text: str, stop: tuple[str, ...], cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(borders)]
    assert run(stop, pieces) == cut_ref(stop, text)
    assert run(stop, list(text)) == cut_ref(stop, text)
    assert run(stop, [text]) == cut_ref(stop, text)


@given(text=LETTERS, stop=STOPS)
def test_bug_01_nothing_is_held_longer_than_needed(text: str, stop: tuple[str, ...]) -> None:
    matcher = StopMatcher(stop)
    emitted = ""
    for index, letter in enumerate(text):
        new, is_stopped = matcher.push(letter)
        emitted += new
        if is_stopped:
            return
        held = text[len(emitted) : index + 1]
        assert held == "" or any(word.startswith(held) for word in stop)


def test_bug_01_partial_stop_string_is_never_emitted() -> None:
    matcher = StopMatcher(("</end>",))
    assert [matcher.push(piece) for piece in ("hi <", "/", "en", "d", ">x")] == [
        ("hi ", False),
        ("", False),
        ("", False),
        ("", False),
        ("", True),
    ]


def test_false_start_is_emitted_later() -> None:
    matcher = StopMatcher(("abac",))
    assert [matcher.push(letter)[0] for letter in "ababd"] == ["", "", "", "ab", "abd"]
    assert matcher.flush() == ""


def test_held_text_comes_out_at_the_end() -> None:
    matcher = StopMatcher(("STOP",))
    assert matcher.push("ST") == ("", False)
    assert matcher.flush() == "ST"
    assert matcher.flush() == ""


def test_no_stop_strings_hold_nothing() -> None:
    matcher = StopMatcher(())
    assert matcher.push("text") == ("text", False)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        StopMatcher(("a", ""))
