"""A folder of safetensors shards, memory-mapped; every complaint names the tensor and the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from millpond.core.errors import ModelFormatError
from millpond.engine.model.config import V41Config
from millpond.engine.model.tensors import check_tensors
from millpond.engine.safetensors_files import read_headers


class Checkpoint:
    """Weights by published name, without `.weight` for quantised ones. Use as a context manager."""

    def __init__(
        self,
        files: Sequence[Path],
        config: V41Config,
        device: torch.device | None = None,
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Check the headers of all shards; tensors stay on disk until they are asked for.

        Args:
            files: The shards.
            config: Says which tensors there must be.
            device: Where tensors go.
            advance: Told the bytes of each tensor that is read.

        Raises:
            ModelFormatError: A shard cannot be read, or a tensor is not what the config says.
        """
        self._device = device or torch.device("cpu")
        self._advance = advance
        self._found = check_tensors(read_headers(files), config)
        self._exits = ExitStack()
        self._shards: dict[Path, Any] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def raw(self, name: str) -> torch.Tensor:
        """Return a tensor as stored; on a CPU it stays mapped.

        Raises:
            ModelFormatError: The shard cannot be mapped.
        """
        stored_name, entry = self._found[name]
        try:
            if entry.file not in self._shards:
                self._shards[entry.file] = self._exits.enter_context(safe_open(entry.file, framework="pt"))
            tensor: torch.Tensor = self._shards[entry.file].get_tensor(stored_name)
        except (OSError, SafetensorError) as error:
            raise ModelFormatError(
                f"{entry.file.name}: cannot be read: {error}", code="model.weights"
            ) from error
        self._advance(entry.end - entry.begin)
        return tensor.to(self._device)

    def plain(self, name: str) -> torch.Tensor:
        """Return a bf16 or float32 tensor as float32."""
        return self.raw(name).float()

    def quantised(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values and the scales of a quantised weight as stored, uint8."""
        return (
            self.raw(f"{name}.weight").view(torch.uint8),
            self.raw(f"{name}.scale").view(torch.uint8),
        )
