"""The token log of one sequence: which tokens the client has, and which message may add one.

The law: whatever arrives, in whatever order and however often, the delivered tokens are the tokens of
positions `num_prompt_tokens`, `num_prompt_tokens + 1`, ... each exactly once, and at most one ending.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

from millpond.core.events import TokenOut
from millpond.core.request import RequestSpec, token_ids


@dataclass(slots=True)
class TokenLog:
    """Delivered tokens of one sequence."""

    spec: RequestSpec
    """What is submitted now; its attempt is the only one that counts."""
    is_finished: bool = False
    next_position: int = field(init=False)
    num_found_tokens: int = field(init=False)
    """Prompt tokens that were kept before its first attempt; a later one may find what that one left."""
    output_ids: array[int] = field(init=False)
    """What the client has, int32."""
    _ahead: dict[int, TokenOut] = field(default_factory=dict[int, TokenOut])
    """Tokens that overtook an earlier one: the first token and the next may come by two sockets."""

    def __post_init__(self) -> None:
        self.next_position = self.spec.num_known_tokens
        self.num_found_tokens = self.spec.cached.num_tokens if self.spec.cached is not None else 0
        self.output_ids = token_ids(self.spec.output_ids)

    @property
    def num_delivered(self) -> int:
        """Output tokens the client was given."""
        return self.next_position - self.spec.num_prompt_tokens

    @property
    def has_gap(self) -> bool:
        """Tokens wait for an earlier one that has not come."""
        return bool(self._ahead)

    def add(self, token: TokenOut) -> list[TokenOut]:
        """Take one message from a worker.

        Returns:
            Tokens to deliver now, in order of position; empty for duplicates, for messages of another
            attempt, for anything after the end, and for tokens that have to wait for an earlier one.
        """
        if self.is_finished or token.attempt != self.spec.attempt or token.position < self.next_position:
            return []
        if token.position > self.next_position:
            self._ahead.setdefault(token.position, token)
            return []
        ready = [token]
        if self._ahead:
            while ready[-1].finish is None and (
                later := self._ahead.pop(self.next_position + len(ready), None)
            ):
                ready.append(later)
        for each in ready:
            self.output_ids.append(each.token_id)
        self.next_position += len(ready)
        if ready[-1].finish is not None:
            self.is_finished = True
            self._ahead.clear()
        return ready

    def as_of_now(self) -> RequestSpec:
        """The current attempt with the tokens delivered so far, to submit it again."""
        return replace(self.spec, output_ids=token_ids(self.output_ids))

    def next_attempt(self, lost_attempt: int) -> RequestSpec | None:
        """Start the next attempt after `lost_attempt` was lost.

        Returns:
            What to submit: the same sequence with all delivered tokens; None if the loss is old news.
        """
        if self.is_finished or lost_attempt != self.spec.attempt:
            return None
        self._ahead.clear()
        self.spec = replace(self.as_of_now(), attempt=lost_attempt + 1)
        return self.spec
