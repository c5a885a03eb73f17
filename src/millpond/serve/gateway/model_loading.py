"""Makes the `ServedModel` that the config names. No weights are read, and no torch."""

from __future__ import annotations

from millpond.config.sections import Config
from millpond.config.synthetic_params import SYNTHETIC
from millpond.engine.chat_format import ChatPrompt, Conversation
from millpond.engine.chat_template import ChatTemplate
from millpond.engine.model.chat_encoding import CONTROL_TEXTS, REPLY_TEXTS, TEXT_JOINER, V41ChatEncoding
from millpond.engine.model.config import is_v41
from millpond.engine.model_files import ModelFiles, locate_model
from millpond.engine.tokenizer import Tokenizer
from millpond.engine.tokenizer_files import load_tokenizer
from millpond.engine.word_tokenizer import make_word_tokenizer
from millpond.serve.gateway.served_model import ServedModel


def load_served_model(config: Config) -> ServedModel:
    """Load tokenizer and chat encoding of the configured model.

    Raises:
        UnknownModel: There is no such model.
        ModelFormatError: Its files cannot be used.
    """
    names = config.gateway.served_names
    if config.engine.model == SYNTHETIC:
        return make_served_model(names or (SYNTHETIC,), make_word_tokenizer(config.synthetic.vocab_size))
    files = locate_model(config.engine.model)
    return make_model_of_files(names or (files.name,), files)


def make_model_of_files(names: tuple[str, ...], files: ModelFiles) -> ServedModel:
    """Wrap the tokenizer of a model: with V4.1's chat encoding if it is one, else with its own template."""
    if is_v41(files):
        return make_v41_model(names, load_tokenizer(files, CONTROL_TEXTS))
    return make_served_model(names, load_tokenizer(files))


def make_served_model(names: tuple[str, ...], tokenizer: Tokenizer) -> ServedModel:
    """Wrap a tokenizer and the chat template it carries."""
    template = ChatTemplate(tokenizer)

    def encode_chat(conversation: Conversation) -> ChatPrompt:
        messages, tools = conversation.messages, conversation.tools
        return ChatPrompt(template.encode(messages, tools, conversation.add_generation_prompt))

    return ServedModel(
        names=names,
        vocab_size=tokenizer.vocab_size,
        stop_token_ids=tokenizer.stop_ids,
        supports_tools=template.supports_tools,
        can_think=False,
        text_joiner="",
        encode_text=tokenizer.encode,
        encode_chat=encode_chat,
        decode=tokenizer.decode,
        token_bytes=tokenizer.token_bytes,
        max_token_bytes=_max_token_bytes(tokenizer),
        make_detokenizer=tokenizer.make_detokenizer,
        make_chat_detokenizer=tokenizer.make_detokenizer,
    )


def make_v41_model(names: tuple[str, ...], tokenizer: Tokenizer) -> ServedModel:
    """Wrap a tokenizer that has the tokens of V4.1's chat encoding.

    Raises:
        ModelFormatError: It lacks one of them.
    """
    return ServedModel(
        names=names,
        vocab_size=tokenizer.vocab_size,
        stop_token_ids=tokenizer.stop_ids,
        supports_tools=True,
        can_think=True,
        text_joiner=TEXT_JOINER,
        encode_text=tokenizer.encode,
        encode_chat=V41ChatEncoding(tokenizer).encode,
        decode=tokenizer.decode,
        token_bytes=tokenizer.token_bytes,
        max_token_bytes=_max_token_bytes(tokenizer),
        make_detokenizer=tokenizer.make_detokenizer,
        make_chat_detokenizer=tokenizer.detokenizer_with(REPLY_TEXTS),
    )


def _max_token_bytes(tokenizer: Tokenizer) -> int:
    return max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
