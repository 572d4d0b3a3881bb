"""The cache when an answer begins: its slots, its tokens and its bytes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from kvjax import metrics
from kvjax.cache.state import KVState

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """What a batch holds when the answer begins.

    Attributes:
      slots: live slots of each KV head.
      mask: which positions each KV head holds.
      length: tokens each row has seen.
      slot: bytes of a live slot, with its share of scales and metadata, mean over the batch.
      fixed: bytes of a row that do not grow with its slots: the completion's summary.
    """

    slots: Int[np.ndarray, "L B K"]
    mask: Bool[np.ndarray, "L B K C"]
    length: Int[np.ndarray, " B"]
    slot: float
    fixed: float

    def bytes(self, slots: float) -> float:
        """Live bytes of a row whose KV heads hold so many slots together."""
        return slots * self.slot + self.fixed


def contents(state: KVState) -> Contents:
    """Reads a state from the device."""
    slots = np.asarray(metrics.live_slots(state))
    live = metrics.nbytes(state).live
    at = metrics.STORES.index("summary")
    return Contents(
        slots=slots,
        mask=np.asarray(metrics.present(state)),
        length=np.asarray(state.length),
        slot=float(np.delete(live, at, axis=-1).sum()) / max(1, int(slots.sum())),
        fixed=float(live[..., at].sum()) / state.rows,
    )


def span_retention(mask: Bool[np.ndarray, "L K C"], needed: Bool[np.ndarray, " T"]) -> float | None:
    """Share of (layer, KV head, needed token) triples that are held; None where nothing is needed."""
    at = np.flatnonzero(needed)
    return float(mask[:, :, at].mean()) if len(at) else None
