"""Static sizes of a call of gated's Pallas bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pallas_kernels.gated.vjp import Rule
    from pallas_kernels.tuning import Blocks


class Plan(NamedTuple):
    """t is a multiple of both blocks; t and h are padded. ``sizes`` has what the compiler is told."""

    b: int
    n: int
    heads: int
    t: int
    h: int
    bq: int
    bk: int
    sizes: Blocks
    rule: Rule

    @property
    def nq(self) -> int:
        """Blocks of queries."""
        return self.t // self.bq

    @property
    def nk(self) -> int:
        """Blocks of keys."""
        return self.t // self.bk

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.n // self.heads
