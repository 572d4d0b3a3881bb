"""How many tokens are drafted at a time: what a draft can gain, and a choice that follows what is measured.

Leviathan et al., Fast Inference from Transformers via Speculative Decoding, https://arxiv.org/abs/2211.17192,
section 3.3; here a draft step costs d and verification v plain steps, since both read a cache.
"""

from __future__ import annotations


def written(accepted: float, length: int) -> float:
    """Tokens of a round on average, that which verification draws included."""
    return sum(accepted**i for i in range(length + 1))


def gain(accepted: float, length: int, draft: float, verify: float) -> float:
    """How many times as fast as plain decoding drafts are, (1 - a^(k+1)) / ((1 - a)(k d + v)).

    Args:
      accepted: a, the share of drafted tokens that are accepted, of those that follow accepted ones.
      length: k, tokens drafted before each verification; with 0 a round is a plain step that costs v.
      draft, verify: d and v, the time of a draft step and of verification over that of a plain step.
    """
    return written(accepted, length) / (length * draft + verify)


def best_length(accepted: float, draft: float, verify: float, most: int) -> int:
    """The length of 0 .. ``most`` that gains most; 0 where none gains. Of equal ones the shortest."""
    gains = [1.0, *(gain(accepted, k, draft, verify) for k in range(1, most + 1))]
    return max(range(most + 1), key=gains.__getitem__)


PROBE = 8
"""Tokens of a piece that only measures. Where nothing stands each costs a round: several plain steps."""

AGAIN = 16
"""Pieces after which the other way, drafting or not, is measured once more; then after twice as many."""

FORGETS = 0.8
"""What a round of an earlier piece counts beside one of the next, in acceptance and in seconds."""


CLEARLY = 1.1
"""By how much shorter drafts must gain, if verification cost by the token, to be tried."""


def draft_lengths(most: int) -> tuple[int, ...]:
    """Of drafts that programs are made for: the longest, and half of it."""
    return tuple(dict.fromkeys((most, (most + 1) // 2)))


class DraftLength:
    """Chooses how many tokens are drafted at a time, or none, by seconds and acceptance of earlier pieces.

    Longest drafts come first, then plain steps, then drafts of half the length if they can gain; from then on
    what gains most. Texts do not depend on it, so the clock may decide. Without one (several processes, which
    must agree) drafts are always longest.
    """

    def __init__(self, most: int) -> None:
        self.most, self.next = most, most
        self._seconds: dict[int, float] = {}  # by length of drafts; 0 is plain steps
        self._rounds: dict[int, float] = {}  # in those seconds
        self._judged = self._accepted = 0.0
        self._drafts: bool | None = None  # is the better way, as far as is known
        self._wait = self._left = AGAIN  # pieces between measures of the other way, and until the next

    def tokens(self, every: int) -> int:
        """Tokens of the next piece, at most ``every``: few where a way is tried that may be slow."""
        known = self._untried() is None and self.next == self._best()
        return every if known else min(every, PROBE)

    def saw(self, length: int, rounds: int, judged: int, accepted: int, seconds: float | None) -> None:
        """Learns from a piece, and chooses the next length.

        Args:
          length: of its drafts; 0 for plain steps.
          rounds: verifications, or plain steps.
          judged, accepted: drafted tokens that followed accepted ones, and those that were accepted.
          seconds: that it took; None where something else was part of it, such as compiling.
        """
        if judged:
            self._judged = FORGETS * self._judged + judged
            self._accepted = FORGETS * self._accepted + accepted
        if seconds is not None and rounds:
            self._seconds[length] = FORGETS * self._seconds.get(length, 0.0) + seconds
            self._rounds[length] = FORGETS * self._rounds.get(length, 0.0) + rounds
        self._left -= 1
        if (untried := self._untried()) is not None:
            self.next = untried
            return
        self.next = self._best()
        if bool(self.next) != self._drafts:
            self._drafts = bool(self.next)
            self._wait = self._left = AGAIN
        elif self._left <= 0:
            self.next = 0 if self._drafts else self.most
            self._wait = self._left = 2 * self._wait

    @property
    def _acceptance(self) -> float:
        return self._accepted / self._judged if self._judged else 0.0

    def _speed(self, length: int) -> float:
        """Tokens a second of drafts of a length whose time is known."""
        return written(self._acceptance, length) / self._round(length)

    def _round(self, length: int) -> float:
        """Seconds of one."""
        return self._seconds[length] / self._rounds[length]

    def _best(self) -> int:
        """Of those whose times are known; of equal ones the shortest."""
        return max(sorted(self._seconds), key=self._speed)

    def _untried(self) -> int | None:
        """The length to be measured next; None: all that can gain are."""
        for length in (self.most, 0):
            if length not in self._seconds:
                return length
        shorter = draft_lengths(self.most)[-1]
        if shorter in self._seconds:
            return None
        cheapest = self._round(self.most) * (shorter + 1) / (self.most + 1)
        gains = written(self._acceptance, shorter) / cheapest > CLEARLY * self._speed(self._best())
        return shorter if gains else None
