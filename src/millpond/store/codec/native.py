"""Builds `kernels.c` for this CPU at first use: coding and checksums in one pass, and the copies of cells."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-O3", "-march=native", "-fPIC", "-shared")
_COMPILE_LIMIT_S = 60
_CPU_FIELDS = ("model name", "flags", "Features")

MIN_SUM_BYTES = 256
"""Shorter inputs have another form of the checksum."""


@cache
def load_kernels() -> ctypes.CDLL | None:
    """Build if need be and load the kernels; None where no C compiler works."""
    try:
        path = _build()
    except (OSError, subprocess.SubprocessError):
        return None
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    p, n, i = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    library.mp_code_spans.argtypes = [p, p, p, i, i, p, i, p, n, p]
    library.mp_code_spans.restype = None
    library.mp_copy_cells.argtypes = [p, n, n, n, p, n, n, i]
    library.mp_copy_cells.restype = None
    return library


def _build() -> Path | None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=30, check=True).stdout
    identity = repr((_FLAGS, platform.machine(), _cpu_lines())).encode()
    key = hashlib.sha256(_SOURCE.read_bytes() + version + identity).hexdigest()
    folder = _cache_folder()
    library = folder / f"codec-{key[:20]}.so"
    if not library.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as build:
            fresh = Path(build) / "codec.so"
            command = [compiler, *_FLAGS, "-o", str(fresh), str(_SOURCE)]
            subprocess.run(command, capture_output=True, timeout=_COMPILE_LIMIT_S, check=True)
            fresh.replace(library)  # atomic: two processes may build at once
    return library


def _cpu_lines() -> list[str]:
    """What `-march=native` depends on; a cache folder may be shared between machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return sorted({line for line in lines if line.startswith(_CPU_FIELDS)})


def _cache_folder() -> Path:
    folder = Path.home() / ".cache" / "millpond"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:  # no home folder, or a read-only one: build for this process alone
        return Path(tempfile.mkdtemp(prefix="millpond-"))
