"""`python -m benchmarks NAME [--quick] [--only ID ...]`: measure, and print the result as one JSON line."""

from __future__ import annotations

import argparse
import importlib
import tomllib
from pathlib import Path

from benchmarks.harness import log_to_stderr


def main() -> None:
    """Run one benchmark."""
    here = Path(__file__).parent
    levels = tomllib.loads((here / "levels.toml").read_text(encoding="utf-8"))
    names = sorted(name for name in levels if (here / f"{name}.py").is_file())
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=names)
    parser.add_argument("--quick", action="store_true", help="at most 60 s, no peers beyond transformers")
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="measure these levels only")
    chosen = parser.parse_args()
    log_to_stderr()
    benchmark = importlib.import_module(f"benchmarks.{chosen.name}")
    result = benchmark.run(quick=chosen.quick, only=set(chosen.only))
    print(result.to_json(), flush=True)


if __name__ == "__main__":
    main()
