"""What a child process of the supervisor runs: one role, from the run folder alone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from millpond.config.journal import DispatcherSetup, GroupSetup, JournalWriter, M, Setup, journaled
from millpond.config.sections import Config
from millpond.config.topology import GroupSpec
from millpond.control.group_scheduler import GroupParams, GroupRole
from millpond.core.errors import ConfigError, ModelFormatError, UnknownModel
from millpond.core.ids import DpRank, GroupId
from millpond.serve.controller import Controller
from millpond.serve.logs import configure_logging
from millpond.serve.rpc import Dealer, Network, Router, Wakeup
from millpond.serve.run_folder import RunFolder, control_endpoint
from millpond.serve.transfer.receiver import HandoffReceiver
from millpond.serve.transfer.sender import HandoffSender
from millpond.serve.workers.engines import make_engine, make_rank_kv
from millpond.serve.workers.leader import Leader, LeaderIdentity
from millpond.serve.workers.rank_runner import RankRunner
from millpond.serve.workers.remote_rank import RemoteRanks, rank_identity, run_rank

PR_SET_PDEATHSIG = 1
EXIT_CONFIG = 2
"""Exit status of a process whose configuration or model cannot be used."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What the supervisor starts. Travels on the command line."""

    role: str
    """`gateway`, `controller`, `rank`, `node` (daemon of a host), `storage` or `metadata`."""
    run_dir: Path
    incarnation: int
    """Start time in ns: larger after each restart, also across supervisors."""
    group: str = ""
    """Of a rank; of other roles that there are several of, the name in the config."""
    rank: int = 0
    journal: Path | None = None

    @property
    def name(self) -> str:
        """Name in logs and status."""
        if self.role == "rank":
            return f"{self.group}-{self.rank}"
        return f"{self.role}-{self.group}" if self.group else self.role

    def arguments(self) -> list[str]:
        """Command line that runs it."""
        command = [sys.executable, "-m", "millpond.cli.main", "process", self.role]
        command += ["--run-dir", str(self.run_dir), "--incarnation", str(self.incarnation)]
        if self.group:
            command += ["--group", self.group, "--rank", str(self.rank)]
        if self.journal is not None:
            command += ["--journal", str(self.journal)]
        return command


def run_process(spec: ProcessSpec) -> None:
    """Run one role until SIGTERM. Raises what breaks it; the supervisor sees the exit status.

    Raises:
        SystemExit: With `EXIT_CONFIG`, the reason left in the run folder: trying again cannot help.
    """
    _die_with_parent()
    configure_logging(process=spec.name)
    folder = RunFolder(spec.run_dir)
    try:
        _run_role(spec, folder, folder.load_config())
    except (ConfigError, ModelFormatError, UnknownModel) as error:
        folder.reason_file(spec.name).write_text(error.message, encoding="utf-8")
        raise SystemExit(EXIT_CONFIG) from error


def _run_role(spec: ProcessSpec, folder: RunFolder, config: Config) -> None:
    if spec.role == "gateway":
        from millpond.serve.gateway.process import run_gateway  # noqa: PLC0415 - loads the HTTP stack

        run_gateway(config, folder)
        return
    if spec.role in {"storage", "metadata"}:
        from millpond.serve.pool_parts import run_shard, run_storage  # noqa: PLC0415 - loads numpy

        (run_storage if spec.role == "storage" else run_shard)(config, spec.group)
        return
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    if spec.role == "controller":
        _run_controller(config, folder, spec, stopping.is_set)
    elif spec.role == "node":
        from millpond.serve.node.process import run_node  # noqa: PLC0415 - loads the pool client

        run_node(config, folder, spec.group, spec.incarnation, stopping.is_set)
    else:
        _run_rank(config, folder, spec, stopping.is_set)


def _run_controller(
    config: Config, folder: RunFolder, spec: ProcessSpec, is_stopping: Callable[[], bool]
) -> None:
    groups = tuple(sorted(GroupId(group.name) for group in config.groups))
    setup = DispatcherSetup(config.dispatch, groups, time.monotonic_ns())
    with (
        Network(folder.load_keys()) as network,
        Router(network, control_endpoint(config, folder)) as router,
        _recording(setup.make(), setup, config, spec) as dispatcher,
    ):
        Controller(dispatcher, router, spec.incarnation).run(is_stopping)


