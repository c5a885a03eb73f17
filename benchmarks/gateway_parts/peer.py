"""The service as a gateway sees it: answers each submission with a token at once, then at a steady pace.

Run as `python -m benchmarks.gateway_parts.peer RUN_DIR STEP_US`. Tokens of all sequences of one step travel
in one message, as a worker sends them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from millpond.core.events import Cancel, GatewayUp, ServiceState, Submit, TokensOut
from millpond.core.ids import GroupId, RequestId
from millpond.core.plan import TokenOut
from millpond.core.request import FinishReason, RequestSpec
from millpond.serve.rpc import Network, Push, Router, wait_any
from millpond.serve.run_folder import GATEWAY, RunFolder, control_endpoint

MAX_MODEL_LEN = 8192
FIRST_WORD = 300
"""Token ids from here on have four or five characters of text in the synthetic vocabulary."""
IDLE_S = 1.0


def run(folder: RunFolder, step_ns: int) -> None:
    """Serve until killed."""
    config = folder.load_config()
    running: dict[RequestId, tuple[RequestSpec, int]] = {}
    with (
        Network(folder.load_keys()) as network,
        Router(network, control_endpoint(config, folder)) as router,
        Push(network, folder.token_socket()) as push,
    ):
        next_step_ns = 0
        while True:
            while (received := router.recv()) is not None:
                match received[1]:
                    case GatewayUp():
                        router.send(GATEWAY, ServiceState(1, MAX_MODEL_LEN, is_ready=True))
                    case Submit(spec=spec):
                        push.send(TokensOut(GroupId("d0"), (_token(spec, 0),)))
                        if spec.sampling.max_tokens > 1:
                            running[spec.request_id] = (spec, 1)
                    case Cancel(request_id=request_id):
                        running.pop(request_id, None)
            now_ns = time.monotonic_ns()
            if running and now_ns >= next_step_ns:
                next_step_ns = max(next_step_ns + step_ns, now_ns)
                push.send(TokensOut(GroupId("d0"), tuple(_step(running))))
            wait_s = (next_step_ns - time.monotonic_ns()) / 1e9 if running else IDLE_S
            if wait_s > 0:
                wait_any((router,), wait_s)


def _step(running: dict[RequestId, tuple[RequestSpec, int]]) -> list[TokenOut]:
    tokens = []
    for request_id, (spec, index) in tuple(running.items()):
        tokens.append(_token(spec, index))
        if index + 1 == spec.sampling.max_tokens:
            del running[request_id]
        else:
            running[request_id] = (spec, index + 1)
    return tokens


def _token(spec: RequestSpec, index: int) -> TokenOut:
    finish = FinishReason.LENGTH if index + 1 == spec.sampling.max_tokens else None
    position = spec.num_prompt_tokens + index
    return TokenOut(spec.request_id, 0, position, FIRST_WORD + index % 3000, finish=finish)


if __name__ == "__main__":
    run(RunFolder(Path(sys.argv[1])), int(sys.argv[2]) * 1000)
