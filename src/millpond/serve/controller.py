"""The controller process: one loop around the `Dispatcher`, and the status that people read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict

import structlog

from millpond.control.dispatcher import Dispatcher
from millpond.control.invariants import require_sound
from millpond.core.events import (
    Cancel,
    Fetch,
    GatewayDown,
    GatewayUp,
    GroupDown,
    GroupUp,
    ServiceState,
    StatusQuery,
    StatusReport,
    Submit,
    Telemetry,
    Tick,
)
from millpond.core.ids import GroupId
from millpond.core.plan import DispatchPlan
from millpond.core.units import MILLISECOND_NS, SECOND_NS
from millpond.serve.rpc import Router, wait_any

TICK_NS = 500 * MILLISECOND_NS
CHECK_NS = 10 * SECOND_NS

log = structlog.get_logger(__name__)


class Controller:
    """Loop of the controller.

    Args:
        incarnation: Larger after each restart; gateways re-submit when it changes.
    """

    def __init__(self, dispatcher: Dispatcher, router: Router, incarnation: int) -> None:
        self._dispatcher = dispatcher
        self._router = router
        self._incarnation = incarnation
        self._telemetry: dict[GroupId, Telemetry] = {}
        self._num_unsent = 0
        self._undelivered: dict[str, list[object]] = {}
        """Messages by gateway that could not be sent."""
        self._last_state: ServiceState | None = None
        self._last_tick_ns = 0
        self._last_check_ns = 0

    def run(self, is_stopping: Callable[[], bool]) -> None:
        """Serve until `is_stopping`."""
        while not is_stopping():
            while (received := self._router.recv()) is not None:
                self._on_message(*received)
            now_ns = time.monotonic_ns()
            if now_ns - self._last_tick_ns >= TICK_NS:
                self._last_tick_ns = now_ns
                self._dispatcher.advance(now_ns, Tick())
            if now_ns - self._last_check_ns >= CHECK_NS:
                self._last_check_ns = now_ns
                require_sound([self._dispatcher])
            plan = self._dispatcher.next_plan(now_ns)
            if plan is not None:
                self._carry_out(plan)
            self._announce()
            wait_any((self._router,), max(self._last_tick_ns + TICK_NS - now_ns, MILLISECOND_NS) / SECOND_NS)

    def _on_message(self, peer: str, message: object) -> None:
        now_ns = time.monotonic_ns()
        match message:
            case GatewayDown():
                self._undelivered.pop(message.gateway, None)
                self._dispatcher.advance(now_ns, message)
            case Fetch() | Submit() | Cancel() | GroupUp() | GroupDown():
                if isinstance(message, GroupUp | GroupDown):
                    log.info("controller.group", kind=type(message).__name__, group=message.group)
                self._dispatcher.advance(now_ns, message)
            case GatewayUp():
                self._dispatcher.advance(now_ns, message)
                self._send(message.gateway, self._state())
                for kept in self._undelivered.pop(message.gateway, ()):
                    self._send_gateway(message.gateway, kept)
            case Telemetry():
                self._telemetry[message.group] = message
            case StatusQuery():
                self._send(peer, StatusReport(message.query_id, json.dumps(self.status())))
            case _:
                log.warning("controller.message_unexpected", kind=type(message).__name__, peer=peer)

    def _carry_out(self, plan: DispatchPlan) -> None:
        for assign in plan.assigns:
            for group in dict.fromkeys((assign.decode.group, assign.prefill.group)):
                self._send_group(group, assign)
        for abort in plan.aborts:
            self._send_group(abort.group, abort)
        for gateway, resubmit in plan.resubmits:
            log.warning("controller.resubmit", request_id=resubmit.request_id, why=resubmit.why)
            self._send_gateway(gateway, resubmit)
        for gateway, ended in plan.ended:
            self._send_gateway(gateway, ended)
        for restart in plan.restarts:
            log.warning("controller.group_silent", group=restart.group, why=restart.why)
            self._send("supervisor", restart)
        for introduce in plan.introduce:
            self._send(introduce.group, introduce)

    def _send_group(self, group: GroupId, message: object) -> None:
        """Send, or take the group for gone: its picture of its work would differ from ours from now on.

        If it lives, it introduces itself again, and what it holds is sorted out then.
        """
        incarnation = self._dispatcher.group_incarnation(group)
        if not self._send(group, message) and incarnation is not None:
            self._on_message(group, GroupDown(group, incarnation, "not reachable"))

    def _send_gateway(self, gateway: str, message: object) -> None:
        """Send, or keep it until the gateway announces itself again."""
        if not self._send(gateway, message):
            self._undelivered.setdefault(gateway, []).append(message)

    def _send(self, peer: str, message: object) -> bool:
        is_sent = self._router.send(peer, message)
        if not is_sent:
            self._num_unsent += 1
            log.warning("controller.peer_unreachable", peer=peer, kind=type(message).__name__)
        return is_sent

    def _announce(self) -> None:
        state = self._state()
        if state != self._last_state:
            self._last_state = state
            for gateway in sorted(self._dispatcher.gateways):
                self._send(gateway, state)

    def _state(self) -> ServiceState:
        return ServiceState(self._incarnation, self._dispatcher.max_model_len, self._dispatcher.is_ready)

    def status(self) -> dict[str, object]:
        """Return what `millpond status` and `/metrics` show, as plain JSON values."""
        groups: dict[str, object] = {}
        for name, (role, views) in self._dispatcher.group_views().items():
            telemetry = self._telemetry.get(name)
            groups[name] = {
                "role": role,
                "incarnation": self._dispatcher.group_incarnation(name),
                "pid": telemetry.pid if telemetry else None,
                "ranks": [asdict(view) for view in views],
                "values": dict(telemetry.values) if telemetry else {},
            }
        return {
            "controller": {
                "incarnation": self._incarnation,
                "is_ready": self._dispatcher.is_ready,
                "max_model_len": self._dispatcher.max_model_len,
                "num_unsent": self._num_unsent,
            },
            "gateways": sorted(self._dispatcher.gateways),
            "groups": groups,
            "nodes": {
                name: {
                    "incarnation": telemetry.incarnation,
                    "pid": telemetry.pid,
                    "values": dict(telemetry.values),
                }
                for name, telemetry in self._telemetry.items()
                if name not in groups
            },
            "queue": {
                "num_queued": self._dispatcher.num_queued,
                "num_requests": self._dispatcher.num_requests,
            },
        }
