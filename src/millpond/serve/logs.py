"""Log records: an event name and fields, as JSON lines or as columns on a terminal. Prompts never."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logging(*, process: str) -> None:
    """Set up this process's log on standard error.

    Args:
        process: Name that every record carries.
    """
    renderer = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # A record and its end go out in one write: all processes of a service share one file.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(process=process)
