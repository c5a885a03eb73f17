"""Mooncake store as a peer of the pool benchmark: a master, node processes with memory, one client, TCP.

It has an environment of its own (`make peers P=mooncake`), so all of it runs as children: its master, and
this file as node and as client. The client measures and answers with one JSON line per request. Only the
children import mooncake, and they import nothing else of this repo.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FOLDER = Path(".peers/mooncake").absolute()
PYTHON = FOLDER / "bin/python"
NUM_NODES = 12
NODE_BYTES = 128 << 20
BUFFER_BYTES = 64 << 20
_START_LIMIT_S = 120
_ANSWER_LIMIT_S = 60
_END_LIMIT_S = 20
_SETTINGS = {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}


class PeerUnavailable(Exception):
    """The peer does not run here; the text says why."""


# --- the benchmark's side -----------------------------------------------------------------------------


class MooncakePeer:
    """A running store. A context manager.

    Args:
        folder: For logs.
        is_local: The client holds the only memory itself, so that its reads are local.

    Raises:
        PeerUnavailable: Not installed, or it does not start.
    """

    def __init__(self, folder: Path, *, is_local: bool = False) -> None:
        if not (FOLDER / ".installed").is_file():
            raise PeerUnavailable("not installed (make peers P=mooncake)")
        self._stack = ExitStack()
        self._folder = folder
        try:
            master, metrics = _free_port(), _free_port()
            address = f"127.0.0.1:{master}"
            program = next(FOLDER.glob("lib/python3*/site-packages/mooncake/mooncake_master"))
            program.chmod(0o755)
            self._start("master", [str(program), f"--rpc_port={master}", f"--metrics_port={metrics}"])
            _wait_for_port(master)
            nodes = [
                self._start(f"node{index}", [str(PYTHON), __file__, "node", address, str(NODE_BYTES)])
                for index in range(0 if is_local else NUM_NODES)
            ]
            for node in nodes:
                _answer(node, _START_LIMIT_S)
            own_bytes = NODE_BYTES if is_local else 0
            self._client = self._start("client", [str(PYTHON), __file__, "client", address, str(own_bytes)])
            _answer(self._client, _START_LIMIT_S)
        except BaseException:
            self._stack.close()
            raise

    def put(self, size: int, count: int) -> float:
        """Bytes per second of writing a batch of new values."""
        return size * count / self._ask("put", size, count)

    def get(self, size: int, count: int) -> float:
        """Bytes per second of reading the batch of values written last, into registered memory."""
        return size * count / self._ask("get", size, count)

    def _ask(self, name: str, size: int, count: int) -> float:
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps([name, size, count]).encode() + b"\n")
        return _answer(self._client, _ANSWER_LIMIT_S)

    def _start(self, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        child = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=log if name == "master" else subprocess.PIPE,
            stderr=log,
            bufsize=0,
            env={**os.environ, **_SETTINGS, "LD_LIBRARY_PATH": _libraries()},  # noqa: TID251 - inherited
        )
        self._stack.callback(_end, child)
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _libraries() -> str:
    """Where `make peers` put what the system lacks."""
    found = {str(path.parent) for path in (FOLDER / "verbs").rglob("*.so.*")}
    return ":".join(sorted(found))


def _answer(child: subprocess.Popen[bytes], limit_s: float) -> float:
    pipe = child.stdout
    assert pipe is not None
    if not select.select([pipe], [], [], limit_s)[0]:
        raise PeerUnavailable(f"mooncake did not answer in {limit_s:.0f} s")
    line = pipe.readline()
    if not line:
        raise PeerUnavailable(f"mooncake ended with code {child.wait(_END_LIMIT_S)}")
    return float(line)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait(_END_LIMIT_S)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _wait_for_port(port: int) -> None:
    end_ns = time.monotonic_ns() + _START_LIMIT_S * 10**9
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError as error:
            if time.monotonic_ns() > end_ns:
                raise PeerUnavailable("its master does not listen") from error
            time.sleep(0.05)
        else:
            return


# --- the children -------------------------------------------------------------------------------------


class _Client:
    def __init__(self, store: Any) -> None:
        import numpy as np

        self._store = store
        self._memory = np.ones(BUFFER_BYTES, np.uint8)
        self._begin = self._memory.ctypes.data
        if store.register_buffer(self._begin, BUFFER_BYTES):
            raise RuntimeError("memory not registered")
        self._keys: dict[int, list[str]] = {}
        self._num_puts = 0

    def put(self, size: int, count: int) -> float:
        self._num_puts += 1
        keys = self._keys[size] = [f"{self._num_puts}/{index}" for index in range(count)]
        begin_ns = time.monotonic_ns()
        codes = self._store.batch_put_from(keys, self._places(size, count), [size] * count)
        elapsed_s = (time.monotonic_ns() - begin_ns) / 1e9
        if any(codes):
            raise RuntimeError(f"put: {codes}")
        return elapsed_s

    def get(self, size: int, count: int) -> float:
        begin_ns = time.monotonic_ns()
        sizes = self._store.batch_get_into(self._keys[size], self._places(size, count), [size] * count)
        elapsed_s = (time.monotonic_ns() - begin_ns) / 1e9
        if list(sizes) != [size] * count:
            raise RuntimeError(f"get: {sizes}")
        return elapsed_s

    def _places(self, size: int, count: int) -> list[int]:
        return [self._begin + index * size for index in range(count)]


def _main(role: str, master: str, num_bytes: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # it logs to stdout
    from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(num_bytes), BUFFER_BYTES, "tcp", "", master)
    if code:
        raise RuntimeError(f"setup: {code}")
    client = _Client(store) if role == "client" else None
    answers.write("0\n")
    answers.flush()
    for line in sys.stdin:
        if client is None:
            continue
        name, *arguments = json.loads(line)
        answers.write(f"{getattr(client, name)(*arguments)}\n")
        answers.flush()
    store.close()


if __name__ == "__main__":
    _main(*sys.argv[1:])
