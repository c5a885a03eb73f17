"""Which backend this machine uses."""

from __future__ import annotations

from functools import cache

from millpond.store.codec.backend import Backend
from millpond.store.codec.isal import IsalBackend, load_isal
from millpond.store.codec.native import load_kernels


@cache
def default_backend() -> Backend:
    """ISA-L if this machine has it, else numba; both give the same bytes."""
    library = load_isal()
    if library is not None:
        return IsalBackend(library, load_kernels())
    from millpond.store.codec.numba_backend import NumbaBackend  # noqa: PLC0415 - half a second to import

    return NumbaBackend()
