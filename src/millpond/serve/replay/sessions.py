"""What a session asks for, turn by turn, without saying when or with which tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millpond.core.chance import Chance


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of a prompt. Pieces of one name begin with the same tokens wherever they stand."""

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt and the length of its answer."""

    num_kept: int
    """Leading tokens that the session has already, of its last prompt and answer."""
    pieces: tuple[Piece, ...]
    """What follows them."""
    num_output_tokens: int
    """>= 1; the answer has exactly so many."""
    delay_ns: int = 0
    """Pause before it, after the answer of the turn before: tools, or a person who reads."""
    text: str = ""
    """A message instead of tokens: the turn is a chat, with all turns before it."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt; of a chat it is not known."""
        return self.num_kept + sum(piece.num_tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Session:
    """One agent."""

    name: str
    turns: tuple[Turn, ...]
    begin_ns: int = 0
    """When its first turn comes, since the start of the trace."""


def cut_to_context(sessions: Iterable[Session], max_model_len: int) -> tuple[list[Session], int]:
    """End every session before the first turn that does not fit the model; also how many turns that cost."""
    kept: list[Session] = []
    num_cut = 0
    for session in sessions:
        fits = 0
        for turn in session.turns:
            if turn.num_prompt_tokens + turn.num_output_tokens > max_model_len:
                break
            fits += 1
        num_cut += len(session.turns) - fits
        if fits:
            kept.append(Session(session.name, session.turns[:fits], session.begin_ns))
    return kept, num_cut


def piece_tokens(piece: Piece, vocabulary: Sequence[int]) -> list[int]:
    """Tokens of a piece, by its name alone."""
    stream = Chance(0, piece.name)
    return [vocabulary[stream.below(len(vocabulary))] for _ in range(piece.num_tokens)]
