"""A gateway process with the rest of the service played by the test, over the real sockets."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from millpond.config.engine_params import EngineParams
from millpond.config.gateway_params import GatewayParams
from millpond.config.sections import Config
from millpond.config.serve_params import SuperviseParams
from millpond.core.events import Cancel, GatewayUp, ServiceState, Submit, TokensOut
from millpond.core.ids import GroupId, RequestId
from millpond.core.plan import TokenOut
from millpond.core.request import FinishReason, RequestSpec
from millpond.serve.process import ProcessSpec
from millpond.serve.rpc import Network, Push, Router, wait_any
from millpond.serve.run_folder import GATEWAY, PoolAccess, RunFolder, control_endpoint, make_run_folder

DEADLINE_S = 20.0
MAX_MODEL_LEN = 4096


@dataclass(slots=True)
class _Sequence:
    spec: RequestSpec
    num_sent: int


@dataclass
class Peer:
    """Controller and worker in one thread: answers each submission with `text`, one token per step.

    `limit` holds every sequence before that output token; raise it to let them go on.
    """

    config: Config
    folder: RunFolder
    text: bytes = b"0123456789" * 20
    limit: int = 1 << 30
    step_s: float = 0.001
    submits: list[RequestSpec] = field(default_factory=list)
    cancels: list[RequestId] = field(default_factory=list)
    num_announced: int = 0
    incarnation: int = 0
    _sequences: dict[RequestId, _Sequence] = field(default_factory=dict)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Play a controller process that has just started."""
        self.incarnation += 1
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer")
        self._thread.start()

    def stop(self) -> None:
        """End the controller process; the gateway sees its connections break."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(DEADLINE_S)
            assert not self._thread.is_alive()

    def _run(self) -> None:
        with (
            Network(self.folder.load_keys()) as network,
            Router(network, control_endpoint(self.config, self.folder)) as router,
        ):
            self._serve(network, router)

    def _serve(self, network: Network, router: Router) -> None:
        with Push(network, self.folder.token_socket()) as push:
            while not self._stopping.is_set():
                while (received := router.recv()) is not None:
                    self._on_message(router, received[1])
                tokens = [
                    token for sequence in tuple(self._sequences.values()) for token in self._step(sequence)
                ]
                if tokens:
                    push.send(TokensOut(GroupId("d0"), tuple(tokens)))
                wait_any((router,), self.step_s)

    def _on_message(self, router: Router, message: object) -> None:
        match message:
            case GatewayUp():
                self.num_announced += 1
                router.send(GATEWAY, ServiceState(self.incarnation, MAX_MODEL_LEN, is_ready=True))
            case Submit(spec=spec):
                self.submits.append(spec)
                self._sequences[spec.request_id] = _Sequence(spec, len(spec.output_ids))
            case Cancel(request_id=request_id):
                self.cancels.append(request_id)
                self._sequences.pop(request_id, None)

    def _step(self, sequence: _Sequence) -> list[TokenOut]:
        spec, index = sequence.spec, sequence.num_sent
        if index >= self.limit:
            return []
        num_tokens = min(len(self.text), spec.sampling.max_tokens)
        finish = FinishReason.LENGTH if index + 1 == num_tokens else None
        sequence.num_sent += 1
        if finish is not None:
            del self._sequences[spec.request_id]
        position = spec.num_prompt_tokens + index
        num_cached = spec.cached.num_tokens if spec.cached is not None else 0
        return [
            TokenOut(
                spec.request_id,
                spec.attempt,
                position,
                self.text[index],
                finish=finish,
                num_cached_tokens=num_cached,
            )
        ]


@dataclass
class GatewayProcess:
    """A real gateway process."""

    process: subprocess.Popen[bytes]
    url: str
    peer: Peer
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Poll with a deadline; fail if the process dies first."""
        end_ns = time.monotonic_ns() + int(DEADLINE_S * 1e9)
        while not condition():
            assert time.monotonic_ns() < end_ns, f"not within {DEADLINE_S} s: {what}\n{self.log[-3000:]}"
            time.sleep(0.005)

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.log[-3000:]
            with suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
            return False

        self.wait_for(is_ready, "ready")

    def stop(self) -> int:
        """SIGTERM and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


def make_config(folder: Path, port: int, drain_s: float = 10.0) -> Config:
    """A service of the synthetic model."""
    return Config(
        engine=EngineParams(model="synthetic"),
        gateway=GatewayParams(port=port, drain_s=drain_s),
        supervise=SuperviseParams(run_dir=str(folder / "run"), state_dir=str(folder / "state")),
    )


def start_gateway(folder: Path, config: Config, pool: PoolAccess | None = None) -> GatewayProcess:
    """Start a gateway process and its peer."""
    run_folder = make_run_folder(config)
    if pool is not None:
        run_folder.write_pool_access(pool)
    log_file = folder / "gateway.log"
    with log_file.open("wb") as log:
        command = ProcessSpec("gateway", run_folder.path, 1).arguments()
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    peer = Peer(config, run_folder)
    peer.start()
    return GatewayProcess(process, f"http://127.0.0.1:{config.gateway.port}", peer, log_file)
