"""A client that talks: each turn is sent when the one before has ended, with all that was said."""

from __future__ import annotations

from collections.abc import Callable

from millpond.core.ids import GatewayId, RequestId
from millpond.core.request import RequestSpec, SamplingParams, token_ids
from millpond.core.units import SECOND_NS
from millpond.sim.kernel import Kernel
from millpond.sim.report import FINISHED
from millpond.sim.sim_engine import VOCAB_SIZE
from millpond.sim.sim_gateway import Stream
from millpond.sim.workload import Session

ORDER = 2_000


class SessionClient:
    """One session.

    Args:
        number: Tells sessions apart; decides the tokens of its prompts.
        submit: Called with each turn; another call of `on_end` follows it.
    """

    def __init__(
        self,
        session: Session,
        number: int,
        gateway: GatewayId,
        kernel: Kernel,
        submit: Callable[[SessionClient, RequestSpec], None],
    ) -> None:
        self._session = session
        self._number = number
        self._gateway = gateway
        self._kernel = kernel
        self._submit = submit
        self._num_turns = 0
        self._said = token_ids()
        kernel.at(session.time_ns, ORDER, self._say)

    def on_end(self, stream: Stream) -> bool:
        """A turn has ended. Returns whether another one follows."""
        self._said = stream.spec.prompt_ids[:]
        self._said.extend(stream.output_ids)
        if stream.reason not in FINISHED or self._num_turns == len(self._session.turns):
            return False
        self._kernel.after(int(self._session.pause_s * SECOND_NS), ORDER, self._say)
        return True

    def _say(self) -> None:
        num_new, num_output = self._session.turns[self._num_turns]
        begin = len(self._said)
        self._said.extend((self._number * 7_919 + begin + i) % VOCAB_SIZE for i in range(num_new))
        spec = RequestSpec(
            request_id=RequestId(f"s{self._number}-{self._num_turns}"),
            attempt=0,
            gateway=self._gateway,
            reply_to=self._gateway,
            prompt_ids=self._said[:],
            sampling=SamplingParams(max_tokens=num_output, seed=self._number * 1_000 + self._num_turns),
            state_restore=self._session.state_restore,
        )
        self._num_turns += 1
        self._submit(self, spec)
