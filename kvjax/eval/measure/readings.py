"""Full prefills kept for the next policy: one serves all that cut the same prompts afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

from kvjax.decode import PromptActivations as Reading

MOST = 3 * 2**30
"""Bytes of readings that are kept: 200 prompts of 2,048 tokens of the embedded model."""


@dataclasses.dataclass
class Readings:
    """Readings by what was read.

    Attributes:
      most: bytes that are kept; the one not asked for longest goes first.
      kept: the readings, the one asked for last at the end.
      made: how many were made.
    """

    most: int = MOST
    kept: dict[Hashable, Reading] = dataclasses.field(default_factory=dict)
    made: int = 0

    def of(self, key: Hashable, read: Callable[[], Reading]) -> Reading:
        """The reading under this key; read now if it is not there."""
        found = self.kept.pop(key, None)
        if found is None:
            found = read()
            self.made += 1
        while self.kept and sum(one.nbytes for one in self.kept.values()) + found.nbytes > self.most:
            self.kept.pop(next(iter(self.kept)))
        self.kept[key] = found
        return found
