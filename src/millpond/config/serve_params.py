"""How the supervisor runs the processes of the service."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SuperviseParams:
    """Folders, deadlines and restarts."""

    run_dir: str = ""
    """Folder of the sockets, keys and the config handed to child processes, made with mode 700.
    Empty: `millpond-<user id>-<port>` in the system's folder for temporary files."""
    state_dir: str = ""
    """Folder of what outlives a restart: the KV pool, the tenants' salts. Empty: `millpond` in the user's XDG
    state home, which is `~/.local/state` by default."""
    start_deadline_s: float = 180.0
    """Time in which a new process must report; loading weights is part of it."""
    drain_s: float = 35.0
    """Time from SIGTERM until the processes that are still there are killed. Longer than gateway.drain_s."""
    pool_stop_s: float = 20.0
    """Time that the KV pool then has to write what it holds. Longer than node.flush_s."""
    restart_delay_s: float = 0.5
    """Pause before the first restart of a process; doubled with each restart that follows a short life."""
    max_restart_delay_s: float = 30.0
    """Longest pause between restarts."""
    control_port: int = 7601
    """TCP port of the controller, on the first host's cnic address. Used only with more than one host; on
    one host a socket in the run folder takes its place."""
    pin_cores: bool = True
    """Pin each engine process to cores of its own, as long as there are enough."""
