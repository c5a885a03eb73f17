"""Number formats, one group at a time."""

from __future__ import annotations

import math

import torch

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def power_of_two_scale_ref(amax: float, limit: float) -> float:
    """Smallest power of two >= amax / limit, the quotient taken as a float32 product."""
    quotient = (torch.tensor(amax) * torch.tensor(1.0 / limit)).item()
    mantissa, exponent = math.frexp(quotient)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def round_fp8_ref(row: torch.Tensor) -> torch.Tensor:
    """Quantise and dequantise one row [width] to E4M3 per 32 channels; float32."""
    out = []
    for group in row.float().split(32):
        scale = power_of_two_scale_ref(max(group.abs().max().item(), 1e-4), 448.0)
        out.append((group / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(out)


def dequantise_fp8_ref(data: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Float32 row of E4M3 bytes [width] and the E8M0 bytes of its groups of 32."""
    values = data.view(torch.float8_e4m3fn).float().split(32)
    return torch.cat([v * 2.0 ** (int(e) - 127) for v, e in zip(values, exponents, strict=True)])


def dequantise_tiles_ref(data: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Float32 weight of E4M3 bytes [out, in] and an E8M0 byte per 32 x 32 tile."""
    out = data.view(torch.float8_e4m3fn).float()
    for row in range(data.shape[0]):
        for column in range(data.shape[1]):
            out[row, column] *= 2.0 ** (int(exponents[row // 32, column // 32]) - 127)
    return out


def dequantise_fp4_weight_ref(data: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Float32 weight of packed E2M1 codes [out, in / 2] and an E8M0 byte per row and 32 columns."""
    out = torch.empty(data.shape[0], 2 * data.shape[1])
    for row in range(data.shape[0]):
        for column in range(out.shape[1]):
            byte = int(data[row, column // 2]) & 0xFF
            code = byte >> 4 if column % 2 else byte & 0xF
            sign = -1.0 if code & 8 else 1.0
            out[row, column] = sign * _E2M1[code & 7] * 2.0 ** (int(exponents[row, column // 32]) - 127)
    return out


def nearest_e2m1_ref(value: float) -> float:
    """Nearest E2M1 number; of two equally near ones that with the even code."""
    best = min(range(8), key=lambda code: (abs(abs(value) - _E2M1[code]), code % 2))
    return math.copysign(_E2M1[best], value)


def round_fp4_index_ref(row: torch.Tensor) -> torch.Tensor:
    """Quantise and dequantise one row to E2M1 with power-of-two scales per 32 channels."""
    out = []
    for group in row.float().split(32):
        scale = power_of_two_scale_ref(max(group.abs().max().item(), 6 * 2.0**-126), 6.0)
        out.append(torch.tensor([nearest_e2m1_ref(value / scale) * scale for value in group.tolist()]))
    return torch.cat(out)


def round_fp4_main_ref(row: torch.Tensor) -> torch.Tensor:
    """Quantise and dequantise one row to E2M1 with E4M3 scales per 16 channels."""
    out = []
    for group in row.float().split(16):
        amax = group.abs().max().clamp_min(6 * 2.0**-9)
        scale = (amax / 6).clamp_max(448).to(torch.float8_e4m3fn).float()
        scaled = (group / scale).tolist()
        out.append(torch.tensor([nearest_e2m1_ref(value) for value in scaled]) * scale)
    return torch.cat(out)
