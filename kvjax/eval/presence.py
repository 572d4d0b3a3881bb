"""Which tokens are still there: per layer, KV head and position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import pages as paging
from kvjax.cache import ring as rings
from kvjax.cache.state import KVState

if TYPE_CHECKING:
    from jaxtyping import Bool


@jax.jit
def _present(state: KVState) -> jax.Array:
    found = []
    row = jnp.arange(state.rows)
    for room in state.layers:
        heads = room.ring.k.shape[1]
        mask = jnp.zeros((state.rows, heads, state.context), bool)
        held = rings.positions(state.length, room.ring.window)
        held = jnp.where(held >= 0, held, state.context)  # out of range: dropped
        mask = mask.at[row[:, None], :, held].set(True, mode="drop")
        if room.pages is not None:
            slots = paging.slots(room.pages)
            pos = jnp.where(slots.live, slots.pos, state.context)
            head = jnp.arange(heads)[None, :, None]
            mask = mask.at[row[:, None, None], head, pos].set(True, mode="drop")
        found.append(mask)
    return jnp.stack(found)


def present(state: KVState) -> Bool[np.ndarray, "L B K C"]:
    """Is the token at each of the C = ``state.context`` positions held by this stream?"""
    return np.asarray(_present(state))


def span_retention(mask: Bool[np.ndarray, "L K C"], needed: Bool[np.ndarray, " T"]) -> float | None:
    """Share of (layer, KV head, needed token) triples that are held; None where nothing is needed."""
    at = np.flatnonzero(needed)
    return float(mask[:, :, at].mean()) if len(at) else None