@contextmanager
def _recording(machine: M, setup: Setup, config: Config, spec: ProcessSpec) -> Iterator[M]:
    """Record what `machine` is told and decides, if a journal was asked for."""
    if spec.journal is None:
        yield machine
        return
    name = f"{spec.group or spec.role}.{spec.incarnation}"
    with JournalWriter(spec.journal, name, setup, config_digest=config.digest) as journal:
        yield journaled(machine, journal)


def _run_rank(config: Config, folder: RunFolder, spec: ProcessSpec, is_stopping: Callable[[], bool]) -> None:
    group = config.group(spec.group)
    name = GroupId(group.name)
    wakeup = Wakeup()
    with Network(folder.load_keys()) as network:
        runner = _make_runner(config, folder, spec, group, network, wakeup.post)
        try:
            if spec.rank == 0:
                _lead(config, folder, spec, group, runner, wakeup, network, is_stopping)
            else:
                with Dealer(network, folder.group_socket(name), rank_identity(runner.rank)) as leader:
                    run_rank(name, spec.incarnation, runner, leader, wakeup, is_stopping)
        finally:
            runner.stop()
            wakeup.close()


def _lead(
    config: Config,
    folder: RunFolder,
    spec: ProcessSpec,
    group: GroupSpec,
    runner: RankRunner,
    wakeup: Wakeup,
    network: Network,
    is_stopping: Callable[[], bool],
) -> None:
    name = GroupId(group.name)
    infos = (runner.info,)
    router: Router | None = None
    others: RemoteRanks | None = None
    if group.ranks > 1:
        router = Router(network, folder.group_socket(name))
        others = RemoteRanks(router, tuple(DpRank(rank) for rank in range(1, group.ranks)))
        infos += others.wait_until_up(config.supervise.start_deadline_s)
    params = GroupParams(config.prefill, config.decode, config.mixed)
    setup = GroupSetup(name, group.role, infos, runner.engine.max_model_len, params)
    identity = LeaderIdentity(spec.incarnation, config.engine.max_num_seqs)
    with (
        Dealer(network, control_endpoint(config, folder), name) as controller,
        _recording(setup.make(), setup, config, spec) as scheduler,
    ):
        leader = Leader(identity, scheduler, infos, runner, others, controller, wakeup, network)
        try:
            log.info("leader.up", group=name, num_blocks=[info.num_blocks for info in infos])
            leader.run(is_stopping)
        finally:
            leader.close()
            if router is not None:
                router.close()


def _make_runner(
    config: Config,
    folder: RunFolder,
    spec: ProcessSpec,
    group: GroupSpec,
    network: Network,
    post: Callable[[object], None],
) -> RankRunner:
    rank = DpRank(spec.rank)
    engine = make_engine(config, folder, group, rank)
    token = folder.load_keys().handoff_token
    sender: HandoffSender | None = None
    receiver: HandoffReceiver | None = None
    if group.role is GroupRole.PREFILL:
        sender = HandoffSender(engine, token, config.transfer, post)
    elif group.role is GroupRole.DECODE:
        receiver = HandoffReceiver(
            engine, _data_address(config, folder, group, rank), token, config.transfer, post
        )
    kv = make_rank_kv(config, folder, network, group, rank, spec.incarnation, engine, sender, post)
    return RankRunner(rank, engine, sender, receiver, kv)


def _data_address(config: Config, folder: RunFolder, group: GroupSpec, rank: DpRank) -> str:
    """Where a decode rank receives: in the run folder if every prefill rank is on its host, else TCP."""
    host = group.hosts[rank % len(group.hosts)]
    senders = {name for other in config.groups if other.role is GroupRole.PREFILL for name in other.hosts}
    if senders <= {host}:
        return folder.data_socket(GroupId(group.name), rank)
    return f"tcp:{config.host(host).cnic}:0"


def _die_with_parent() -> None:
    """Have the kernel kill this process when the supervisor dies, however it dies."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != parent:
        raise SystemExit("the supervisor is gone")
