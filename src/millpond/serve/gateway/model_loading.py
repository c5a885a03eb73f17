"""Makes the `ServedModel` that the config names. No weights are read, and no torch."""

from __future__ import annotations

from millpond.config.sections import Config
from millpond.config.synthetic_params import SYNTHETIC
from millpond.engine.chat_template import ChatTemplate
from millpond.engine.model_files import locate_model
from millpond.engine.tokenizer import Tokenizer
from millpond.engine.tokenizer_files import load_tokenizer
from millpond.engine.word_tokenizer import make_word_tokenizer
from millpond.serve.gateway.served_model import ServedModel


def load_served_model(config: Config) -> ServedModel:
    """Load tokenizer and chat template of the configured model.

    Raises:
        UnknownModel: There is no such model.
        ModelFormatError: Its files cannot be used.
    """
    if config.engine.model == SYNTHETIC:
        name, tokenizer = SYNTHETIC, make_word_tokenizer(config.synthetic.vocab_size)
    else:
        files = locate_model(config.engine.model)
        name, tokenizer = files.name, load_tokenizer(files)
    return make_served_model(config.gateway.served_names or (name,), tokenizer)


def make_served_model(names: tuple[str, ...], tokenizer: Tokenizer) -> ServedModel:
    """Wrap a tokenizer and the chat template it carries."""
    template = ChatTemplate(tokenizer)
    return ServedModel(
        names=names,
        vocab_size=tokenizer.vocab_size,
        stop_token_ids=tokenizer.stop_ids,
        supports_tools=template.supports_tools,
        encode_text=tokenizer.encode,
        encode_chat=template.encode,
        decode=tokenizer.decode,
        token_bytes=tokenizer.token_bytes,
        max_token_bytes=max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)),
        make_detokenizer=tokenizer.make_detokenizer,
    )
