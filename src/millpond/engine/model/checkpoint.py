"""A folder of safetensors shards, memory-mapped; every complaint names the tensor and the file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from millpond.core.errors import ModelFormatError
from millpond.core.units import ceil_div
from millpond.engine.model.formats import dequantise_fp4_weight, dequantise_tiles

_PREFIX = "model."
_PLAIN = (torch.bfloat16, torch.float32)


class TensorSource(Protocol):
    """Where weights come from, by published name without `.weight` for quantised ones."""

    def plain(self, name: str, *size: int) -> torch.Tensor:
        """Return a bf16 or float32 tensor as float32."""
        ...

    def fp8(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """Return a dense FP8 weight (a scale per 32 x 32 tile) as float32."""
        ...

    def fp4(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """Return an FP4 weight (a scale per row and 32 columns) as float32."""
        ...

    def table(self, name: str, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an Engram table as stored: E4M3 bytes [rows, width], E8M0 bytes [rows, width / 32]."""
        ...


class Checkpoint:
    """Tensors by published name (an optional leading `model.` is dropped). Use as a context manager."""

    def __init__(self, files: Sequence[Path], device: torch.device | None = None) -> None:
        """Open the shards and read their headers; tensors stay on disk until they are asked for.

        Raises:
            ModelFormatError: A shard is truncated or no safetensors file.
        """
        self._device = device or torch.device("cpu")
        self._exits = ExitStack()
        self._where: dict[str, tuple[Any, str, str]] = {}
        for file in files:
            try:
                shard: Any = self._exits.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                self._exits.close()
                raise ModelFormatError(
                    f"{file.name}: cannot be read: {error}", code="model.weights"
                ) from error
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                self._where[name.removeprefix(_PREFIX)] = (shard, name, file.name)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def raw(self, name: str, dtype: torch.dtype | Sequence[torch.dtype], *size: int) -> torch.Tensor:
        """Return a tensor as stored.

        Raises:
            ModelFormatError: It is missing, or of another shape or type.
        """
        place = self._where.get(name)
        if place is None:
            raise ModelFormatError(f"{name}: missing in the checkpoint", code="model.weights", param=name)
        shard, stored_name, file = place
        dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        found = tuple(shard.get_slice(stored_name).get_shape())
        if found != size:
            raise ModelFormatError(
                f"{file}: {name} has shape {list(found)}, not {list(size)}", code="model.weights", param=name
            )
        tensor: torch.Tensor = shard.get_tensor(stored_name)
        if tensor.dtype not in dtypes:
            wanted = " or ".join(map(str, dtypes))
            raise ModelFormatError(
                f"{file}: {name} is {tensor.dtype}, not {wanted}", code="model.weights", param=name
            )
        return tensor.to(self._device)

    def plain(self, name: str, *size: int) -> torch.Tensor:
        """See `TensorSource.plain`."""
        return self.raw(name, _PLAIN, *size).float()

    def fp8(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """See `TensorSource.fp8`."""
        data = self.raw(f"{name}.weight", torch.float8_e4m3fn, rows, columns)
        tiles = (ceil_div(rows, 32), ceil_div(columns, 32))
        scales = self.raw(f"{name}.scale", torch.float8_e8m0fnu, *tiles)
        return dequantise_tiles(data.view(torch.uint8), scales.view(torch.uint8))

    def fp4(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """See `TensorSource.fp4`."""
        data = self.raw(f"{name}.weight", torch.int8, rows, columns // 2)
        scales = self.raw(f"{name}.scale", torch.float8_e8m0fnu, rows, columns // 32)
        return dequantise_fp4_weight(data, scales.view(torch.uint8))

    def table(self, name: str, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TensorSource.table`."""
        data = self.raw(f"{name}.weight", torch.float8_e4m3fn, rows, width)
        scales = self.raw(f"{name}.scale", torch.float8_e8m0fnu, rows, width // 32)
        return data.view(torch.uint8), scales.view(torch.uint8)
