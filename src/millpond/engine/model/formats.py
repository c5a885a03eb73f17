"""Small number formats, bit for bit: FP8 E4M3 and FP4 E2M1 rows with a scale per group of channels.

A row is written as its data bytes followed by its scale bytes. Two E2M1 codes share a byte, the even channel
in the low nibble. Power-of-two scales (E8M0) are rounded up, so nothing but E4M3 scales saturates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import torch

from millpond.engine.model.native import kernels_for, kernels_for_bytes

_FP8_MAX = 448.0
_FP4_MAX = 6.0
_FP8_FLOOR = 1e-4
_FP4_INDEX_FLOOR = 6 * 2.0**-126
_FP4_MAIN_FLOOR = 6 * 2.0**-9
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# A magnitude gets as code the number of borders below it; ties go to even codes, so up at every second one.
_BORDERS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_BORDERS[1::2] = torch.nextafter(_BORDERS[1::2], torch.zeros(3))
_CODES = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
_PAIRS = torch.stack([_CODES.repeat(16), _CODES.repeat_interleave(16)], dim=-1).view(torch.int64).flatten()
"""[256]: the two float32 values of each byte as one number, so that both are looked up at once."""

_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""[256]: the value of each byte; looking up is several times quicker than converting."""


class RowFormat(Protocol):
    """How rows of `width` channels are kept as bytes."""

    def row_bytes(self, width: int) -> int:
        """Bytes of one row."""
        ...

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., width] -> bytes [..., row_bytes]."""
        ...

    def decode(self, data: torch.Tensor, width: int) -> torch.Tensor:
        """Bytes [..., row_bytes] -> float32 rows [..., width]."""
        ...

    def read(
        self, memory: torch.Tensor, first: torch.Tensor, second: torch.Tensor | None, width: int
    ) -> torch.Tensor:
        """Decode rows of memory [blocks, rows, row_bytes] at (first, second): [..., width].

        Without `second`: all rows of the blocks `first`, one after the other.
        """
        ...

    def read_before(
        self, memory: torch.Tensor, first: torch.Tensor, second: torch.Tensor, data: torch.Tensor, width: int
    ) -> torch.Tensor:
        """Decode rows of memory at (first, second) and, behind them, the rows `data` [n, row_bytes]."""
        ...


def _rows_at(memory: torch.Tensor, first: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
    if second is None:
        return memory.index_select(0, first).flatten(0, 1)
    return memory[first, second]


def power_of_two_scales(amax: torch.Tensor, limit: float) -> torch.Tensor:
    """Exponent bytes (E8M0) of the smallest powers of two that are >= amax / limit; amax float32, > 0."""
    bits = (amax * torch.tensor(1.0 / limit, dtype=torch.float32, device=amax.device)).view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).to(torch.uint8)


def e8m0_values(exponents: torch.Tensor) -> torch.Tensor:
    """Float32 values of E8M0 bytes."""
    bits = exponents.to(torch.int32) << 23
    return bits.clamp_min(1 << 22).view(torch.float32)  # exponent 0 is the subnormal 2^-127


def e4m3_values(data: torch.Tensor) -> torch.Tensor:
    """Float32 values of E4M3 bytes (uint8), any shape."""
    return _E4M3.to(data.device).index_select(0, data.flatten().to(torch.int32)).view(data.shape)


def _groups(rows: torch.Tensor, size: int, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows as float32 [..., groups, size] and each group's largest magnitude, at least `floor`."""
    grouped = rows.float().unflatten(-1, (-1, size))
    return grouped, grouped.abs().amax(-1).clamp_min(floor)


def quantise_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows [..., width] in groups of 32: (E4M3 bytes [..., width], E8M0 bytes [..., width / 32])."""
    grouped, amax = _groups(rows, 32, _FP8_FLOOR)
    scales = power_of_two_scales(amax, _FP8_MAX)
    scaled = (grouped / e8m0_values(scales)[..., None]).clamp(-_FP8_MAX, _FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2), scales


def dequantise_fp8(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 rows of `quantise_fp8`'s bytes."""
    values = e4m3_values(data).unflatten(-1, (-1, 32))
    return (values * e8m0_values(scales)[..., None]).flatten(-2)


def round_fp8(rows: torch.Tensor) -> torch.Tensor:
    """Quantise and dequantise, in the dtype of `rows`; what every quantised linear does to its input."""
    grouped, amax = _groups(rows, 32, _FP8_FLOOR)
    scale = e8m0_values(power_of_two_scales(amax, _FP8_MAX))[..., None]
    scaled = (grouped / scale).clamp(-_FP8_MAX, _FP8_MAX)
    data = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return (e4m3_values(data) * scale).flatten(-2).to(rows.dtype)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 codes, ties to even, two per byte; float32 [..., width] -> uint8 [..., width / 2]."""
    codes = torch.bucketize(values.abs(), _BORDERS.to(values.device), out_int32=True)
    codes += torch.signbit(values).to(torch.int32) << 3
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)


def decode_e2m1(data: torch.Tensor) -> torch.Tensor:
    """Float32 values of packed E2M1 codes: [..., n] -> [..., 2 n]."""
    pairs = _PAIRS.to(data.device).index_select(0, data.flatten().to(torch.int32))
    return pairs.view(torch.float32).view(*data.shape[:-1], 2 * data.shape[-1])


def quantise_fp4_index(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise in groups of 32 with E8M0 scales: (packed codes, scale bytes)."""
    grouped, amax = _groups(rows, 32, _FP4_INDEX_FLOOR)
    scales = power_of_two_scales(amax, _FP4_MAX)
    return encode_e2m1(grouped / e8m0_values(scales)[..., None]).flatten(-2), scales


