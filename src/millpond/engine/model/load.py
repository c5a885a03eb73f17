"""Make a V4.1 engine from a checkpoint folder and the engine's parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from millpond.config.engine_params import EngineParams
from millpond.core.errors import ConfigError
from millpond.core.shapes import kv_layout
from millpond.engine.memory import choose_max_model_len, plan_memory
from millpond.engine.model.checkpoint import Checkpoint
from millpond.engine.model.config import load_config
from millpond.engine.model.engine import V41Engine
from millpond.engine.model.model import V41Model
from millpond.engine.model.numerics import BF16, FP32, Numerics
from millpond.engine.model.tensors import language_weights, stored_bytes
from millpond.engine.model.token_map import load_token_map
from millpond.engine.model.weights import load_model_weights
from millpond.engine.model_files import ModelFiles
from millpond.engine.progress import ByteCounter, ShowProgress, show_nothing
from millpond.engine.swap.choose import choose_method

_NUMERICS = {"auto": BF16, "bf16": BF16, "fp32": FP32}


def choose_numerics(params: EngineParams) -> Numerics:
    """Turn the engine's parameters into a way to compute.

    Raises:
        ConfigError: A value is not known.
    """
    if params.dtype not in _NUMERICS:
        raise ConfigError(f"engine.dtype is {params.dtype!r}; use auto, bf16 or fp32", param="engine.dtype")
    if params.numerics not in ("fast", "exact"):
        raise ConfigError(
            f"engine.numerics is {params.numerics!r}; use fast or exact", param="engine.numerics"
        )
    return replace(_NUMERICS[params.dtype], is_exact=params.numerics == "exact")


def load_model(
    root: Path,
    weight_files: tuple[Path, ...],
    numerics: Numerics,
    device: torch.device,
    show: ShowProgress = show_nothing,
    *,
    keep_packed: bool = False,
) -> V41Model:
    """Load config, tokenizer and weights of a checkpoint folder; see `load_model_weights`.

    Raises:
        ModelFormatError: A file is not what it should be; names file and tensor or field.
    """
    config = load_config(root / "config.json")
    token_map = load_token_map(root / "tokenizer.json", config)
    counter = ByteCounter(stored_bytes(language_weights(config)), show)
    with Checkpoint(weight_files, config, device, counter.advance) as checkpoint:
        weights = load_model_weights(checkpoint, config, keep_packed=keep_packed)
    return V41Model(config, weights, numerics, token_map)


def load_v41_engine(
    files: ModelFiles,
    params: EngineParams,
    device: str = "cpu",
    *,
    show: ShowProgress = show_nothing,
) -> V41Engine:
    """Load a model and allocate its caches.

    Args:
        files: A folder that `locate_model` found.
        params: The engine's parameters.
        device: Where to compute.
        show: Told how far loading is.

    Raises:
        ModelFormatError: The model's files are not what they should be.
        ConfigError: A parameter cannot be honoured.
    """
    numerics = choose_numerics(params)
    model = load_model(
        files.root,
        files.weight_files,
        numerics,
        torch.device(device),
        show,
        keep_packed=params.weights == "packed",
    )
    layout = kv_layout(model.config.shape, numerics.kv_format)
    memory = plan_memory(layout, params.kv_memory, params.max_num_seqs)
    limit = choose_max_model_len(params.max_model_len, model.config.max_positions)
    return V41Engine(
        model,
        memory,
        max_model_len=limit,
        num_kept_tokens=params.num_kept_tokens,
        swap_method=choose_method(params.swap_method, max(row.num_bytes for row in layout.rows)),
    )
