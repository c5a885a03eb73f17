"""A progress bar on the terminal; nothing where standard error is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from millpond.engine.progress import ShowProgress, show_nothing


@contextmanager
def loading_bar(what: str) -> Iterator[ShowProgress]:
    """Show bytes while the block runs; gone when it ends."""
    if not sys.stderr.isatty():
        yield show_nothing
        return
    from rich.console import Console  # noqa: PLC0415 - only people at a terminal pay for the import
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn  # noqa: PLC0415

    columns = ("{task.description}", BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(what, total=None)
        yield lambda num_done, num_total: progress.update(bar, completed=num_done, total=num_total)
