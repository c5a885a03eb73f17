"""Vocabulary of the synthetic model: bytes, three control tokens, and words that spell their own id."""

from __future__ import annotations

from millpond.engine.tokenizer import Tokenizer

BEGIN_ID = 256
END_ID = 257
TURN_ID = 258
FIRST_WORD = 259
"""Ids from here on are words: id 0x2f1 reads " 2f1". Text never encodes to them, only the model says them."""

_CONTROL_IDS = {"<|begin|>": BEGIN_ID, "<|end|>": END_ID, "<|turn|>": TURN_ID}
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def make_word_tokenizer(vocab_size: int) -> Tokenizer:
    """Make the tokenizer of a synthetic model.

    Args:
        vocab_size: Token ids of the model, > `FIRST_WORD`.
    """
    return Tokenizer(
        encode_plain=lambda text: list(text.encode()),
        token_bytes=[
            *(bytes([byte]) for byte in range(256)),
            *(text.encode() for text in _CONTROL_IDS),
            *(b" %x" % token_id for token_id in range(FIRST_WORD, vocab_size)),
        ],
        control_ids=_CONTROL_IDS,
        stop_ids=(END_ID,),
        chat_template=_CHAT_TEMPLATE,
        named_tokens={"bos_token": "<|begin|>", "eos_token": "<|end|>"},
    )
