"""The controller process in virtual time: one loop around the `Dispatcher`."""

from __future__ import annotations

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
    Submit,
    Tick,
)
from millpond.core.plan import DispatchPlan
from millpond.core.units import MILLISECOND_NS
from millpond.sim.kernel import Kernel
from millpond.sim.network import Network

NAME = "controller"
ORDER = 0
TICK_NS = 500 * MILLISECOND_NS

Message = Submit | Cancel | Fetch | GroupUp | GroupDown | GatewayUp | GatewayDown


class SimController:
    """One life of the controller."""

    def __init__(self, dispatcher: Dispatcher, incarnation: int, kernel: Kernel, network: Network) -> None:
        self.dispatcher = dispatcher
        self.incarnation = incarnation
        self._kernel = kernel
        self._network = network
        self._is_plan_due = False
        self._is_dead = False
        self._last_state: ServiceState | None = None
        network.attach(NAME, ORDER, self._on_message)
        self._tick()

    def kill(self) -> None:
        """Die; what was on its way here is lost."""
        self._is_dead = True
        self._network.detach(NAME)

    def _on_message(self, message: object) -> None:
        assert isinstance(message, Message)  # noqa: S101 - the simulated peers send nothing else
        self.dispatcher.advance(self._kernel.now_ns, message)
        if isinstance(message, GatewayUp):
            self._network.send(NAME, message.gateway, self._state())
        self._plan_soon()

    def _tick(self) -> None:
        if not self._is_dead:
            self.dispatcher.advance(self._kernel.now_ns, Tick())
            self._plan_soon()
            self._kernel.after(TICK_NS, ORDER, self._tick)

    def _plan_soon(self) -> None:
        """Plan once after everything that arrived at this instant."""
        if not self._is_plan_due:
            self._is_plan_due = True
            self._kernel.after(0, ORDER, self._plan)

    def _plan(self) -> None:
        self._is_plan_due = False
        if self._is_dead:
            return
        plan = self.dispatcher.next_plan(self._kernel.now_ns)
        require_sound([self.dispatcher])
        if plan is not None:
            self._carry_out(plan)
        state = self._state()
        if state != self._last_state:
            self._last_state = state
            for gateway in sorted(self.dispatcher.gateways):
                self._network.send(NAME, gateway, state)

    def _carry_out(self, plan: DispatchPlan) -> None:
        send = self._network.send
        for assign in plan.assigns:
            for group in dict.fromkeys((assign.decode.group, assign.prefill.group)):
                send(NAME, group, assign)
        for abort in plan.aborts:
            send(NAME, abort.group, abort)
        for gateway, message in (*plan.resubmits, *plan.ended):
            send(NAME, gateway, message)
        for restart in plan.restarts:
            send(NAME, "supervisor", restart)
        for introduce in plan.introduce:
            send(NAME, introduce.group, introduce)

    def _state(self) -> ServiceState:
        return ServiceState(self.incarnation, self.dispatcher.max_model_len, self.dispatcher.is_ready)
