"""The cache when an answer begins: its slots, its tokens and its bytes; and pools that always have one size.

How full a compressed cache is depends on the text. A pool in a size class of its own would make programs of
their own for every task, so bytes are taken from the state as it is, and the answer is walked through a copy
whose pools hold whatever their page lists can point to.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import numpy as np

from kvjax import metrics
from kvjax.cache import pool
from kvjax.cache.pages import Pages
from kvjax.cache.state import KVState, LayerCache
from kvjax.policy import Policy

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

_resize = jax.jit(pool.resize, static_argnums=1)


def roomy(policy: Policy, state: KVState, arriving: int) -> KVState:
    """The state with pools that never have to grow, whatever it holds and whatever comes.

    Args:
      policy: whose state it is.
      state: left as it is.
      arriving: most tokens of a row that come at a time.
    """
    bounds = policy.bounds(state.context, arriving)

    def grown(pages: Pages, most: int | None) -> Pages:
        rows, heads, lists, entries = pages.table.shape
        # What ``reserve`` asks for at most: two lists may each end in a page of their own; where nothing
        # bounds a stream, every list is given a page that is part full and one to come.
        spare = lists * (1 + -(-arriving // pages.size)) if most is None else lists - 1
        return _resize(pages, max(pages.count, rows * heads * (entries + spare)))

    layers = [
        x.with_rooms([grown(pages, most) for pages, most in zip(x.rooms, bounds)]) for x in state.layers
    ]
    return dataclasses.replace(state, layers=tuple(layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """What a batch holds when the answer begins.

    Attributes:
      slots: live slots of each stream.
      mask: which positions each stream holds.
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
        """Live bytes of a row whose streams hold so many slots together."""
        return slots * self.slot + self.fixed


def contents(state: KVState) -> Contents:
    """Reads a state from the device."""
    slots = np.asarray(metrics.live_slots(state))
    live = metrics.nbytes(state).live
    at = metrics.ROOMS.index("summary")
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


def summary_tokens(layer: LayerCache, *, by_bytes: bool) -> float:
    """What reading φ once costs a KV head, in tokens (K and V of one position in the model's dtype).

    By the paper's count (https://arxiv.org/abs/2604.05438) a summary is d_φ/2 + d_φ/D tokens; by bytes it is
    as much more as its floats are wider than the model's.
    """
    rows, heads, _, dim = layer.ring.k.shape
    leaves = jax.tree.leaves(layer.summary)
    size = sum(leaf.nbytes / layer.ring.k.dtype.itemsize if by_bytes else leaf.size for leaf in leaves)
    return size / (rows * heads) / (2 * dim)
