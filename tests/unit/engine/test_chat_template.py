"""Chat templates: rendered as the model expects, and never a way to smuggle control tokens in."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.errors import InvalidRequest, ModelFormatError
from millpond.engine.chat_template import FALLBACK_TEMPLATE, ChatTemplate
from millpond.engine.model_files import locate_model
from millpond.engine.tokenizer import Tokenizer
from millpond.engine.tokenizer_files import load_tokenizer
from millpond.engine.word_tokenizer import make_word_tokenizer

CONTROL = {"<|a|>": 256, "<|a|><|b": 257, "<|b|>": 258, "|>": 259, "</s>": 260}
USER = {"role": "user", "content": "hi"}


def make(template: str | None, **named: str) -> ChatTemplate:
    tokenizer = Tokenizer(
        encode_plain=lambda text: list(text.encode()),
        token_bytes=[*(bytes([byte]) for byte in range(256)), *(text.encode() for text in CONTROL)],
        control_ids=CONTROL,
        chat_template=template,
        named_tokens=named,
    )
    return ChatTemplate(tokenizer, now=lambda: datetime(2026, 3, 4, tzinfo=UTC))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(locate_model("smollm2-135m"))


@pytest.fixture(scope="module")
def smollm(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer)


# --- rendering ------------------------------------------------------------------------------------


def test_built_in_model_is_rendered_as_it_was_trained(smollm: ChatTemplate) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Yes?"}]
    assert smollm.render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm.render([USER], add_generation_prompt=False).endswith("<|im_start|>user\nhi<|im_end|>\n")
    assert smollm.render([USER]).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    ids = smollm.encode(messages)
    assert (ids.count(1), ids.count(2)) == (4, 3)


def test_model_without_template_gets_a_plain_one() -> None:
    assert make(None).render([USER]) == "user: hi\nassistant:"
    assert "tools" not in FALLBACK_TEMPLATE


def test_block_lines_leave_no_trace() -> None:
    lines = [
        "{% for m in messages %}",
        "  {% if m.role == 'user' %}",
        "{{ m.content }}",
        "  {% endif %}",
        "{% endfor %}",
    ]
    assert make("\n".join(lines)).render([USER]) == "hi\n"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<|a|>"),
        ("{{ strftime_now('%d %B %Y') }}", "04 March 2026"),
        ("{{ {'b': 'é<', 'a': 1} | tojson }}", '{"b": "é<", "a": 1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{{ tools is none }}", "True"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
    ],
)
def test_what_templates_may_use(template: str, text: str) -> None:
    assert make(template, bos_token="<|a|>").render([USER]) == text


def test_tools_are_rendered_and_their_support_is_known() -> None:
    template = make("{% if tools %}{{ tools[0].function.name }}{% endif %}")
    assert template.supports_tools
    assert template.render([USER], [{"type": "function", "function": {"name": "look"}}]) == "look"
    assert not make("{# tools #}{% set tools = 1 %}{{ tools }}").supports_tools
    assert not make(None).supports_tools


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ undefined_function() }}",
    ],
)
def test_refusal_of_the_template_is_the_clients_error(template: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render") as caught:
        make(template).encode([USER])
    assert caught.value.param == "messages"


def test_content_that_is_no_text_is_the_clients_error(smollm: ChatTemplate) -> None:
    with pytest.raises(InvalidRequest):
        smollm.encode([{"role": "user", "content": None}])


@pytest.mark.parametrize("template", ["{% if %}", "{{ x | no_such_filter }}", "{% unknown %}"])
def test_broken_template_is_the_models_error(template: str) -> None:
    with pytest.raises(ModelFormatError, match="chat template"):
        make(template)


# --- what clients write stays text ----------------------------------------------------------------

PIECES = [
    "<|a|>",
    "<|a|><|b|>",
    "<|b|>",
    "|>",
    "</s>",
    "<",
    "|",
    "a",
    "b",
    ">",
    "/s>",
    "s>",
    "x",
    " ",
    "\ufdd0",
]
WRITTEN = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
PLAIN_TEMPLATE = "{% for m in messages %}<|a|>{{ m.role }}:{{ m.content }}{{ m.name }}<|b|>{% endfor %}"


def is_control(token_id: int) -> bool:
    return token_id >= 256


@given(content=WRITTEN, name=WRITTEN, role=st.one_of(st.just("user"), WRITTEN))
def test_clients_strings_never_become_control_tokens(content: str, name: str, role: str) -> None:
    template = make(PLAIN_TEMPLATE)
    messages = [{"role": role, "content": content, "name": name}] * 2
    ids = list(template.encode(messages))
    assert list(filter(is_control, ids)) == [256, 258] * 2
    text = f"{role}:{content}{name}".encode()
    assert ids == [256, *text, 258] * 2


@pytest.mark.parametrize(
    ("template", "content"),
    [("<{{ messages[0].content }}", "/s>"), ("{{ messages[0].content }}/s>", "<")],
    ids=["template begins it", "template ends it"],
)
def test_clients_strings_do_not_complete_what_the_template_wrote(template: str, content: str) -> None:
    assert list(make(template).encode([{"role": "user", "content": content}])) == list(b"</s>")


@given(WRITTEN, WRITTEN)
def test_clients_tools_never_become_control_tokens(key: str, value: str) -> None:
    template = make("{% for t in tools %}<|a|>{{ t | tojson }}<|b|>{% endfor %}")
    tools: list[dict[str, Any]] = [{"function": {"x" + key: [value, {"y": value}]}, "strict": True}]
    ids = list(template.encode([USER], tools))
    assert list(filter(is_control, ids)) == [256, 258]
    written = bytes(ids[1:-1]).decode()
    assert written == make("{{ tools[0] | tojson }}").render([USER], tools)


@given(content=WRITTEN.filter(lambda text: text.strip()))
def test_templates_see_strings_that_behave_as_before(content: str) -> None:
    template = make("{{ messages[0].content | trim }}|{{ messages[0].content.split('x') | length }}")
    message = {"role": "user", "content": f"  {content}\n"}
    assert bytes(list(template.encode([message]))).decode() == f"{content.strip()}|{content.count('x') + 1}"


@pytest.mark.parametrize("text", ["", "plain text", "a < b > c", "tab\there", "ab|", "e\u0301 👩‍👩‍👧"])
def test_ids_equal_the_trusted_encoding_when_nothing_is_smuggled(
    tokenizer: Tokenizer, smollm: ChatTemplate, text: str
) -> None:
    messages = [{"role": "user", "content": text}]
    assert smollm.encode(messages) == tokenizer.encode_trusted(smollm.render(messages))


def test_known_roles_may_form_control_tokens() -> None:
    template = make("{% for m in messages %}<{{ '/s' if m.role == 'user' else m.role }}>{% endfor %}")
    assert list(template.encode([USER])) == [260]


def test_every_noncharacter_in_use_is_refused() -> None:
    every = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    assert list(make(FALLBACK_TEMPLATE).encode([{"role": "user", "content": every[1:]}]))
    with pytest.raises(InvalidRequest, match="noncharacters"):
        make(FALLBACK_TEMPLATE).encode([{"role": "user", "content": every}])


def test_half_a_surrogate_pair_is_the_clients_error(smollm: ChatTemplate) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        smollm.encode([{"role": "user", "content": "\ud83d"}])


def test_synthetic_model_can_chat() -> None:
    template = ChatTemplate(make_word_tokenizer(300))
    assert template.render([USER]) == "<|turn|>user\nhi<|end|>\n<|turn|>assistant\n"
    assert [i for i in template.encode([USER]) if i >= 256] == [258, 257, 258]
