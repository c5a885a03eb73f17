"""Whether a V4.1 checkpoint folder is whole: config, tokenizer, headers of all shards. No torch here."""

from __future__ import annotations

from millpond.core.errors import ConfigError
from millpond.core.shapes import ModelShape
from millpond.engine.model.config import V41Config, load_config
from millpond.engine.model.tensors import check_tensors
from millpond.engine.model.token_map import load_token_map
from millpond.engine.model_files import ModelFiles
from millpond.engine.safetensors_files import read_headers
from millpond.engine.tokenizer_files import load_tokenizer


def check_v41_files(files: ModelFiles) -> V41Config:
    """Check a folder that `locate_model` found, in seconds at any size: no tensor is read.

    Raises:
        ModelFormatError: The first thing that is wrong; names file and tensor or field.
    """
    config = load_config(files.root / "config.json")
    check_tensors(read_headers(files.weight_files), config)
    load_tokenizer(files)
    load_token_map(files.root / "tokenizer.json", config)
    return config


def check_kept_tokens(num_kept_tokens: int, shape: ModelShape) -> None:
    """Check `engine.num_kept_tokens` against a model.

    Raises:
        ConfigError: Fewer tokens are kept than decoding looks back on.
    """
    if 0 < num_kept_tokens < shape.ring_rows:
        raise ConfigError(
            f"engine.num_kept_tokens = {num_kept_tokens}: decoding with drafts reaches back"
            f" {shape.ring_rows} tokens; use that or more, or 0 for all",
            param="engine.num_kept_tokens",
        )
