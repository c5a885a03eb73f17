"""GF(256), polynomial 0x11d: products, inverses and the coding matrix.

Everything here is small and runs when a codec is made; the loops over data are in the backends.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from millpond.core.errors import InvariantBroken

POLYNOMIAL = 0x11D
MAX_SHARDS = 255
"""Distinct Cauchy points that the field has for rows and columns together."""

Matrix = NDArray[np.uint8]


@cache
def _products() -> NDArray[np.uint8]:
    """All products, [256, 256]."""
    power = np.zeros(255, np.uint8)
    value = 1
    for exponent in range(255):
        power[exponent] = value
        value = (value << 1) ^ (POLYNOMIAL if value & 0x80 else 0)
    log = np.zeros(256, np.int64)
    log[power] = np.arange(255)
    table = power[(log[:, None] + log[None, :]) % 255]
    table[0, :] = 0
    table[:, 0] = 0
    return table


def multiply(a: Matrix, b: Matrix) -> Matrix:
    """Product of two elements, element by element, broadcast as numpy does."""
    return _products()[a, b]


def inverse(a: Matrix) -> Matrix:
    """Inverse of each element, none of which is zero."""
    table = np.argmax(_products() == 1, axis=1).astype(np.uint8)
    return table[a]


def matrix_product(a: Matrix, b: Matrix) -> Matrix:
    """Matrix product, [rows, inner] x [inner, columns]."""
    return np.bitwise_xor.reduce(multiply(a[:, :, None], b[None, :, :]), axis=1)


def invert_matrix(matrix: Matrix) -> Matrix:
    """Inverse of a square matrix, by Gauss and Jordan.

    Raises:
        InvariantBroken: The matrix is singular, which no choice of k shards makes it.
    """
    size = len(matrix)
    work = np.concatenate([matrix, np.eye(size, dtype=np.uint8)], axis=1)
    for column in range(size):
        pivot = column + int(np.argmax(work[column:, column] != 0))
        if work[pivot, column] == 0:
            raise InvariantBroken("singular coding matrix")
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = multiply(work[column], inverse(work[column, column]))
        others = work[:, column].copy()
        others[column] = 0
        work ^= multiply(others[:, None], work[column][None, :])
    return work[:, size:]


def coding_matrix(k: int, m: int) -> Matrix:
    """Generator [k + m, k]: shard i is row i times the data shards.

    The first k rows are the identity. The parity rows are the Cauchy matrix 1 / (x_i + y_j) with
    x_i = k + i and y_j = j, its columns scaled so that the first row is all ones and then its rows so that
    the first column is. Scaling keeps every square part invertible, so any k shards give the data, and
    the first parity is a plain XOR.

    Raises:
        InvariantBroken: k or m out of range.
    """
    if k < 1 or m < 0 or k + m > MAX_SHARDS:
        raise InvariantBroken(f"no code {k}+{m}")
    x = np.arange(k, k + m, dtype=np.uint8)
    y = np.arange(k, dtype=np.uint8)
    parity = inverse(x[:, None] ^ y[None, :]) if m else np.zeros((0, k), np.uint8)
    if m:
        parity = multiply(parity, inverse(parity[:1]))
        parity = multiply(parity, inverse(parity[:, :1]))
    return np.concatenate([np.eye(k, dtype=np.uint8), parity])
