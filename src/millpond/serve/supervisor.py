"""Starts, watches, restarts and drains the processes of the service.

The processes of one group live and die together: a group steps in lock step, so the death of one rank
breaks it, and the whole group starts anew under a new incarnation.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from millpond.config.sections import Config
from millpond.core.errors import ConfigError
from millpond.core.events import GatewayDown, GroupDown
from millpond.core.ids import GroupId
from millpond.core.plan import RestartGroup
from millpond.core.units import SECOND_NS
from millpond.serve.pool_processes import is_pool_up
from millpond.serve.process import EXIT_CONFIG
from millpond.serve.rpc import Dealer, Network, wait_any
from millpond.serve.run_folder import GATEWAY, RunFolder, control_endpoint
from millpond.serve.units import Stage, Unit, make_units

LONG_LIFE_NS = 60 * SECOND_NS
"""A unit that lived this long is restarted without extra delay."""
POLL_S = 1.0
POOL_START_NS = 30 * SECOND_NS
"""How long the gateway waits for the pool at the start: who asks first should find what is stored. Without
the pool the service works too."""
POOL_POLL_S = 0.1

log = structlog.get_logger(__name__)


class Supervisor:
    """Owner of the child processes of one host."""

    def __init__(self, config: Config, folder: RunFolder, journal: Path | None) -> None:
        self._config = config
        self._folder = folder
        self._units = make_units(config, folder.path, journal)
        self._network = Network(folder.load_keys())
        self._controller: Dealer | None = None
        self._unreported: list[object] = []
        self._fatal: str | None = None
        self._awaits_pool = False

    # --- life --------------------------------------------------------------------------------

    def run(self, is_stopping: Callable[[], bool], on_started: Callable[[], None] | None = None) -> None:
        """Start everything, keep it running until `is_stopping`, then drain.

        Raises:
            ConfigError: A process refused its configuration or its model; restarting cannot help.
        """
        for unit in self._units:
            if unit.stage is Stage.GATEWAY and self._config.pool.enabled:
                unit.restart_at_ns = time.monotonic_ns() + POOL_START_NS
                self._awaits_pool = True
            else:
                self._start(unit)
        self._controller = Dealer(self._network, control_endpoint(self._config, self._folder), "supervisor")
        if on_started is not None:
            on_started()
        try:
            while not is_stopping() and self._fatal is None:
                self._watch()
        finally:
            self.drain()
        if self._fatal is not None:
            raise ConfigError(self._fatal)

    def _watch(self) -> None:
        assert self._controller is not None  # noqa: S101 - made by run
        while (message := self._controller.recv()) is not None:
            if isinstance(message, RestartGroup):
                self._kill(message)
        while self._unreported and self._controller.send(self._unreported[0]):
            self._unreported.pop(0)
        timeout_s = self._start_due(time.monotonic_ns())
        if self._unreported:
            timeout_s = min(timeout_s, 0.05)
        wait_any((self._controller, *self._units), timeout_s)
        for unit in self._units:
            dead = [p for p in unit.processes if p.poll() is not None]
            if dead:
                self._on_death(unit, dead[0])

    def _start_due(self, now_ns: int) -> float:
        """Start the units whose time has come; seconds until something is to be looked at again."""
        timeout_s = POLL_S
        if self._awaits_pool:
            self._look_for_pool(now_ns)
            timeout_s = POOL_POLL_S
        for unit in self._units:
            if unit.restart_at_ns is None:
                continue
            if now_ns >= unit.restart_at_ns:
                unit.restart_at_ns = None
                self._start(unit)
            else:
                timeout_s = min(timeout_s, (unit.restart_at_ns - now_ns) / SECOND_NS)
        return timeout_s

    def _look_for_pool(self, now_ns: int) -> None:
        """Start the gateway once all processes of the pool listen, or it has waited long enough."""
        gateway = next(unit for unit in self._units if unit.stage is Stage.GATEWAY)
        if gateway.restart_at_ns is None or now_ns >= gateway.restart_at_ns:
            log.warning("pool.not_up", waited_s=POOL_START_NS / SECOND_NS)
        elif is_pool_up(self._config, self._folder):
            gateway.restart_at_ns = now_ns
        else:
            return
        self._awaits_pool = False

    def _kill(self, order: RestartGroup) -> None:
        """Kill a silent group, unless it was restarted since. Its death is then noticed like any other."""
        for unit in self._units:
            if unit.is_group and unit.name == order.group and unit.incarnation == order.incarnation:
                for process in unit.processes:
                    process.kill()

    def _on_death(self, unit: Unit, dead: subprocess.Popen[bytes]) -> None:
        log.warning("process.died", unit=unit.name, pid=dead.pid, status=dead.returncode)
        # The pool is not worth the service: what it refuses after a restart, such as a port that is taken
        # meanwhile, is tried again.
        if dead.returncode == EXIT_CONFIG and (unit.stage < Stage.NODE or not unit.num_restarts):
            self._fatal = self._reason(unit, dead)
        for process in unit.processes:
            if process.poll() is None:
                process.kill()
        self._reap(unit)
        if unit.name == "gateway":
            self._unreported.append(GatewayDown(GATEWAY))
        elif unit.is_group:
            why = f"process {dead.pid} ended with status {dead.returncode}"
            self._unreported.append(GroupDown(GroupId(unit.name), unit.incarnation, why))
        params = self._config.supervise
        lived_ns = time.monotonic_ns() - unit.started_ns
        if lived_ns >= LONG_LIFE_NS:
            unit.delay_s = 0.0
        delay_s = unit.delay_s
        unit.delay_s = min(max(unit.delay_s * 2, params.restart_delay_s), params.max_restart_delay_s)
        unit.num_restarts += 1
        unit.restart_at_ns = time.monotonic_ns() + int(delay_s * SECOND_NS)

    def _reason(self, unit: Unit, dead: subprocess.Popen[bytes]) -> str:
        """What a process said before it ended with `EXIT_CONFIG`."""
        name = unit.make_specs(unit.incarnation)[unit.processes.index(dead)].name
        try:
            return f"{name}: {self._folder.reason_file(name).read_text(encoding='utf-8')}"
        except FileNotFoundError:
            return f"{name} cannot start and left no reason"  # for example, its command line was refused

    def _start(self, unit: Unit) -> None:
        unit.incarnation = max(time.time_ns(), unit.incarnation + 1)
        unit.started_ns = time.monotonic_ns()
        threads = str(unit.threads)
        # OpenMP reads this before Python code runs; more threads than cores were measured 15x slower.
        environment = {
            **os.environ,  # noqa: TID251
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
        }
        for spec, cores in zip(unit.make_specs(unit.incarnation), unit.cores, strict=True):
            # A process group of its own: Ctrl-C on a terminal reaches the supervisor alone, which then stops
            # them in order. Standard output says nothing.
            process = subprocess.Popen(
                spec.arguments(),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,
            )
            if cores:
                os.sched_setaffinity(process.pid, cores)
            unit.processes.append(process)
            unit.pidfds.append(os.pidfd_open(process.pid))
            log.info("process.started", name=spec.name, pid=process.pid, cores=sorted(cores or ()))

    def _reap(self, unit: Unit) -> None:
        for process in unit.processes:
            process.wait()
        for pidfd in unit.pidfds:
            os.close(pidfd)
        unit.processes.clear()
        unit.pidfds.clear()

    def drain(self) -> None:
        """Stop stage after stage: streams end, workers, then what they computed is written.

        What is left at a stage's deadline is killed.
        """
        params = self._config.supervise
        until_ns = time.monotonic_ns() + int(params.drain_s * SECOND_NS)
        for stage in Stage:
            if stage is Stage.NODE:
                until_ns = time.monotonic_ns() + int(params.pool_stop_s * SECOND_NS)
            units = [unit for unit in self._units if unit.stage is stage]
            for unit in units:
                for process in unit.processes:
                    process.send_signal(signal.SIGTERM)
            for unit in units:
                self._wait(unit, until_ns)
        if self._controller is not None:
            self._controller.close()
        self._network.close()

    def _wait(self, unit: Unit, until_ns: int) -> None:
        for process in unit.processes:
            try:
                process.wait(max(until_ns - time.monotonic_ns(), 0) / SECOND_NS)
            except subprocess.TimeoutExpired:
                log.warning("process.killed", unit=unit.name, pid=process.pid, why="its time to stop is over")
                process.kill()
        self._reap(unit)

    # --- tell --------------------------------------------------------------------------------

    def pids(self) -> dict[str, list[int]]:
        """Return the process ids of each unit."""
        return {unit.name: [process.pid for process in unit.processes] for unit in self._units}
