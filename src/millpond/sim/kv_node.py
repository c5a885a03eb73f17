"""The node daemon in virtual time: it answers loads, and their rows come at the speed of a link.

One object stands for the daemons of all hosts. Each rank has a link of its own, on which loads follow each
other in the order in which they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from millpond.config.sim_params import SimCostParams
from millpond.core.chance import Chance
from millpond.core.errors import InvariantBroken
from millpond.core.events import Loaded
from millpond.core.hashing import HashChain
from millpond.core.ids import DpRank, RequestId
from millpond.core.plan import LoadEnd, LoadStart, StateCopy, SwapIn
from millpond.core.units import BLOCK_TOKENS, SECOND_NS
from millpond.sim.kernel import Kernel
from millpond.sim.kv_pool import KvPool

ORDER = 1_500
Deliver = Callable[[Loaded], None]


@dataclass(frozen=True, slots=True)
class LoadFaults:
    """Chances that a load goes wrong, each 0 ... 1."""

    refuse_ratio: float = 0.0
    """Nothing is loaded, whatever the pool has."""
    break_ratio: float = 0.0
    """Some blocks do not come although they were promised."""
    repeat_ratio: float = 0.0
    """The answer comes again, later."""


@dataclass(slots=True)
class _Load:
    attempt: int
    digests: list[bytes]
    """Of the blocks that were promised."""
    ready_ns: int
    """When the last row is in the arena."""
    num_valid: int
    """Blocks of them that really come."""
    state_position: int
    approximate: frozenset[bytes]
    """Blocks, and the state, that are downstream of a replay."""
    num_swapped: int = 0
    """Leading blocks that an engine was told to take over."""


@dataclass(slots=True)
class KvNode:
    """Loads of all ranks, and what they keep.

    Args:
        chance: Decides which loads go wrong.
    """

    kernel: Kernel
    pool: KvPool
    costs: SimCostParams
    faults: LoadFaults
    chance: Chance
    _loads: dict[tuple[str, RequestId], _Load] = field(default_factory=dict[tuple[str, RequestId], _Load])
    _link_free_ns: dict[tuple[str, DpRank], int] = field(default_factory=dict[tuple[str, DpRank], int])
    _down_until_ns: int = 0
    num_refused: int = 0
    num_broken: int = 0

    @property
    def num_open(self) -> int:
        """Loads that nobody has ended."""
        return len(self._loads)

    @property
    def is_up(self) -> bool:
        """Whether the daemons answer and keep."""
        return self.kernel.now_ns >= self._down_until_ns

    # --- of a rank -----------------------------------------------------------------------------

    def start(self, owner: str, deliver: Deliver, order: LoadStart) -> None:
        """Begin a load. Its answer comes in any case."""
        chain = HashChain(order.kv.root)
        chain.extend(order.token_ids)
        num_blocks = self.pool.num_leading(chain.digests)
        refused = ""
        if not self.is_up or self._happens(self.faults.refuse_ratio):
            num_blocks = 0
            refused = "no_room" if self.is_up else "no_daemon"
            self.num_refused += 1
        digests = chain.digests[:num_blocks]
        breaks = bool(num_blocks) and self._happens(self.faults.break_ratio)
        state_position = self.pool.last_state(digests) if order.wants_state else -1
        load = _Load(
            attempt=order.attempt,
            digests=digests,
            ready_ns=self._ready_ns((owner, order.rank), num_blocks),
            num_valid=self.chance.below(num_blocks) if breaks else num_blocks,
            state_position=state_position,
            approximate=self.pool.approximate(digests, state_position),
        )
        if self._loads.setdefault((owner, order.request_id), load) is not load:
            raise InvariantBroken(f"{owner} loads {order.request_id} twice at once")
        answer = Loaded(
            request_id=order.request_id,
            attempt=order.attempt,
            num_tokens=num_blocks * BLOCK_TOKENS,
            state_position=load.state_position,
            is_approximate=bool(load.approximate),
            refused=refused,
        )
        delay_ns = self.costs.load_setup_ns
        self.kernel.after(delay_ns, ORDER, lambda: deliver(answer))
        if self._happens(self.faults.repeat_ratio):
            delay_ns += self.chance.below(SECOND_NS)
            self.kernel.after(delay_ns, ORDER, lambda: self._repeat(owner, load, deliver, answer))

    def swap_in(self, owner: str, order: SwapIn) -> list[bytes]:
        """Return the leading blocks that an engine gets of those that it asked for."""
        load = self._loads.get((owner, order.request_id))
        if load is None or len(order.block_table) > len(load.digests):
            raise InvariantBroken(f"{owner}: {order} without such a load")
        load.num_swapped = len(order.block_table)
        return load.digests[: load.num_valid]

    def approximate(self, owner: str, request_id: RequestId) -> frozenset[bytes]:
        """What of a load is downstream of a replay."""
        return self._loads[owner, request_id].approximate

    def state(self, owner: str, copy: StateCopy) -> bytes:
        """Return the snapshot that came with a load."""
        load = self._loads.get((owner, copy.request_id))
        if load is None or load.state_position != copy.position:
            raise InvariantBroken(f"{owner}: {copy} without such a load")
        return load.digests[load.state_position // BLOCK_TOKENS - 1]

    def ready_ns(self, owner: str, request_id: RequestId) -> int:
        """When all rows of a load are there; 0 if nothing is loaded."""
        load = self._loads.get((owner, request_id))
        return load.ready_ns if load is not None else 0

    def take_break(self, owner: str, request_id: RequestId) -> int | None:
        """Tell once of a load that breaks: leading tokens that are in place after all."""
        load = self._loads.get((owner, request_id))
        if load is None or load.num_valid >= load.num_swapped:
            return None
        self.num_broken += 1
        load.num_swapped = load.num_valid
        return load.num_valid * BLOCK_TOKENS

    def end(self, owner: str, order: LoadEnd) -> None:
        """Give a load back. Unknown ones are ignored."""
        load = self._loads.get((owner, order.request_id))
        if load is not None and load.attempt == order.attempt:
            del self._loads[owner, order.request_id]

    def lose(self, owner: str) -> None:
        """A group died: what it held is given back."""
        for key in [key for key in self._loads if key[0] == owner]:
            del self._loads[key]

    # --- faults --------------------------------------------------------------------------------

    def kill(self, down_ns: int, lost_ratio: float) -> None:
        """The daemons die and come back: open loads break off, and part of what was in memory is gone."""
        self._down_until_ns = self.kernel.now_ns + down_ns
        self.pool.forget(self.chance, lost_ratio)
        for load in self._loads.values():
            if load.num_valid:
                load.num_valid = self.chance.below(load.num_valid)

    def _repeat(self, owner: str, load: _Load, deliver: Deliver, answer: Loaded) -> None:
        """Answer once more, if the request was not ordered anew: a rank tells its loads apart."""
        if self._loads.get((owner, answer.request_id), load) is load:
            deliver(answer)

    def _happens(self, ratio: float) -> bool:
        return ratio > 0 and self.chance.uniform() < ratio

    def _ready_ns(self, link: tuple[str, DpRank], num_blocks: int) -> int:
        costs, now_ns = self.costs, self.kernel.now_ns
        begin_ns = max(now_ns + costs.load_setup_ns, self._link_free_ns.get(link, 0))
        num_bytes = num_blocks * BLOCK_TOKENS * costs.kv_bytes_per_token
        self._link_free_ns[link] = begin_ns + num_bytes * SECOND_NS // costs.load_bytes_per_s
        return self._link_free_ns[link]
