"""Find stop strings in a growing text, however it is split into pieces."""

from __future__ import annotations


class StopMatcher:
    """Cuts a text before the first stop string.

    The first one is the one whose last character comes earliest; of two that end together the longer is
    cut. So the result is the same for every split of the text, also one character at a time.

        text      ... the answer is EN|D           stop "END"
        emitted   ... the answer is                "EN" is held back until it is a match or cannot be one
    """

    __slots__ = ("_held", "_max_held", "_stop")

    def __init__(self, stop: tuple[str, ...]) -> None:
        """Args:
        stop: Stop strings, none of them empty.
        """
        if "" in stop:
            raise ValueError("an empty stop string matches everywhere")
        self._stop = stop
        self._max_held = max(map(len, stop), default=1) - 1
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece.

        Returns:
            (text that no stop string can reach any more, whether a stop string was found). After a find
            the text ends; do not push again.
        """
        text = self._held + text
        matches = [(begin + len(stop), begin) for stop in self._stop if (begin := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            return text[: min(matches)[1]], True
        border = len(text) - self._num_held(text)
        self._held = text[border:]
        return text[:border], False

    def flush(self) -> str:
        """What was held back, once the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        for length in range(min(self._max_held, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
