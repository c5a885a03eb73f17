"""Replies of V4.1: reasoning, content and calls, whatever the model writes and however it is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.engine.chat_format import Reasoning, ReplyCall
from millpond.engine.model.dsml import (
    CALLS_BEGIN,
    CALLS_END,
    DSML,
    INVOKE_BEGIN,
    INVOKE_END,
    MAX_HEADER_CHARS,
    PARAMETER_BEGIN,
    PARAMETER_END,
    render_calls,
)
from millpond.engine.model.reply_parser import THINK_BEGIN, THINK_END, V41ReplyParser


def parse(pieces: list[str], **options: bool) -> list[tuple[str, ...]]:
    """Parts of a reply: ("reasoning", text), ("content", text) or ("call", name, *fragments)."""
    parser = V41ReplyParser(**{"is_reasoning": True, "reads_calls": True} | options)
    parts: list[tuple[str, ...]] = []
    for part in [*(part for piece in pieces for part in parser.push(piece)), *parser.flush()]:
        if isinstance(part, ReplyCall):
            parts.append(("call", part.name, *part.fragments))
            continue
        kind = "reasoning" if isinstance(part, Reasoning) else "content"
        text = part.text if isinstance(part, Reasoning) else part
        assert text
        if parts and parts[-1][0] == kind:
            parts[-1] = (kind, parts[-1][1] + text)
        else:
            parts.append((kind, text))
    return parts


def parameter(name: str, value: str, is_string: str = "true") -> str:
    return f'{PARAMETER_BEGIN} name="{name}" string="{is_string}">{value}{PARAMETER_END}'


def invoke(name: str, *parameters: str) -> str:
    return "\n".join((f'{INVOKE_BEGIN} name="{name}">', *parameters, INVOKE_END))


def block(*invokes: str) -> str:
    return "\n\n" + "\n".join((CALLS_BEGIN, *invokes, CALLS_END))


GOOD = invoke("f", parameter("s", 'a"b\nc'), parameter("n", " 12 ", "false"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("think</think>answer", [("reasoning", "think"), ("content", "answer")]),
        ("\nthink\n\n</think>\n\nanswer\n", [("reasoning", "think"), ("content", "answer\n")]),
        (" think </think> answer ", [("reasoning", " think "), ("content", " answer ")]),
        ("</think>answer</think>", [("content", "answer</think>")]),
        ("only thoughts\n", [("reasoning", "only thoughts\n")]),
        ("a <think> b</think>c", [("reasoning", "a <think> b"), ("content", "c")]),
        ("a </thin", [("reasoning", "a </thin")]),
        ("t</think>a < b\n\n<", [("reasoning", "t"), ("content", "a < b\n\n<")]),
        (
            "t</think>a" + block(GOOD),
            [("reasoning", "t"), ("content", "a"), ("call", "f", '{"s": "a\\"b\\nc"', ', "n": 12', "}")],
        ),
        ("t" + block(invoke("g")), [("reasoning", "t"), ("call", "g", "{}")]),
        ("</think>" + block(invoke("g" * 64)), [("call", "g" * 64, "{}")]),
        (
            "t</think>" + block(invoke("g"), invoke("h")),
            [("reasoning", "t"), ("call", "g", "{}"), ("call", "h", "{}")],
        ),
        ("</think>" + block(invoke("g")) + "\nand", [("call", "g", "{}"), ("content", "and")]),
        ("</think>" + block(invoke("g")) + block(invoke("h")), [("call", "g", "{}"), ("call", "h", "{}")]),
    ],
)
def test_parts_of_a_reply(text: str, parts: list[tuple[str, ...]]) -> None:
    assert parse([text]) == parts
    assert parse(list(text)) == parts


MARKUP_IN_VALUES = [
    f"x{THINK_END}y", CALLS_BEGIN, CALLS_END, INVOKE_END, INVOKE_BEGIN + ' name="evil">', f"</{DSML} para",
    "<｜User｜>", '"}, {"', "\\", "\n\n", "",
]  # fmt: skip


@pytest.mark.parametrize("value", MARKUP_IN_VALUES)
def test_markup_inside_a_parameter_is_its_value(value: str) -> None:
    text = "t</think>" + block(invoke("f", parameter("s", value)))
    for pieces in ([text], list(text)):
        (_, (_, name, *fragments)) = parse(pieces)
        assert name == "f"
        assert json.loads("".join(fragments)) == {"s": value}


BROKEN = {
    "bad JSON": block(invoke("f", parameter("n", "{oops", "false"))),
    "not JSON": block(invoke("f", parameter("n", "NaN", "false"))),
    "too deep": block(invoke("f", parameter("n", "[" * 100_000, "false"))),
    "twice": block(invoke("f", parameter("n", "1"), parameter("n", "2"))),
    "no name": f"\n\n{CALLS_BEGIN}\n{INVOKE_BEGIN}>\n{INVOKE_END}\n{CALLS_END}",
    "empty name": f'\n\n{CALLS_BEGIN}\n{INVOKE_BEGIN} name="">\n{INVOKE_END}\n{CALLS_END}',
    "endless name": block(invoke("f" * (MAX_HEADER_CHARS + 1))),
    "no kind": f'\n\n{CALLS_BEGIN}\n{INVOKE_BEGIN} name="f">\n{PARAMETER_BEGIN} name="n">1{PARAMETER_END}',
    "prose": f"\n\n{CALLS_BEGIN} are what I would write, and {CALLS_END} ends them",
    "prose inside": block(invoke("f", "hello")),
    "empty": f"\n\n{CALLS_BEGIN}\n{CALLS_END}",
    "older tags": f"\n\n<{DSML}calls>\n<{DSML}invoke name=\"f\">\n</{DSML}invoke>\n</{DSML}calls>",
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_call_stays_text(name: str) -> None:
    text = BROKEN[name]
    for pieces in ([text], list(text[:5000])):
        assert parse(["t</think>a", *pieces, " b"]) == [
            ("reasoning", "t"),
            ("content", "a" + "".join(pieces) + " b"),
        ]
        assert parse(["t", *pieces, "\n"]) == [("reasoning", "t" + "".join(pieces) + "\n")]


def test_calls_before_a_broken_one_are_calls() -> None:
    text = block(invoke("f"), invoke("g", parameter("n", "?", "false")), invoke("h"))
    for pieces in ([text], list(text)):
        call, (kind, rest) = parse(["</think>", *pieces])
        assert call == ("call", "f", "{}")
        assert kind == "content"
        assert rest == text[text.index(INVOKE_END) + len(INVOKE_END) :]


@pytest.mark.parametrize("end", range(1, len(block(GOOD))))
def test_a_reply_cut_inside_a_call_has_no_call_and_loses_nothing(end: int) -> None:
    text = block(GOOD)[:end]
    if INVOKE_END in text:
        assert [part[0] for part in parse(["</think>a", text])] == ["content", "call"]
    else:
        assert parse(["</think>a", text]) == [("content", "a" + text)]


def test_a_second_call_that_is_cut_off_stays_text() -> None:
    text = block(invoke("f"), GOOD)
    begin = text.index(INVOKE_END) + len(INVOKE_END)
    for end in range(begin, text.rindex(INVOKE_END) + len(INVOKE_END)):
        cut = text[begin:end]
        is_markup = CALLS_END.startswith(cut.strip())  # the end of the block, as far as anybody can tell
        rest = [] if is_markup else [("content", cut)]
        assert parse(["</think>", text[:end]]) == [("call", "f", "{}"), *rest]


def test_without_tools_nothing_is_a_call() -> None:
    text = "a" + block(GOOD)
    assert parse([text], is_reasoning=False, reads_calls=False) == [("content", text)]


def test_a_reply_may_begin_inside_a_block() -> None:
    options = {"is_reasoning": False, "is_in_calls": True}
    assert parse([invoke("g") + f"\n{CALLS_END}"], **options) == [("call", "g", "{}")]
    assert parse(["I will not"], **options) == [("content", "I will not")]
    cut = GOOD[: len(GOOD) // 2]
    assert parse([cut], **options) == [("content", cut)]


def test_only_what_may_become_a_marker_is_held_back() -> None:
    parser = V41ReplyParser(is_reasoning=True, reads_calls=True)
    assert parser.push("think <") == [Reasoning("think ")]
    assert parser.push("/") == []
    assert parser.push("b") == [Reasoning("</b")]
    assert parser.push("\n\n</think") == []
    assert parser.push("ing") == [Reasoning("\n\n</thinking")]
    assert parser.push("</think>a") == ["a"]
    assert parser.push("</think") == ["</think"]
    assert parser.push(f"{CALLS_BEGIN}\n <") == []
    assert parser.push("b") == [f"{CALLS_BEGIN}\n <b"]
    parser = V41ReplyParser(is_reasoning=False, reads_calls=False)
    assert parser.push("a\n<") == ["a\n<"]


def test_reasoning_ends_with_its_marker() -> None:
    parser = V41ReplyParser(is_reasoning=True, reads_calls=False)
    parser.push("a</think")
    assert parser.is_reasoning
    parser.push(">")
    assert not parser.is_reasoning


texts = st.lists(
    st.sampled_from([
        "a", "\n", " ", "<", "｜", THINK_BEGIN, THINK_END, CALLS_BEGIN, CALLS_END, INVOKE_BEGIN, INVOKE_END,
        PARAMETER_BEGIN, PARAMETER_END, ' name="f">', ' name="p" string="true">', ' name="q" string="false">',
        "1", DSML, "</", '"', block(GOOD), GOOD, invoke("g"),
        block(invoke("g"), invoke("f", parameter("s", CALLS_END))),
    ]),
    max_size=14,
).map("".join)  # fmt: skip
flags = st.fixed_dictionaries(
    {name: st.booleans() for name in ("is_reasoning", "reads_calls", "is_in_calls")}
)


@settings(max_examples=400)
@given(texts, flags, st.lists(st.integers(0, 400), max_size=6))
def test_parts_do_not_depend_on_how_a_reply_is_cut(
    text: str, options: dict[str, bool], cuts: list[int]
) -> None:
    whole = parse([text], **options)
    assert parse(list(text), **options) == whole
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(borders)]
    assert parse(pieces, **options) == whole
    for kind, *rest in whole:
        if kind == "call":
            assert isinstance(json.loads("".join(rest[1:])), dict)


@given(texts, st.booleans())
def test_text_is_never_lost(text: str, is_reasoning: bool) -> None:
    """What is not in the parts are markers and the line breaks next to them."""
    parts = parse([text], is_reasoning=is_reasoning, reads_calls=True)
    joined = "".join(part[1] for part in parts if part[0] != "call")
    if all(part[0] != "call" for part in parts):
        wanted = text.replace(THINK_END, "", 1) if is_reasoning else text
        assert joined.replace("\n", "") == wanted.replace("\n", "")
    else:
        assert len(joined) < len(text)


arguments = st.dictionaries(
    st.text(st.characters(exclude_characters='"\n', exclude_categories=["Cs"]), min_size=1, max_size=20),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ),
    max_size=4,
)  # fmt: skip


@given(
    st.lists(
        st.tuples(st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True), arguments), min_size=1, max_size=3
    )
)
def test_calls_that_are_written_are_read_back(calls: list[tuple[str, dict[str, Any]]]) -> None:
    text = "why</think>so\n\n" + render_calls(calls)
    reasoning, content, *parts = parse([text])
    assert (reasoning, content) == (("reasoning", "why"), ("content", "so"))
    assert [(name, json.loads("".join(fragments))) for _, name, *fragments in parts] == calls
