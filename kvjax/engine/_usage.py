"""What rows hold, in bytes and positions: from lengths the host knows, or from the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

from kvjax import metrics
from kvjax.cache import ring as rings
from kvjax.cache.pages import slots
from kvjax.cache.state import KVState
from kvjax.engine._request import Held, KVUsage
from kvjax.engine._segment import Lengths
from kvjax.sharding.specs import HEADS, of_state

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def live_slots(state: KVState, known: Lengths) -> Int[np.ndarray, "L B K"]:
    """Live slots of every stream, ring included."""
    pools, found = iter(known.lists), []
    for layer in state.layers:
        ring = np.minimum(known.seen, layer.ring.window)[:, None]
        paged = sum(next(pools).sum(axis=-1) for _ in layer.pools)
        found.append(np.broadcast_to(ring + paged, (len(known.seen), layer.ring.k.shape[1])))
    return np.stack(found)


def live_bytes(state: KVState, known: Lengths) -> Float[np.ndarray, " B"]:
    """Bytes of each row's live slots, with scales, metadata and φ, as ``kvjax.nbytes`` counts them."""
    rows = len(known.seen)
    found, pools = np.zeros(rows), iter(known.lists)
    for layer in state.layers:
        heads = layer.ring.k.shape[1]
        found += np.minimum(known.seen, layer.ring.window) * heads * metrics.ring_slot(layer.ring)
        for pages in layer.pools:
            lists = next(pools)
            slot, page = metrics.page_costs(pages)
            found += lists.sum(axis=(1, 2)) * slot + (-(-lists // pages.size)).sum(axis=(1, 2)) * page
        summary = sum(leaf.nbytes for leaf in jax.tree.leaves(layer.summary))
        found += summary / rows * (known.seen > 0)
    return found


def usages(network: metrics.Network, state: KVState, known: Lengths) -> list[KVUsage]:
    """Of all rows."""
    layers, live = live_slots(state, known), live_bytes(state, known)
    dtype = state.layers[0].ring.k.dtype
    return [
        KVUsage(
            seen=int(seen),
            kept=float(layers[:, row].mean()),
            live=int(live[row]),
            full=metrics.full_bytes(network, int(seen), dtype),
            layers=layers[:, row].copy(),
        )
        for row, seen in enumerate(known.seen)
    ]


@jax.jit
def _positions(state: KVState, row: jax.Array) -> list[tuple[jax.Array, list[jax.Array]]]:
    """Of a row: positions in the ring [W], and in each pool [K, C], EMPTY where there is none; by layer."""
    found = []
    for layer in state.layers:
        ring = rings.positions(state.length, layer.ring.window)[row]
        # Ids of pages count within a device.
        pools = [
            state.mesh.each(lambda own: slots(own).pos, [pages], [of_state(pages)], HEADS)
            for pages in layer.pools
        ]
        found.append((ring, [pos[row] for pos in pools]))
    return found


def held(state: KVState, row: int) -> tuple[tuple[Held, ...], ...]:
    """What each stream of a row holds, from the device."""
    layers = jax.device_get(_positions(state, np.int32(row)))
    found = []
    for layer, (ring, pools) in zip(state.layers, layers):
        recent = np.sort(ring[ring >= 0])
        heads = []
        for head in range(layer.ring.k.shape[1]):
            exact, codes = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
            for pages, pos in zip(layer.pools, pools):
                mine = pos[head]
                (exact if pages.scales is None else codes).append(mine[mine >= 0])
            heads.append(
                Held(ring=recent, pages=np.sort(np.concatenate(exact)), codes=np.sort(np.concatenate(codes)))
            )
        found.append(tuple(heads))
    return tuple(found)
