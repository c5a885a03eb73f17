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
    """Folder of what outlives a restart, such as the tenants' salts. Empty: `.local/state/millpond` in the
    home folder."""
    start_deadline_s: float = 180.0
    """Time in which a new process must report; loading weights is part of it."""
    drain_s: float = 35.0
    """Time from SIGTERM until the processes that are still there are killed. Longer than gateway.drain_s."""
    restart_delay_s: float = 0.5
    """Pause before the first restart of a process; doubled with each restart that follows a short life."""
    max_restart_delay_s: float = 30.0
    """Longest pause between restarts."""
    control_port: int = 7601
    """TCP port of the controller, on the first host's cnic address. Used only with more than one host; on
    one host a socket in the run folder takes its place."""
    pin_cores: bool = True
    """Pin each engine process to cores of its own, as long as there are enough."""
