"""V4.1's chat encoding over a tokenizer; tests/golden compares the text with the official one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.errors import ModelFormatError
from millpond.engine.chat_format import Conversation
from millpond.engine.model.chat_encoding import (
    ASSISTANT,
    BOS,
    CONTROL_TEXTS,
    EOS,
    REPLY_TEXTS,
    USER,
    V41ChatEncoding,
    render,
)
from millpond.engine.model.config import load_config
from millpond.engine.model.dsml import DSML
from millpond.engine.model.init_tokenizer import make_tokenizer
from millpond.engine.model.reply_parser import THINK_BEGIN, THINK_END
from millpond.engine.model_files import ModelFiles
from millpond.engine.tokenizer import Tokenizer
from millpond.engine.tokenizer_files import load_tokenizer
from millpond.engine.word_tokenizer import make_word_tokenizer

CONFIG = Path(__file__).parents[3] / "golden" / "data" / "tiny_a" / "config.json"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(load_config(CONFIG)).save(folder)
    return load_tokenizer(ModelFiles("hf", "tiny", (), folder), CONTROL_TEXTS)


def test_ids_are_those_of_the_text_that_is_written(tokenizer: Tokenizer) -> None:
    conversation = Conversation([{"role": "user", "content": "Grüße"}], reasoning_effort=30)
    ids = V41ChatEncoding(tokenizer).encode(conversation).ids
    assert tokenizer.decode(ids, keep_control=True) == render(conversation)
    assert ids[0] == tokenizer.control_ids[BOS]
    assert list(ids).count(tokenizer.control_ids[USER]) == 1
    assert ids[-1] == tokenizer.control_ids[THINK_BEGIN]


def test_effort_stands_in_the_prompt_and_only_when_thinking() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert "Reasoning Effort: 7 (range 1-100" in render(Conversation(messages, reasoning_effort=7))
    assert render(Conversation(messages)) == f"{BOS}{USER}hi{ASSISTANT}{THINK_END}"


def test_a_prompt_can_end_without_the_opening_of_a_turn() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    text = render(Conversation(messages, add_generation_prompt=False))
    assert text == f"{BOS}{USER}hi{ASSISTANT}{THINK_END}ho{EOS}"


def test_a_tokenizer_without_the_tokens_is_refused() -> None:
    with pytest.raises(ModelFormatError, match="lacks '<｜begin▁of▁sentence｜>'"):
        V41ChatEncoding(make_word_tokenizer(300))


hostile = st.lists(
    st.sampled_from([*CONTROL_TEXTS, *(text[:3] for text in CONTROL_TEXTS), "｜>", "x", "\n", '"', "\ufdd0"])
).map("".join)


@given(hostile, hostile, hostile, hostile)
def test_nothing_that_people_write_becomes_a_control_token(
    tokenizer: Tokenizer, text: str, reasoning: str, value: str, schema: str
) -> None:
    def conversation(text: str, reasoning: str, value: str, schema: str) -> Conversation:
        call: dict[str, Any] = {
            "id": "1",
            "function": {"name": "f", "arguments": {value + "k": value, "n": [value]}},
        }
        return Conversation(
            messages=[
                {"role": "system", "content": text + "s"},
                {"role": "user", "content": text},
                {"role": "assistant", "content": text, "reasoning_content": reasoning, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": text},
            ],
            tools=[
                {
                    "type": "function",
                    "function": {"name": "f", "description": schema, "parameters": {schema: {}}},
                }
            ],
            reasoning_effort=50,
            response_schema={"title": schema},
        )

    def control(conversation: Conversation) -> list[int]:
        ids = V41ChatEncoding(tokenizer).encode(conversation).ids
        return [token_id for token_id in ids if token_id in tokenizer.control_ids.values()]

    hostile_one = conversation(text, reasoning, value, schema)
    assert control(hostile_one) == control(conversation("", "", "", ""))
    ids = V41ChatEncoding(tokenizer).encode(hostile_one).ids
    assert tokenizer.decode(ids, keep_control=True) == render(hostile_one)


def test_tokens_that_the_file_calls_ordinary_are_control_tokens_all_the_same(tmp_path: Path) -> None:
    made = make_tokenizer(load_config(CONFIG))
    made.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"special": true', '"special": false'))
    files = ModelFiles("hf", "tiny", (), tmp_path)
    assert USER not in load_tokenizer(files).control_ids
    tokenizer = load_tokenizer(files, CONTROL_TEXTS)
    assert tokenizer.control_ids[USER] not in list(tokenizer.encode(USER))


def test_replies_show_the_tokens_that_their_parser_needs(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.control_ids[text] for text in (USER, THINK_END, DSML, EOS)]
    plain, chat = tokenizer.make_detokenizer(), tokenizer.detokenizer_with(REPLY_TEXTS)()
    assert "".join(map(plain.push, ids)) == ""
    assert "".join(map(chat.push, ids)) == THINK_END + DSML
