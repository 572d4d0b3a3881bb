"""Bytes of a state: live (slots that hold a token) and allocated (what the device gave it).

Methods are compared at equal live bytes; allocated and peak are reported too. "Saved" means allocated bytes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import brought, per_head
from kvjax.cache import hosted as hosting
from kvjax.cache import ring as rings
from kvjax.cache.pages import Pages
from kvjax.cache.ring import Ring
from kvjax.cache.state import KVState, LayerCache
from kvjax.sharding import head_order as kv_heads
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.specs import HEADS, ROWS, TENSOR, of_state

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from kvjax.types import Network

STORES = ("ring", "pages", "demoted", "summary")
"""The places in which a layer keeps tokens: fields of ``LayerCache``. What the device holds beside pages in
host memory counts as pages."""


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes of a state.

    Attributes:
      live: float64 [L, K, 4]: slots that hold a token, with their scales and metadata, per layer, KV head
        and store (``STORES``); rows added up.
      allocated: float64 [L, 4]: device bytes per layer and store, page tables and free pages included.
      peak: (live, allocated) at their highest so far.
      host: (live, allocated) in host memory, of pages that are full (``host``); in no other figure here.
      summary_reads: tokens (K and V of one position) that reading φ once costs a KV head: by the paper's
        count, and by its bytes; 0 without a completion part.
    """

    live: np.ndarray
    allocated: np.ndarray
    peak: tuple[float, float]
    host: tuple[int, int] = (0, 0)
    summary_reads: tuple[float, float] = (0.0, 0.0)

    @property
    def total(self) -> dict[str, int]:
        """Sums, as whole bytes: live, allocated, peak_live, peak_allocated."""
        return {
            "live": int(self.live.sum()),
            "allocated": int(self.allocated.sum()),
            "peak_live": int(self.peak[0]),
            "peak_allocated": int(self.peak[1]),
        }


