"""A byte-level tokenizer of any vocabulary size for random checkpoints, with the special tokens of V4.1."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from millpond.core.errors import ModelFormatError
from millpond.engine.model.chat_encoding import BOS, CONTROL_TEXTS, EOS
from millpond.engine.model.config import V41Config

_PAD = "<｜▁pad▁｜>"
_MARKS = tuple(text for text in CONTROL_TEXTS if text not in (BOS, EOS))
_IMAGE, _NOISE = "<｜deepseek_image｜>", "<｜dspark_noise｜>"
_NUM_BYTES = 256


@dataclass(frozen=True, slots=True)
class MadeTokenizer:
    """A tokenizer and the settings file beside it."""

    core: Tokenizer

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`."""
        self.core.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": _PAD,
        }
        text = json.dumps(settings, indent=1, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def make_tokenizer(config: V41Config) -> MadeTokenizer:
    """256 bytes, the special tokens at the config's ids, and filler words up to the vocabulary's size.

    Raises:
        ModelFormatError: The vocabulary is too small, or two special tokens share an id.
    """
    size = config.shape.vocab_size
    fixed = {BOS: config.bos_token_id, EOS: config.eos_token_id, _PAD: config.pad_token_id}
    if config.image_token_id is not None:
        fixed[_IMAGE] = config.image_token_id
    if config.shape.num_draft_stages:
        fixed[_NOISE] = config.draft_noise_token_id
    if len(set(fixed.values())) != len(fixed):
        raise ModelFormatError("two special tokens share an id", code="model.config", param="bos_token_id")
    free = (token_id for token_id in range(size) if token_id not in fixed.values())
    if size < len(fixed) + len(_MARKS) + _NUM_BYTES:
        raise ModelFormatError(
            f"vocab_size is {size}, too small for all bytes", code="model.config", param="vocab_size"
        )
    vocab = dict(fixed)
    for piece in (*_MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())):
        vocab[piece] = next(free)
    for number, token_id in enumerate(free):
        # the blank in front and the upper case vary, so that compressing the ids has something to do
        word = f"w{number // 3}"
        vocab[(word, "Ġ" + word, "Ġ" + word.upper())[number % 3]] = token_id
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (*fixed, *_MARKS)])
    return MadeTokenizer(core)
