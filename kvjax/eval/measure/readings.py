"""Full prefills kept for the next policy: one serves all that cut the same prompts afterwards."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Hashable

from kvjax.decode import Reading

LEAST = 3 * 2**30
"""Bytes of readings that are kept on a small machine; else a quarter of its memory."""


def most_bytes() -> int:
    """Bytes of readings that are kept on this machine."""
    try:
        return max(LEAST, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    except (ValueError, OSError, AttributeError):  # a system that does not say
        return LEAST


@dataclasses.dataclass
class Readings:
    """Readings by what was read.

    Attributes:
      most: bytes that are kept; the one not asked for longest goes first.
      kept: the readings, the one asked for last at the end.
      made: how many were made.
    """

    most: int = dataclasses.field(default_factory=most_bytes)
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