def size(tree: Any) -> int:
    """Bytes of every leaf, which may be a shape alone."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def ring_slot(ring: Ring) -> int:
    """Bytes of one slot of one head: key, value, admission bit, metadata."""
    return 2 * ring.k.shape[-1] * ring.k.dtype.itemsize + 1 + size(ring.meta) // ring.admit.size


def page_costs(pages: Pages) -> tuple[int, int]:
    """Bytes of one live slot (key, value, position, metadata) and of one owned page (scales, summary)."""
    slot = 2 * pages.k.shape[-1] * pages.k.dtype.itemsize + 4 + size(pages.meta) // pages.pos.size
    page = size((pages.scales, pages.summary)) // pages.count
    return slot, page


def _lengths(state: KVState) -> tuple[np.ndarray, list[list[tuple[np.ndarray, np.ndarray]]]]:
    """Tokens of each row; live slots and owned pages [B, K] of the pools of each layer.

    No program adds them up: it would be one for each combination of pool sizes.
    """
    pools = [[p.length for p in x.pools] for x in state.layers]
    length, lengths = state.mesh.read((state.length, pools))
    held = [
        [(own.sum(axis=2), (-(-own // p.size)).sum(axis=2)) for p, own in zip(x.pools, own_lengths)]
        for x, own_lengths in zip(state.layers, lengths)
    ]
    return length, held


def nbytes(state: KVState) -> Bytes:
    """Live and allocated bytes of a state (reads lengths from the device)."""
    length, held = _lengths(state)
    heads = state.layers[0].ring.k.shape[1]
    live = np.zeros((len(state.layers), heads, len(STORES)))
    for index, (layer, lengths) in enumerate(zip(state.layers, held)):
        live[index, :, 0] = np.minimum(length, layer.ring.window).sum() * ring_slot(layer.ring)
        live[index, :, 0] += size(layer.ring.queries) / heads
        for at, (pages, (slots, owned)) in enumerate(zip(layer.pools, lengths)):
            slot, page = page_costs(pages)
            live[index, :, 1 + at] = slots.sum(axis=0) * slot + owned.sum(axis=0) * page
        live[index, :, 3] = size(layer.summary) / heads
    sizes = [[size(getattr(layer, store)) for store in STORES] for layer in state.layers]
    hosts, full = [layer.hosted for layer in state.layers], np.zeros(2, int)
    for index, (layer, hosted) in enumerate(zip(state.layers, hosts)):
        if hosted is not None:
            slot, page = page_costs(layer.pools[-1])
            owned, held = state.mesh.read((hosted.owned, hosted.cached.holds))
            cached = (held >= 0).sum(axis=(0, 2)) * hosted.cached.unit
            live[index, :, 1] += owned.sum(axis=0) * page + cached * slot
            sizes[index][1] += size(hosting.on_device(hosted))
            full += np.asarray([owned.sum() * hosted.size * slot, size(hosting.in_host(hosted))])
    return Bytes(
        live=live,
        host=(int(full[0]), int(full[1])),
        allocated=np.asarray(sizes, float),
        peak=tuple(np.asarray(state.peak).tolist()),
        summary_reads=(
            max(summary_tokens(layer, by_bytes=False) for layer in state.layers),
            max(summary_tokens(layer, by_bytes=True) for layer in state.layers),
        ),
    )


def summary_tokens(layer: LayerCache, *, by_bytes: bool) -> float:
    """The cost of reading φ once for a KV head, in tokens (K and V of one position in the model's dtype).

    By the paper's count (https://arxiv.org/abs/2604.05438) a summary is d_φ/2 + d_φ/D tokens; by bytes it is
    as much more as its floats are wider than the model's, and counters are in it.
    """
    rows, heads, _, dim = layer.ring.k.shape
    size, leaves = layer.ring.k.dtype.itemsize, jax.tree.leaves(layer.summary)
    if by_bytes:
        total = sum(leaf.nbytes / size for leaf in leaves)
    else:
        total = sum(leaf.size for leaf in leaves if leaf.ndim > 2)
    return total / (rows * heads) / (2 * dim)


def by_row(state: KVState) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of each row, float64 [B]: live, and allocated for this row alone.

    A row owns its rings, summaries and page lists, and the pages in them; free pages belong to no row.
    """
    length, held = _lengths(state)
    live, own = np.zeros((2, state.rows))
    for layer, lengths in zip(state.layers, held):
        heads = layer.ring.k.shape[1]
        alone, asked = size(layer.summary) / state.rows, size(layer.ring.queries) / state.rows
        live += np.minimum(length, layer.ring.window) * heads * ring_slot(layer.ring) + alone + asked
        own += size(layer.ring) / state.rows + alone
        if layer.hosted is not None:
            alone = size(hosting.on_device(layer.hosted)) / state.rows
            live, own = live + alone, own + alone
        for pages, (slots, owned) in zip(layer.pools, lengths):
            slot, page = page_costs(pages)
            live += slots.sum(axis=1) * slot + owned.sum(axis=1) * page
            own += owned.sum(axis=1) * (pages.size * slot + page)
            own += size((pages.table, pages.length)) / state.rows
    return live, own


def allocated(layers: tuple[LayerCache, ...]) -> int:
    """Device bytes of some layers; reads nothing from a device."""
    return size([layer.on_device for layer in layers])


def raise_peak(state: KVState, live: float, total: float) -> KVState:
    """The state with its peak at least at these bytes."""
    peak = np.maximum(np.asarray(state.peak), np.asarray([live, total], np.float32))
    return dataclasses.replace(state, peak=state.mesh.put(peak))


def with_peak(state: KVState) -> KVState:
    """The state with its present bytes counted into its peak."""
    now = nbytes(state)
    return raise_peak(state, float(now.live.sum()), float(now.allocated.sum()))


def full_bytes(network: Network, tokens: int, dtype: Any) -> int:
    """Bytes of keys and values of ``tokens`` tokens in a cache that keeps everything."""
    per_token = 2 * network.num_layers * network.num_kv_heads * network.head_dim
    return tokens * per_token * jnp.dtype(dtype).itemsize


# --- over devices --------------------------------------------------------------------------------


def held_by_head(state: KVState) -> Int[np.ndarray, "L B K"]:
    """Slots of each KV head that hold a token, ring included; read from the device."""
    length, held = _lengths(state)
    layers = []
    for layer, pools in zip(state.layers, held):
        recent = np.minimum(length, layer.ring.window)[:, None] + np.zeros(layer.ring.k.shape[:2], int)
        if layer.hosted is not None:
            recent = recent + state.mesh.read(layer.hosted.owned) * layer.hosted.size
        layers.append(sum((slots for slots, _ in pools), recent))
    return np.stack(layers)


def imbalance(state: KVState) -> float:
    """Live slots of the fullest device over the mean, layer by layer; 1.0 is even, and is one device.

    Every device gets pools of the fullest one's size, so a mesh takes this many times the memory.
    """
    return uneven(held_by_head(state), state.mesh)


def uneven(held: Int[np.ndarray, "L B K"], mesh: Mesh) -> float:
    """``imbalance`` of these slots."""
    by_device = np.asarray([[own.sum() for own in mesh.blocks(layer)] for layer in held])
    return float(by_device.max(axis=1).sum() / by_device.mean(axis=1).sum())


def balanced(state: KVState) -> Int[np.ndarray, "L K"]:
    """An order of the model's KV heads for ``kvjax.load(heads=)`` that gives each device an equal share.

    Args:
      state: of a typical prompt, on the mesh that the order is for. For a model that was loaded with
        ``heads``, the order counts its heads in their new order.
    """
    return kv_heads.balanced(held_by_head(state).sum(axis=1), state.mesh.size(TENSOR))


# --- which tokens are held -----------------------------------------------------------------------


@jax.jit
def live_slots(state: KVState) -> Int[jax.Array, "L B K"]:
    """Slots of each KV head that hold a token, ring included; pure."""
    layers = []
    for layer in state.layers:
        ring = jnp.minimum(state.length, layer.ring.window)[:, None]
        heads = layer.ring.k.shape[1]
        live = jnp.broadcast_to(ring, (state.rows, heads))
        if layer.hosted is not None:
            live = live + layer.hosted.owned * layer.hosted.size
        layers.append(live + per_head.live(layer.pools) if layer.pools else live)
    return jnp.stack(layers)


@jax.jit
def present(state: KVState) -> Bool[jax.Array, "L B K C"]:
    """Whether each KV head holds the token at each of the C = ``state.context`` positions; pure."""
    mesh = state.mesh

    def of_device(length: Int[jax.Array, " B"], layer: LayerCache) -> Bool[jax.Array, "B K C"]:
        rows, heads = layer.ring.k.shape[:2]
        row = jnp.arange(rows)
        mask = jnp.zeros((rows, heads, state.context), bool)
        positions = rings.positions(length, layer.ring.window)
        positions = jnp.where(positions >= 0, positions, state.context)  # out of range: dropped
        mask = mask.at[row[:, None], :, positions].set(True, mode="drop")
        if layer.pools:
            slots = per_head.slots(layer.pools)
            pos = jnp.where(slots.live, slots.pos, state.context)
            head = jnp.arange(heads)[None, :, None]
            mask = mask.at[row[:, None, None], head, pos].set(True, mode="drop")
        if layer.hosted is not None:
            pos = brought.positions(layer.hosted)
            pos = jnp.where(pos >= 0, pos, state.context)
            mask = mask.at[row[:, None, None], head, pos].set(True, mode="drop")
        return mask

    # Ids of pages count within a device.
    by_layer = [mesh.each(of_device, (state.length, x), (ROWS, of_state(x)), HEADS) for x in state.layers]
    return jnp.stack(by_layer)
