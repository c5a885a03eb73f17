"""`millpond collect-env` and `millpond version`: what to put into a bug report."""

from __future__ import annotations

import typer

PACKAGES = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "gguf",
    "pyzmq",
    "msgspec",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "pydantic",
    "xxhash",
)
CPU_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sha_ni")


def version() -> None:
    """Print the version."""
    from millpond import __version__

    typer.echo(__version__)


def collect_env() -> None:
    """Print machine, versions and limits that matter to this service, without names of people or places."""
    for name, value in environment().items():
        typer.echo(f"{name}: {value}")


def environment() -> dict[str, str]:
    """Facts about this machine and installation, by name."""
    import os
    import platform
    import resource
    import shutil
    from importlib import metadata
    from pathlib import Path

    from millpond import __version__
    from millpond.config.sizes import format_size

    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    words = set(cpu.split())
    model = next(
        (line.split(":")[1].strip() for line in cpu.splitlines() if line.startswith("model name")), ""
    )
    page = os.sysconf("SC_PAGE_SIZE")
    facts = {
        "millpond": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": model or platform.processor(),
        "cpu features": " ".join(name for name in CPU_FEATURES if name in words) or "none known",
        "cores usable": str(len(os.sched_getaffinity(0))),
        "memory": format_size(os.sysconf("SC_PHYS_PAGES") * page >> 20 << 20),
        "open files limit": str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        "c compiler": "yes" if shutil.which("cc") else "no (the slower Python twins are used)",
    }
    for folder in ("/dev/shm",):  # noqa: S108 - asked about, not written to
        if Path(folder).exists():
            facts[f"free in {folder}"] = format_size(shutil.disk_usage(folder).free >> 20 << 20)
    for package in PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts
