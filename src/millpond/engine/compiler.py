"""Compiles C kernels for the CPU at hand, once per source, compiler and CPU."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared")
_COMPILE_LIMIT_S = 120


def _cpu_identity() -> str:
    """What `-march=native` depends on; a cache folder may be shared between machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    wanted = ("model name", "flags", "Features")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def _cache_folder() -> Path:
    folder = Path.home() / ".cache" / "millpond"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:  # no home folder, or a read-only one: build for this process alone
        return Path(tempfile.mkdtemp(prefix="millpond-"))


def build_library(source: Path, *options: str) -> Path | None:
    """Compile a C file into a shared library, or find it compiled.

    Returns:
        The library, or None where no C compiler works.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    flags = (*_FLAGS, *options)
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=30, check=False).stdout
    key = hashlib.sha256(source.read_bytes() + version + repr((flags, _cpu_identity())).encode()).hexdigest()
    folder = _cache_folder()
    library = folder / f"kernels-{key[:20]}.so"
    if not library.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as build:
            fresh = Path(build) / "kernels.so"
            command = [compiler, *flags, "-o", str(fresh), str(source), "-lm"]
            done = subprocess.run(command, capture_output=True, timeout=_COMPILE_LIMIT_S, check=False)
            if done.returncode != 0:
                return None
            fresh.replace(library)  # atomic: two processes may build at once
    return library
