from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from millpond.core.errors import ConfigError
from millpond.core.units import KIB
from millpond.serve.testbed import netns
from millpond.serve.testbed.netns import LinkShape, NetworkBed, remove_stale

REASON = netns.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no testbed: {REASON}")

MBIT = 10**6


@pytest.fixture
def bed() -> Iterator[NetworkBed]:
    with NetworkBed(["snic", "cnic"]) as made:
        yield made


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


SENDER = """
import socket, sys
host, port, size, tos = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
sock = socket.socket(); sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
sock.connect((host, port)); sock.sendall(bytes(size)); sock.shutdown(socket.SHUT_WR); sock.recv(1)
"""
RECEIVER = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 0)); print(server.getsockname()[1], flush=True)
for _ in range(int(sys.argv[2])):
    peer, _ = server.accept(); begin = time.monotonic(); size = 0
    while chunk := peer.recv(1 << 16):
        size += len(chunk)
    peer.sendall(b"!"); print(size, time.monotonic() - begin, flush=True)
"""


def transfer(bed: NetworkBed, network: str, size: int, tos: int = 0) -> float:
    """Seconds that `size` bytes take from a to b."""
    to = bed.address("b", network)
    receiver = subprocess.Popen(
        bed.command("b", [sys.executable, "-c", RECEIVER, to, "1"]), stdout=subprocess.PIPE, text=True
    )
    port = receiver.stdout.readline().strip()
    sender = bed.command("a", [sys.executable, "-c", SENDER, to, port, str(size), str(tos)])
    subprocess.run(sender, timeout=60, check=True)
    received, seconds = receiver.stdout.readline().split()
    receiver.wait(10)
    receiver.stdout.close()
    assert int(received) == size
    return float(seconds)


def test_a_shaped_link_is_as_slow_as_asked_and_the_other_is_not(bed: NetworkBed):
    for host in ("a", "b"):
        bed.add_host(host, {"snic": LinkShape(40 * MBIT), "cnic": None})
    slow_s = transfer(bed, "snic", 2_000_000)
    assert slow_s > 0.8 * 2_000_000 * 8 / (40 * MBIT)
    assert transfer(bed, "cnic", 2_000_000) < slow_s
    assert bed.received("b", "snic").sent_bytes > 2_000_000
    assert bed.sent("a", "snic").sent_bytes > 2_000_000


def test_background_traffic_uses_a_class_of_its_own(bed: NetworkBed):
    for host in ("a", "b"):
        bed.add_host(host, {"snic": LinkShape(100 * MBIT)})
    transfer(bed, "snic", 200_000, tos=0x20)
    text = subprocess.run(
        bed.command("a", ["tc", "-s", "class", "show", "dev", "snic"]),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    sent = dict(re.findall(r"class htb (\S+) .*?Sent (\d+) bytes", text, re.DOTALL))
    assert int(sent["1:20"]) > 200_000


def test_closing_leaves_nothing(bed: NetworkBed):
    bed.add_host("a", {"snic": None})
    mine = f"millpond-{os.getpid()}-"
    sleeper = subprocess.Popen(bed.command("a", ["sleep", "600"]))
    assert len([name for name in namespaces() if name.startswith(mine)]) == 2
    bed.close()
    assert not [name for name in namespaces() if name.startswith(mine)]
    assert sleeper.wait(10) == -signal.SIGKILL


def test_what_a_killed_owner_left_is_removed_by_the_next(wait_until: Callable[..., None]):
    code = (
        "import time; from millpond.serve.testbed.netns import NetworkBed;"
        "bed = NetworkBed(['snic']); bed.add_host('a', {'snic': None});"
        "print('up', flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "up\n"
    left = [name for name in namespaces() if name.startswith(f"millpond-{owner.pid}-")]
    assert len(left) == 2
    assert not set(remove_stale()) & set(left), "its owner lives"
    owner.kill()
    owner.wait()
    owner.stdout.close()
    with NetworkBed(["snic"]):
        assert not set(namespaces()) & set(left)


def test_hosts_need_names_of_their_own(bed: NetworkBed):
    bed.add_host("a", {"snic": LinkShape(10 * MBIT, 64 * KIB)})
    for name in ("a", "switch"):
        with pytest.raises(ConfigError):
            bed.add_host(name, {"snic": None})


def test_without_root_it_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="root"):
        NetworkBed(["snic"])


def test_a_bed_is_made_and_removed_quickly():
    began = time.monotonic()
    with NetworkBed(["snic", "cnic"]) as bed:
        for index in range(4):
            bed.add_host(f"h{index}", {"snic": LinkShape(400 * MBIT), "cnic": LinkShape(3200 * MBIT)})
    assert time.monotonic() - began < 60
