"""`KvLayout`: what one block and one state slot of a model consist of (interfaces A.2)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from millpond.core.units import BLOCK_TOKENS, align_up

PART_ALIGN_BYTES = 32


@dataclass(frozen=True, slots=True)
class KvPart:
    """One named byte range of a row, for example the keys of a layer."""

    name: str
    """`index_k`, `main`, `k` or `v`."""
    num_bytes: int
    """Bytes for one whole block, before rounding up to 32."""
    dtype: str
    """Tag only, for example `bf16`; transfer never converts."""


@dataclass(frozen=True, slots=True)
class KvRow:
    """The bytes of one block that belong to one KV-owning layer. Unit of readiness and checksum."""

    layer: int
    parts: tuple[KvPart, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the row; each part is rounded up to 32 B."""
        return sum(align_up(part.num_bytes, PART_ALIGN_BYTES) for part in self.parts)


@dataclass(frozen=True, slots=True)
class StatePart:
    """One piece of a sequence's fixed-size state."""

    layer: int
    """Layer, or draft stage for part `draft`."""
    part: str
    """`window`, `compressor` or `draft`."""
    num_bytes: int
    persisted: bool


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Layout of blocks and state of one model at one KV precision.

    A full block is the concatenation of its rows, so layer-wise transfer needs no conversion.
    """

    rows: tuple[KvRow, ...]
    """Ascending by layer."""
    state: tuple[StatePart, ...] = ()
    block_tokens: int = BLOCK_TOKENS

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all rows."""
        return sum(row.num_bytes for row in self.rows)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state slot."""
        return sum(part.num_bytes for part in self.state)

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the canonical JSON. Part of every block's identity."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()


def uniform_layout(num_layers: int, kv_bytes_per_token: int, dtype: str) -> KvLayout:
    """Make the layout of a plain decoder: every layer owns k and v of equal size.

    Args:
        num_layers: Decoder layers, > 0.
        kv_bytes_per_token: Bytes of the keys of one token in one layer (values take as many).
        dtype: Tag, for example `bf16`.
    """
    num_bytes = kv_bytes_per_token * BLOCK_TOKENS
    parts = (KvPart("k", num_bytes, dtype), KvPart("v", num_bytes, dtype))
    return KvLayout(rows=tuple(KvRow(layer, parts) for layer in range(num_layers)))
