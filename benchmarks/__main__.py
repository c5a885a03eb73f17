"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from benchmarks.harness import load_levels, report

BENCHMARKS = ("engine", "gateway", "service")


def main() -> int:
    """Run one benchmark; print its result as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--quick", action="store_true", help="at most 60 s, no peers")
    parser.add_argument("--only", nargs="+", metavar="ID", default=[], help="measure these levels alone")
    arguments = parser.parse_args()
    only = frozenset[str](arguments.only)
    if unknown := only - set(load_levels(arguments.name)):
        parser.error(f"no such level: {', '.join(sorted(unknown))}")
    result = importlib.import_module(f"benchmarks.{arguments.name}").run(arguments.quick, only)
    print(json.dumps(report(arguments.name, result, quick=arguments.quick, only=only)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
