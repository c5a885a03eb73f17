"""How the pool's processes learn that they should end: SIGTERM and SIGINT, blocked and waited for."""

from __future__ import annotations

import signal

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})


def block_stop_signals() -> None:
    """To be called before any thread is started, so that `stop_asked` alone sees them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def stop_asked(wait_s: float) -> bool:
    """Wait for one of the signals; whether one came."""
    info = signal.sigtimedwait(STOP_SIGNALS, wait_s)
    # A process that was frozen for longer than `wait_s` gets an empty record when it goes on.
    return info is not None and info.si_signo in STOP_SIGNALS
