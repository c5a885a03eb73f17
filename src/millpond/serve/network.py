"""A process's membership in the control network: its ZeroMQ context, and who may reach whom.

    ipc://   on one host: sockets in a folder that only this user can enter
    tcp://   elsewhere: CURVE, with the cluster's keys on both ends

Nothing else is bound or connected.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import zmq
from zmq.auth.thread import ThreadAuthenticator

from millpond.core.errors import ConfigError
from millpond.serve.keys import ClusterKeys, check_socket_path, claim_socket_path

ZAP_DOMAIN = "millpond"


class _ClientList:
    """Admits the cluster's client key and nobody else (asked by pyzmq's authenticator)."""

    def __init__(self, keys: ClusterKeys) -> None:
        self._client_key = keys.client_public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._client_key  # both Z85; a public key, so no timing to hide


class Network:
    """Owner of this process's ZeroMQ context and of its membership in the cluster.

    Args:
        keys: Needed for tcp:// endpoints only.
    """

    def __init__(self, keys: ClusterKeys | None = None) -> None:
        self.context = zmq.Context()
        self._keys = keys
        self._authenticator: ThreadAuthenticator | None = None

    def bind(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        """Bind `socket`, as a server where keys apply.

        Returns:
            The endpoint peers connect to; `tcp://host:*` has become a port.

        Raises:
            ConfigError: In use, not permitted, not private, or without the keys it needs.
        """
        if endpoint.startswith("ipc://"):
            claim_socket_path(_ipc_path(endpoint))  # libzmq itself would take over a live process's socket
        else:
            keys = self._keys_for(endpoint)
            if self._authenticator is None:
                self._authenticator = ThreadAuthenticator(self.context)
                self._authenticator.start()
                self._authenticator.configure_curve_callback(ZAP_DOMAIN, _ClientList(keys))
            socket.zap_domain = ZAP_DOMAIN.encode()
            socket.curve_server = True
            socket.curve_secretkey = keys.server_secret.encode()
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot bind {endpoint}: {error.strerror}") from error
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Connect `socket`, as a client where keys apply. Goes on trying in the background.

        Raises:
            ConfigError: The endpoint is not private or lacks the keys it needs.
        """
        if endpoint.startswith("ipc://"):
            check_socket_path(_ipc_path(endpoint))
        else:
            keys = self._keys_for(endpoint)
            socket.curve_serverkey = keys.server_public.encode()
            socket.curve_publickey = keys.client_public.encode()
            socket.curve_secretkey = keys.client_secret.encode()
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot connect to {endpoint}: {error.strerror}") from error

    def close(self) -> None:
        """Close the context. Close every socket first."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self.context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keys_for(self, endpoint: str) -> ClusterKeys:
        if not endpoint.startswith("tcp://"):
            raise ConfigError(f"{endpoint} is neither an ipc:// nor a tcp:// endpoint")
        if self._keys is None:
            raise ConfigError(f"{endpoint} leaves the host's private folder and needs the cluster's keys")
        return self._keys


def _ipc_path(endpoint: str) -> Path:
    return Path(endpoint.removeprefix("ipc://"))
