"""`NetworkBed`: network namespaces as hosts, bridges as switches, shaped links between them.

All bridges lie in one namespace of their own, so that nothing outside the bed changes. The limit of a link
sits at the bridge for what the host receives and at the host for what it sends: there the queue forms in a
real network. Names carry the owner's process id and start time, so that the next bed removes what a killed
one left.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from millpond.core.errors import ConfigError, MillpondError
from millpond.core.units import KIB

COMMAND_S = 10
_PREFIX = "millpond"
_OWNED = re.compile(rf"^{_PREFIX}-(\d+)-(\d+)-")
_SWITCH = "switch"
_BACKGROUND_TOS = 0x20
"""DSCP CS1."""
_MTU = 1500
_FRAME_BYTES = _MTU + 14
_MAX_HOSTS = 200


@dataclass(frozen=True, slots=True)
class LinkShape:
    """Limits of a link, in each direction."""

    rate_bits_per_s: int
    queue_bytes: int = 256 * KIB
    """What waits in front of the link; the rest is dropped."""


@dataclass(frozen=True, slots=True)
class LinkCounts:
    """What one direction of a link has seen."""

    sent_bytes: int
    dropped_packets: int


class TestbedFailed(MillpondError):
    """A namespace, link or queue could not be made."""

    __test__ = False  # not a test class, whatever its name says


def why_not() -> str | None:
    """Why no bed can be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "netns", "del", probe)
    except TestbedFailed as error:
        return error.message
    return None


class NetworkBed:
    """See module. A context manager; `close` removes everything and ends what still runs inside.

    Args:
        networks: Names of the switches, for example `snic` and `cnic`; at most 10 letters each.

    Raises:
        ConfigError: No bed can be made here; the message says why.
    """

    def __init__(self, networks: Sequence[str]) -> None:
        reason = why_not()
        if reason is not None:
            raise ConfigError(f"no testbed: {reason}")
        remove_stale()
        self._owner = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}"
        self._networks = tuple(networks)
        self._hosts: dict[str, int] = {}
        try:
            _run("ip", "netns", "add", self._name(_SWITCH))
            for network in networks:
                self._ip(_SWITCH, "link", "add", network, "type", "bridge")
                self._ip(_SWITCH, "link", "set", network, "up")
        except TestbedFailed:
            self.close()
            raise

    def add_host(self, host: str, links: dict[str, LinkShape | None]) -> None:
        """Make a host with one interface in each of these networks; None: not shaped."""
        index = len(self._hosts) + 1
        if host in self._hosts or host == _SWITCH or index > _MAX_HOSTS:
            raise ConfigError(f"no place for host {host!r} in the testbed")
        self._hosts[host] = index
        _run("ip", "netns", "add", self._name(host))
        self._ip(host, "link", "set", "lo", "up")
        for network, shape in links.items():
            port = f"{network}{index}"
            self._ip(_SWITCH, "link", "add", port, "type", "veth", "peer", network, "netns", self._name(host))
            self._ip(_SWITCH, "link", "set", port, "master", network)
            for namespace, device in ((_SWITCH, port), (host, network)):
                # One packet at a time, as on a wire: super-packets would fill a shallow queue at once.
                self._ip(
                    namespace, "link", "set", device, "gso_max_segs", "1", "gso_max_size", str(_FRAME_BYTES)
                )
                self._ip(namespace, "link", "set", device, "up")
                if shape is not None:
                    self._shape(namespace, device, shape)
            self._ip(host, "addr", "add", f"{self.address(host, network)}/16", "dev", network)

    def address(self, host: str, network: str) -> str:
        """Address of a host in a network."""
        return f"10.{77 + self._networks.index(network)}.0.{self._hosts[host]}"

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """Command line that runs `argv` on a host."""
        return ["ip", "netns", "exec", self._name(host), *argv]

    def received(self, host: str, network: str) -> LinkCounts:
        """What has passed the shaped link towards a host."""
        return self._counts(_SWITCH, f"{network}{self._hosts[host]}")

    def sent(self, host: str, network: str) -> LinkCounts:
        """What has passed the shaped link from a host."""
        return self._counts(host, network)

    def close(self) -> None:
        """Remove everything."""
        for namespace in _namespaces():
            if namespace.startswith(f"{self._owner}-"):
                _remove(namespace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _name(self, host: str) -> str:
        return f"{self._owner}-{host}"

    def _ip(self, host: str, *words: str) -> str:
        return _run("ip", "-n", self._name(host), *words)

    def _shape(self, host: str, device: str, shape: LinkShape) -> None:
        """One class for everything and one for background traffic, which gets what is left over."""
        rate = f"{shape.rate_bits_per_s}bit"
        little = f"{max(8_000, shape.rate_bits_per_s // 100)}bit"
        burst = str(max(2 * _FRAME_BYTES, shape.rate_bits_per_s // 8 // 1000))
        limits = ("ceil", rate, "burst", burst, "cburst", burst)

        def tc(*words: str) -> None:
            _run("tc", "-n", self._name(host), *words)

        tc("qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "10")
        add_class = ("class", "add", "dev", device, "parent", "1:", "classid")
        tc(*add_class, "1:10", "htb", "rate", rate, *limits, "prio", "0", "quantum", "60000")
        tc(*add_class, "1:20", "htb", "rate", little, *limits, "prio", "7", "quantum", str(_FRAME_BYTES))
        for name in ("10", "20"):
            queue = ("parent", f"1:{name}", "handle", f"{name}:", "bfifo", "limit", str(shape.queue_bytes))
            tc("qdisc", "add", "dev", device, *queue)
        match = ("match", "ip", "tos", hex(_BACKGROUND_TOS), "0xfc", "flowid", "1:20")
        tc("filter", "add", "dev", device, "parent", "1:", "protocol", "ip", "u32", *match)

    def _counts(self, host: str, device: str) -> LinkCounts:
        text = _run("tc", "-n", self._name(host), "-s", "qdisc", "show", "dev", device)
        found = re.search(r"qdisc htb .*?Sent (\d+) bytes \d+ pkts? \(dropped (\d+)", text, re.DOTALL)
        if found is None:
            raise TestbedFailed(f"no queue on {device} of {host}", code="testbed.counts")
        return LinkCounts(int(found[1]), int(found[2]))


def remove_stale() -> list[str]:
    """Remove the namespaces whose owner is dead, and end what runs in them; returns their names."""
    stale: list[str] = []
    for namespace in _namespaces():
        owner = _OWNED.match(namespace)
        if owner is not None and _start_time(int(owner[1])) != owner[2]:
            _remove(namespace)
            stale.append(namespace)
    return stale


def _remove(namespace: str) -> None:
    for pid in _run("ip", "netns", "pids", namespace).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended by itself
    _run("ip", "netns", "del", namespace)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]


def _start_time(pid: int) -> str:
    """Kernel start time of a process, or "" if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[19]


def _run(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise TestbedFailed(f"{' '.join(argv)}: {error}", code="testbed.command") from error
    if done.returncode:
        raise TestbedFailed(f"{' '.join(argv)}: {done.stderr.strip()}", code="testbed.command")
    return done.stdout
