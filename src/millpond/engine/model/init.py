"""Write a random checkpoint in the published format, at any size that fits one layer in memory.

The loader itself says which tensors there are: it reads from a source that makes them up and keeps them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from millpond.core.errors import ConfigError
from millpond.engine.model.config import parse_config
from millpond.engine.model.formats import power_of_two_scales, quantise_fp4_index, quantise_fp8
from millpond.engine.model.init_tokenizer import make_tokenizer
from millpond.engine.model.token_map import token_map_of
from millpond.engine.model.vision import load_vision
from millpond.engine.model.weights import load_model_weights

_FLOAT32 = ("hc_attn_", "hc_ffn_", "attn_sink", "gate.bias")
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


class RandomSource:
    """Makes up every tensor that is asked for, and writes them in shards."""

    def __init__(self, folder: Path, seed: int) -> None:
        """Write into `folder`, which exists; equal seeds give equal tensors, in any order of asking."""
        self._folder = folder
        self._seed = seed
        self._shard: dict[str, torch.Tensor] = {}
        self._shards: list[dict[str, torch.Size]] = []
        self._num_bytes = 0

    def plain(self, name: str, *size: int) -> torch.Tensor:
        """See `TensorSource.plain`; returns a tensor without values."""
        dtype = torch.float32 if any(part in name for part in _FLOAT32) else torch.bfloat16
        self._keep(name, self._values(name, size).to(dtype))
        return torch.empty(size, device="meta")

    def fp8(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """See `TensorSource.fp8`; returns a tensor without values."""
        values = self._values(name, (rows, columns))
        padded = torch.nn.functional.pad(values, (0, -columns % 32, 0, -rows % 32))
        tiles = padded.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
        scales = power_of_two_scales(tiles.abs().amax((1, 3)).clamp_min(1e-4), 448.0)
        divisors = torch.exp2(scales.float() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
        data = (values / divisors[:rows, :columns]).clamp(-448, 448).to(torch.float8_e4m3fn)
        self._keep_pair(name, data, scales)
        return torch.empty(rows, columns, device="meta")

    def fp4(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """See `TensorSource.fp4`; returns a tensor without values."""
        data, scales = quantise_fp4_index(self._values(name, (rows, columns)))
        self._keep_pair(name, data.view(torch.int8), scales)
        return torch.empty(rows, columns, device="meta")

    def table(self, name: str, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TensorSource.table`; returns tensors without values."""
        data, scales = quantise_fp8(self._values(name, (rows, width)))
        self._keep_pair(name, data.view(torch.float8_e4m3fn), scales)
        return torch.empty(rows, width, device="meta"), torch.empty(rows, width // 32, device="meta")

    def flush(self) -> None:
        """Write what was made since the last call as one shard."""
        if not self._shard:
            return
        save_file(self._shard, self._folder / f"part-{len(self._shards)}.safetensors")
        self._shards.append({name: tensor.shape for name, tensor in self._shard.items()})
        self._num_bytes += sum(t.numel() * t.element_size() for t in self._shard.values())
        self._shard = {}

    def finish(self) -> None:
        """Write the rest, give the shards their final names, write the index."""
        self.flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / f"part-{number}.safetensors").replace(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(self._folder / "model.safetensors.index.json", index)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self._shard[name] = tensor.contiguous()

    def _keep_pair(self, name: str, data: torch.Tensor, scales: torch.Tensor) -> None:
        self._keep(f"{name}.weight", data)
        self._keep(f"{name}.scale", scales.view(torch.float8_e8m0fnu))

    def _values(self, name: str, size: tuple[int, ...]) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        noise = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.randn(size, generator=noise)
        gain = next((gain for part, gain in _NORM_GAINS.items() if part in name), 1.0)
        if "norm" in name or name.endswith(("q_weight", "k_weight")):
            return (1 + 0.1 * values) * gain
        spread = next((spread for part, spread in _SPREADS.items() if part in name), 1.0)
        if any(part in name for part in _ABSOLUTE):
            return values * (0.1 if name.endswith("gate.bias") else 0.5 if "embed" not in name else spread)
        return values * spread / max(size[-1], 1) ** 0.5


def init_checkpoint(
    values: Mapping[str, Any], folder: Path, seed: int, advance: Callable[[], None] = lambda: None
) -> None:
    """Write a random checkpoint with config, index, shards and tokenizer.

    Args:
        values: A config record, HF field names; a null `engram_compressed_vocab_size` is filled in.
        folder: Made if need be; must be empty.
        seed: Of all weights.
        advance: Called after each layer.

    Raises:
        ModelFormatError: The config is no V4.1 config.
        ConfigError: The folder is not empty.
    """
    parse_config(values)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder.name} is not empty", param="out")
    values = json.loads(json.dumps(values))
    tokenizer = make_tokenizer(parse_config(values))
    tokenizer.save(folder)
    values["text_config"]["engram_compressed_vocab_size"] = (
        int(token_map_of(folder / "tokenizer.json").max()) + 1
    )
    _write_json(folder / "config.json", values)
    config = parse_config(values)
    source = RandomSource(folder, seed)

    def next_shard() -> None:
        source.flush()
        advance()

    load_model_weights(source, config, next_shard)
    if config.vision is not None:
        load_vision(source, config, config.vision)
    source.finish()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
