"""Write a random checkpoint in the published format, at any size: slice by slice, in little memory."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from millpond.core.errors import ConfigError
from millpond.engine.model.config import V41Config, parse_config
from millpond.engine.model.formats import power_of_two_scales, quantise_fp4_index, quantise_fp8
from millpond.engine.model.init_tokenizer import make_tokenizer
from millpond.engine.model.tensors import Weight, WeightKind, all_weights, stored_bytes
from millpond.engine.model.token_map import token_map_of
from millpond.engine.progress import ByteCounter, ShowProgress, show_nothing
from millpond.engine.safetensors_writer import ShardWriter

_SLICE_VALUES = 1 << 20
"""About as many random values lie in memory at once. Part of what a seed means: each slice has its own."""
_TILE = 32
_NORM_GAINS = {"attn_norm": 0.025, "ffn_norm": 0.35, "kv_norm": 0.4, "compressor.norm": 0.6, "k_norm": 0.5}
"""Gains far from 1, as trained models have them: with 1 a random stack would amplify every rounding."""
_SPREADS = {
    "embed.weight": 1.0,
    "attn.wkv": 1.8,
    "wo_a": 1.6,
    "wo_b": 0.45,
    "wq_a": 1.6,
    "wq_b": 2.5,
    "w1": 1.5,
    "w3": 1.5,
    "w2": 0.5,
    "gate.weight": 2.9,
}
"""Standard deviation of a weight times the root of its inputs; 1 for those not named."""
_ABSOLUTE = ("embed", "image_", "attn_sink", "gate.bias", "_base", "_scale")
"""Tensors whose spread does not shrink with their width."""


def init_checkpoint(
    values: Mapping[str, Any], folder: Path, seed: int, show: ShowProgress = show_nothing
) -> None:
    """Write a random checkpoint with config, index, shards and tokenizer.

    Args:
        values: A config record, HF field names; a null `engram_compressed_vocab_size` is filled in.
        folder: Made if need be; must be empty.
        seed: Of all weights. A tensor's bytes follow from seed, name and size alone.
        show: Told how far it is.

    Raises:
        ModelFormatError: The config is no V4.1 config.
        ConfigError: The folder is not empty, too small, or cannot be written.
    """
    config = parse_config(values)
    try:
        _make_folder(folder, stored_bytes(all_weights(config)))
        make_tokenizer(config).save(folder)
        size = int(token_map_of(folder / "tokenizer.json").max()) + 1
        text = {**values["text_config"], "engram_compressed_vocab_size": size}
        _write_weights(config, folder, seed, show)
        # last, so that what was cut short is no checkpoint
        _write_json(folder / "config.json", {**values, "text_config": text})
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}", param="out") from error


def _make_folder(folder: Path, num_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", param="out")
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ConfigError(f"{folder}: {free:,} bytes are free, the weights take {num_bytes:,}", param="out")


def _write_weights(config: V41Config, folder: Path, seed: int, show: ShowProgress) -> None:
    """Write a shard for each layer and stage, one for the rest, and the index."""
    counter = ByteCounter(stored_bytes(all_weights(config)), show)
    shards = [list(weights) for _, weights in groupby(all_weights(config), _owner)]
    weight_map: dict[str, str] = {}
    for number, weights in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = [tensor for weight in weights for tensor in weight.stored()]
        layout = {tensor.name: (tensor.dtypes[0], tensor.shape) for tensor in tensors}
        with ShardWriter(folder / file, layout) as shard:
            for weight in weights:
                for piece in _random_pieces(weight, seed):
                    for tensor, data in zip(weight.stored(), piece, strict=True):
                        data_bytes = data.contiguous().view(torch.uint8).numpy().data.cast("B")
                        shard.append(tensor.name, data_bytes)
                        counter.advance(len(data_bytes))
        weight_map |= dict.fromkeys(layout, file)
    index = {
        "metadata": {"total_size": stored_bytes(all_weights(config))},
        "weight_map": dict(sorted(weight_map.items())),
    }
    _write_json(folder / "model.safetensors.index.json", index)


def _owner(weight: Weight) -> str:
    """The layer or stage that a weight belongs to."""
    first, second, *_ = (*weight.name.split("."), "")
    return f"{first}.{second}" if first in ("layers", "mtp") else ""


def _random_pieces(weight: Weight, seed: int) -> Iterable[tuple[torch.Tensor, ...]]:
    """Stored tensors of a weight, slice of rows after slice of rows."""
    *rows, columns = weight.size
    num_rows = rows[0] if rows else 1
    step = max(_SLICE_VALUES // columns // _TILE, 1) * _TILE
    for number, begin in enumerate(range(0, num_rows, step)):
        count = min(step, num_rows - begin)
        values = _spread(weight, _noise(f"{seed}/{weight.name}/{number}", count, columns))
        yield _encode(weight.kind, values)


def _noise(name: str, rows: int, columns: int) -> torch.Tensor:
    digest = hashlib.sha256(name.encode()).digest()
    chance = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(rows, columns, generator=chance)


def _spread(weight: Weight, values: torch.Tensor) -> torch.Tensor:
    """Give values the spread that trained weights of this name have."""
    name = weight.name
    gain = next((gain for part, gain in _NORM_GAINS.items() if part in name), 1.0)
    if "norm" in name or name.endswith(("q_weight", "k_weight")):
        return (1 + 0.1 * values) * gain
    spread = next((spread for part, spread in _SPREADS.items() if part in name), 1.0)
    if any(part in name for part in _ABSOLUTE):
        return values * (0.1 if name.endswith("gate.bias") else 0.5 if "embed" not in name else spread)
    return values * spread / max(weight.size[-1], 1) ** 0.5


def _encode(kind: WeightKind, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    match kind:
        case WeightKind.BF16:
            return (values.bfloat16(),)
        case WeightKind.FP32:
            return (values,)
        case WeightKind.FP8:
            return _quantise_tiles(values)
        case WeightKind.FP4:
            return quantise_fp4_index(values)
        case WeightKind.TABLE:
            return quantise_fp8(values)


def _quantise_tiles(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values of [rows, columns] and an E8M0 scale for each 32 x 32 tile."""
    rows, columns = values.shape
    padded = functional.pad(values, (0, -columns % _TILE, 0, -rows % _TILE))
    tiles = padded.unflatten(0, (-1, _TILE)).unflatten(2, (-1, _TILE))
    scales = power_of_two_scales(tiles.abs().amax((1, 3)).clamp_min(1e-4), 448.0)
    divisors = torch.exp2(scales.float() - 127).repeat_interleave(_TILE, 0).repeat_interleave(_TILE, 1)
    data = (values / divisors[:rows, :columns]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return data, scales


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