def quantise_fp4_main(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise in groups of 16 with E4M3 scales: (packed codes, scale bytes)."""
    grouped, amax = _groups(rows, 16, _FP4_MAIN_FLOOR)
    scales = (amax / _FP4_MAX).clamp_max(_FP8_MAX).to(torch.float8_e4m3fn)
    return encode_e2m1(grouped / scales.float()[..., None]).flatten(-2), scales.view(torch.uint8)


def dequantise_fp4(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 rows of packed codes and float32 scales [..., groups]."""
    values = decode_e2m1(data)
    return (values.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


class _PackedRows(ABC):
    """What the packed formats share: native code where it serves, torch elsewhere."""

    _number: ClassVar[int]
    """Of the format in `kernels.c`."""

    @abstractmethod
    def row_bytes(self, width: int) -> int:
        """See `RowFormat.row_bytes`."""

    @abstractmethod
    def _encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as packed bytes, by torch."""

    @abstractmethod
    def _decode(self, data: torch.Tensor, width: int) -> torch.Tensor:
        """Packed bytes as rows, by torch."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RowFormat.encode`."""
        kernels = kernels_for(rows)
        if kernels is None:
            return self._encode(rows)
        return kernels.encode_rows(self._number, rows, self.row_bytes(rows.shape[-1]))

    def decode(self, data: torch.Tensor, width: int) -> torch.Tensor:
        """See `RowFormat.decode`."""
        flat = data.contiguous().view(1, -1, data.shape[-1])
        rows = self.read(flat, torch.zeros(1, dtype=torch.int64, device=data.device), None, width)
        return rows.view(*data.shape[:-1], width)

    def read(
        self, memory: torch.Tensor, first: torch.Tensor, second: torch.Tensor | None, width: int
    ) -> torch.Tensor:
        """See `RowFormat.read`."""
        kernels = kernels_for_bytes(memory, width)
        if kernels is None:
            return self._decode(_rows_at(memory, first, second), width)
        return kernels.decode_rows(self._number, memory, first, second, width)

    def read_before(
        self, memory: torch.Tensor, first: torch.Tensor, second: torch.Tensor, data: torch.Tensor, width: int
    ) -> torch.Tensor:
        """See `RowFormat.read_before`."""
        kernels = kernels_for_bytes(memory, width)
        if kernels is None:
            return torch.cat([self.read(memory, first, second, width), self.decode(data, width)])
        count = first.shape[0]
        rows = torch.empty(count + data.shape[0], width)
        kernels.decode_rows(self._number, memory, first, second, width, rows[:count])
        block = torch.zeros(1, dtype=torch.int64)
        kernels.decode_rows(self._number, data[None], block, None, width, rows[count:])
        return rows


class Fp8Rows(_PackedRows):
    """Window rows: E4M3, an E8M0 scale per 32 channels."""

    _number = 0

    def row_bytes(self, width: int) -> int:
        """See `RowFormat.row_bytes`."""
        return width + width // 32

    def _encode(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat(quantise_fp8(rows), dim=-1)

    def _decode(self, data: torch.Tensor, width: int) -> torch.Tensor:
        return dequantise_fp8(data[..., :width], data[..., width:])


class Fp4MainRows(_PackedRows):
    """Compressed KV: E2M1, an E4M3 scale per 16 channels."""

    _number = 1

    def row_bytes(self, width: int) -> int:
        """See `RowFormat.row_bytes`."""
        return width // 2 + width // 16

    def _encode(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat(quantise_fp4_main(rows), dim=-1)

    def _decode(self, data: torch.Tensor, width: int) -> torch.Tensor:
        return dequantise_fp4(data[..., : width // 2], e4m3_values(data[..., width // 2 :]))


class Fp4IndexRows(_PackedRows):
    """Index queries and keys: E2M1, an E8M0 scale per 32 channels."""

    _number = 2

    def row_bytes(self, width: int) -> int:
        """See `RowFormat.row_bytes`."""
        return width // 2 + width // 32

    def _encode(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat(quantise_fp4_index(rows), dim=-1)

    def _decode(self, data: torch.Tensor, width: int) -> torch.Tensor:
        return dequantise_fp4(data[..., : width // 2], e8m0_values(data[..., width // 2 :]))


class Fp32Rows:
    """Plain floats."""

    def row_bytes(self, width: int) -> int:
        """See `RowFormat.row_bytes`."""
        return 4 * width

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RowFormat.encode`."""
        return rows.float().contiguous().view(torch.uint8)

    def decode(self, data: torch.Tensor, width: int) -> torch.Tensor:
        """See `RowFormat.decode`."""
        return data.contiguous().view(torch.float32)

    def read(
        self, memory: torch.Tensor, first: torch.Tensor, second: torch.Tensor | None, width: int
    ) -> torch.Tensor:
        """See `RowFormat.read`."""
        return self.decode(_rows_at(memory, first, second), width)

    def read_before(
        self, memory: torch.Tensor, first: torch.Tensor, second: torch.Tensor, data: torch.Tensor, width: int
    ) -> torch.Tensor:
        """See `RowFormat.read_before`."""
        return torch.cat([self.read(memory, first, second, width), self.decode(data, width)])


def dequantise_tiles(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 weight of E4M3 bytes [out, in] and E8M0 bytes per 32 x 32 tile."""
    rows, columns = data.shape
    values = e8m0_values(scales).repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
    return e4m3_values(data) * values


def dequantise_fp4_weight(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 weight [out, in] of packed codes [out, in / 2] and E8M0 bytes [out, in / 32]."""
    return dequantise_fp4(data.view(torch.uint8), e8m0_values(scales))
