"""The gateway process: sockets, the HTTP server around the app, and a drain that cuts no stream."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvicorn
import uvloop
from prometheus_client import disable_created_metrics

from millpond.config.gateway_params import GatewayParams
from millpond.config.sections import Config
from millpond.core.errors import ConfigError, OverloadError
from millpond.core.units import SECOND_NS
from millpond.serve.gateway.app import make_app
from millpond.serve.gateway.gateway import Clocks, Gateway
from millpond.serve.gateway.http_protocol import BoundedHttpProtocol
from millpond.serve.gateway.kv_names import KvNames, load_kv_names
from millpond.serve.gateway.link import ControllerLink
from millpond.serve.gateway.matcher import PrefixMatcher
from millpond.serve.gateway.model_loading import load_served_model
from millpond.serve.gateway.served_model import ServedModel
from millpond.serve.gateway.tenants import OPEN_TENANT, Tenants, load_salts
from millpond.serve.rpc import Connected, Dealer, Network, Pull
from millpond.serve.run_folder import GATEWAY, RunFolder, control_endpoint
from millpond.store.metadata.client import MetadataClient

MAX_BATCH = 64
"""Messages taken in one go before other tasks get their turn."""
LAST_WORDS_S = 2.0
"""Time to send the error events of calls that the drain deadline cut."""
BACKLOG = 2048

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sockets:
    """All sockets of one gateway, open."""

    http: socket.socket
    control: Dealer
    tokens: Pull


def run_gateway(config: Config, folder: RunFolder) -> None:
    """Run the gateway until SIGTERM or SIGINT, then drain.

    Raises:
        ConfigError: The port is in use, the model or the tenants cannot be used.
    """
    disable_created_metrics()  # a second series per counter that nobody reads
    model = load_served_model(config)
    tenant_names = [tenant.name for tenant in config.tenants] or [OPEN_TENANT]
    tenants = Tenants(config.tenants, load_salts(Path(config.supervise.state_dir), tenant_names))
    with (
        open_pool(config, folder) as (kv, matcher),
        open_http_socket(config.gateway) as http,
        Network(folder.load_keys()) as network,
        Dealer(network, control_endpoint(config, folder), GATEWAY) as control,
        Pull(network, _token_endpoint(config, folder)) as tokens,
    ):
        if tenants.is_open and not _is_loopback(config.gateway.host):
            log.warning("gateway.open_to_all", host=config.gateway.host, remedy="configure a [[tenant]]")
        sockets = Sockets(http, control, tokens)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_gateway(config.gateway, model, tenants, sockets, kv, matcher))


@contextlib.contextmanager
def open_pool(config: Config, folder: RunFolder) -> Iterator[tuple[KvNames | None, PrefixMatcher | None]]:
    """Names of the KV and the way to the pool's metadata, as far as the service has a pool and looks it up.

    Raises:
        ModelFormatError: The model's files cannot be used.
    """
    access = folder.load_pool_access()
    if access is None:
        yield None, None
        return
    kv = load_kv_names(config, folder)
    if not config.gateway.match:
        yield kv, None
        return
    metadata = MetadataClient(access.metadata, name=GATEWAY, token=access.token)
    matcher = PrefixMatcher(metadata, window=kv.window, deadline_ms=config.gateway.match_deadline_ms)
    try:
        yield kv, matcher
    finally:
        matcher.close()


def open_http_socket(params: GatewayParams) -> socket.socket:
    """Bind the public port.

    Raises:
        ConfigError: Naming the address that is in use or does not exist.
    """
    family = socket.AF_INET6 if ":" in params.host else socket.AF_INET
    try:
        return socket.create_server((params.host, params.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {params.host}:{params.port}: {error.strerror}; choose another gateway.port"
            " or stop what uses it",
            param="gateway.port",
        ) from error


async def serve_gateway(
    params: GatewayParams,
    model: ServedModel,
    tenants: Tenants,
    sockets: Sockets,
    kv: KvNames | None = None,
    matcher: PrefixMatcher | None = None,
) -> None:
    """Answer HTTP on open sockets until SIGTERM or SIGINT; return when drained."""
    link = ControllerLink(GATEWAY, sockets.control, now_ns=time.monotonic_ns)
    gateway = Gateway(
        gateway=GATEWAY,
        reply_to=sockets.tokens.endpoint,
        params=params,
        model=model,
        link=link,
        tenants=tenants,
        clocks=Clocks(time.monotonic_ns, lambda: time.time_ns() // SECOND_NS),
        kv=kv,
        matcher=matcher,
    )
    server = _Server(
        uvicorn.Config(
            make_app(gateway),
            loop="none",
            http=BoundedHttpProtocol,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=int(LAST_WORDS_S),
        )
    )
    host, port = sockets.http.getsockname()[:2]
    log.info("gateway.up", host=host, port=port, model=model.names[0], open=tenants.is_open)
    async with asyncio.TaskGroup() as tasks:
        background = [
            tasks.create_task(_pump_control(sockets.control, link)),
            tasks.create_task(_pump_tokens(sockets.tokens, link)),
            tasks.create_task(_every_second(gateway)),
        ]
        drainer = tasks.create_task(_drain(gateway, server))
        await server.serve(sockets=[sockets.http])
        for task in (*background, drainer):
            task.cancel()
    log.info("gateway.down")


class _Server(uvicorn.Server):
    """Leaves signals to us: a stop begins with a drain, not with a closed port."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def _pump_control(control: Dealer, link: ControllerLink) -> None:
    while True:
        message = await control.recv_async()
        if isinstance(message, Connected):
            link.announce()
        else:
            link.on_message(message)


async def _pump_tokens(tokens: Pull, link: ControllerLink) -> None:
    while True:
        link.on_message(await tokens.recv_async())
        for _ in range(MAX_BATCH):
            message = tokens.recv()
            if message is None:
                break
            link.on_message(message)
        # Under a flood `recv_async` never waits; the streams have to be written all the same.
        await asyncio.sleep(0)


async def _every_second(gateway: Gateway) -> None:
    while True:
        gateway.link.announce()
        gateway.end_stalled_calls()
        await asyncio.sleep(1)


async def _drain(gateway: Gateway, server: uvicorn.Server) -> None:
    """On a signal: refuse new calls, let running ones end, cut what is left at the deadline."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await stopping.wait()
    gateway.start_draining()
    log.info("gateway.draining", num_calls=gateway.num_calls)
    try:
        async with asyncio.timeout(gateway.params.drain_s):
            await gateway.idle.wait()
    except TimeoutError:
        log.warning("gateway.calls_cut", num_calls=gateway.num_calls)
        gateway.abort_calls(
            OverloadError("the service is shutting down", code="service.draining", retry_after_s=1)
        )
    server.should_exit = True


def _token_endpoint(config: Config, folder: RunFolder) -> str:
    """Where workers send tokens: in the run folder, or TCP if some are on other hosts."""
    if len(config.hosts) == 1:
        return folder.token_socket()
    return f"tcp://{config.hosts[0].cnic}:*"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
