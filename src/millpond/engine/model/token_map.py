"""Compressed token ids (Engram) of a tokenizer file."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from millpond.core.errors import ModelFormatError
from millpond.engine.model.config import V41Config
from millpond.engine.model.engram_ids import Ids, compress_vocabulary


def token_map_of(path: Path) -> Ids:
    """Map each token id of a `tokenizer.json` to its compressed id.

    Raises:
        ModelFormatError: The file cannot be read.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise ModelFormatError(f"{path.name}: cannot be read: {error}", code="model.tokenizer") from error
    count = tokenizer.get_vocab_size(with_added_tokens=True)
    pieces = ((tokenizer.id_to_token(token_id) or "") for token_id in range(count))
    texts = (tokenizer.decode([token_id], skip_special_tokens=False) for token_id in range(count))
    return compress_vocabulary(zip(texts, pieces, strict=True))


def load_token_map(path: Path, config: V41Config) -> Ids:
    """Like `token_map_of`, checked against the model: the hashes of Engram depend on its size.

    Raises:
        ModelFormatError: The tokenizer is not the model's.
    """
    token_map = token_map_of(path)
    if len(token_map) != config.shape.vocab_size:
        raise ModelFormatError(
            f"{path.name}: {len(token_map)} tokens, the model has {config.shape.vocab_size}",
            code="model.tokenizer",
            param="vocab_size",
        )
    size, wanted = int(token_map.max()) + 1, config.engram.compressed_vocab_size
    if wanted is not None and size != wanted:
        raise ModelFormatError(
            f"{path.name}: compresses to {size} ids, config.json says {wanted}",
            code="model.tokenizer",
            param="engram_compressed_vocab_size",
        )
    return token_map
