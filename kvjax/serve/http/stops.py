"""Stop strings in a text that comes in pieces, wherever the pieces' borders are."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Lets text through up to the first stop string that is complete.

    The text ends where a stop string is complete first; of those complete at that character the longest is
    cut away. So the outcome depends on the text alone and not on its pieces. What may be the beginning of a
    stop string is held back until it is known.

    Attributes:
      hit: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._held = ""
        self.hit: str | None = None

    def feed(self, piece: str) -> str:
        """The text that is certain now."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        ends = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, size, self.hit = min(ends)
            self._held = ""
            return text[: end + size]
        keep = self._beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        return next(
            (n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0
        )
