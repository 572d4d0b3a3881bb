"""Shapes with a place for each: weights, learned weights, and the state with pools as they would be sized."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import decode, layer, metrics
from kvjax.algebra import Policy
from kvjax.cache import pool
from kvjax.cache import state as states
from kvjax.cache.pages import Pages
from kvjax.cache.state import KVState, LayerCache
from kvjax.models import decoder
from kvjax.models.spec import ModelSpec
from kvjax.plan._case import Case, slots
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.specs import DATA, TENSOR, WHOLE, of_state
from kvjax.types import Params


def everywhere(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An array that every device has whole."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=mesh.sharding(WHOLE))


def bytes_each(tree: Any) -> int:
    """Bytes that one device has of laid shapes."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def params(case: Case) -> Params:
    """The model's weights."""
    dtype, is_shape = jnp.dtype(case.dtype), lambda x: isinstance(x, tuple)
    as_shape = lambda shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    tree = jax.tree.map(as_shape, decoder.shapes(case.spec), is_leaf=is_shape)
    return case.mesh.shapes(tree, case.mesh.of_model(case.network, tree))


def weights(case: Case) -> Params:
    """Learned weights of the policy's parts, laid as a call lays them."""
    found = _learned(case.policy, case.spec)
    return case.mesh.shapes(found, layer.of_learned(case.policy, found))


@functools.lru_cache(maxsize=8)  # a search asks a hundred times, and making them up is traced for every layer
def _learned(policy: Policy, spec: ModelSpec) -> Params:
    return {part.place: part.weight_shapes(decoder.Decoder(spec)) for part in policy.learned}


def read_every_step(case: Case) -> Params:
    """The weights that a step reads whole: all but a table from which it takes a row a token."""
    tree = params(case)
    return {
        name: x for name, x in tree.items() if name != "positions" and (name != "embed" or case.spec.tied)
    }


# --- the state -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Held:
    """A layer's cache.

    Attributes:
      cache: shapes, laid.
      allocated: bytes that each device has of it.
      live: of those, bytes of slots that hold a token, on the fullest device.
      read: bytes of keys and values that a step must load, on the fullest device; selections load less than
        is live.
      walked: those a read loads that goes through whole pools, free pages too, as ``xla`` does.
    """

    cache: LayerCache
    allocated: int
    live: int
    read: int
    walked: int


def held(case: Case, *, reading: bool = False) -> tuple[Held, ...]:
    """All layers of a state that is full; ``reading``: with pools as they are while the prompt is read."""
    known: dict[tuple[int | None, int, bool], Held] = {}
    found = []
    for index, kind in enumerate(zip(case.spec.windows, slots(case))):
        one = (*kind, case.policy.selection.applies(index))
        if one not in known:
            known[one] = _held(case, *one, reading)
        found.append(known[one])
    return tuple(found)


def state(case: Case, layers: tuple[Held, ...]) -> KVState:
    """The state of these layers."""
    mesh, rows = case.mesh, case.rows
    return KVState(
        layers=tuple(one.cache for one in layers),
        length=everywhere(mesh, (rows,), "int32"),  # type: ignore[arg-type]
        total=everywhere(mesh, (rows,), "int32"),  # type: ignore[arg-type]
        peak=everywhere(mesh, (2,), "float32"),  # type: ignore[arg-type]
        confidence=everywhere(mesh, (rows,), "float32") if case.policy.budget.needs_logits else None,  # type: ignore[arg-type]
        context=case.context,
        chunk=case.chunk,
        structure=case.policy.structure,
        mesh=mesh,
    )


def _held(case: Case, window: int | None, own: int, selective: bool, reading: bool) -> Held:
    mesh, policy = case.mesh, case.policy
    spec = dataclasses.replace(case.spec, num_layers=1, windows=(window,))
    sizes: dict[str, Any] = {"rows": case.rows, "context": case.context, "chunk_size": case.chunk}
    make = functools.partial(
        decode.empty_layers, decoder.Decoder(spec), policy, **sizes, dtype=jnp.dtype(case.dtype), mesh=mesh
    )
    (cache,) = jax.eval_shape(make)
    parts = _parts(case, cache, own)
    count = _read_pages if reading else _pages
    pools = []
    for at, (pages, mine) in enumerate(zip(cache.pools, parts)):
        pages_each = count(case, pages, at, mine)
        pools.append(jax.eval_shape(lambda p, n=pages_each: states.resize(p, n, mesh), pages))
    cache = cache.with_pools(pools)
    cache = mesh.shapes(cache, of_state(cache))
    ring, pools = _ring_read(case, cache), cache.pools
    read = [_pages_read(case, pages, mine) for pages, mine in zip(pools, parts)]
    if selective:
        read[-1:] = [_selected(case, cache, mine) for mine in parts[-1:]]
    walked = read if selective else [_all_read(mesh.local(pages)) for pages in pools]
    return Held(
        cache,
        allocated=bytes_each(cache),
        live=_live(case, cache, parts),
        read=ring + sum(read),
        walked=ring + sum(walked),
    )


def _live(case: Case, cache: LayerCache, parts: tuple[int, ...]) -> int:
    """Bytes of the slots that hold a token, with all that is kept with them."""
    ring = cache.ring
    tokens = min(case.context, ring.window) * _streams(case)
    live = tokens * metrics.ring_slot(ring) + bytes_each(cache.summary)
    for pages, mine in zip(cache.pools, parts):
        slot, page = metrics.page_costs(pages)
        live += _streams(case) * (mine * slot + -(-mine // pages.size) * page)
    return live


# --- what a step loads ---------------------------------------------------------------------------


def _ring_read(case: Case, cache: LayerCache) -> int:
    """Keys and values of the ring, and φ."""
    k = cache.ring.k
    slots = min(case.context, cache.ring.window) * _streams(case)
    return slots * 2 * k.shape[-1] * k.dtype.itemsize + bytes_each(cache.summary)


def _pages_read(case: Case, pages: Pages, mine: int) -> int:
    """Keys, values and scales of so many slots of each stream."""
    slot = 2 * pages.k.shape[-1] * pages.k.dtype.itemsize
    of_page = 0 if pages.scales is None else 2 * pages.head_dim * pages.scales.dtype.itemsize
    return _streams(case) * (mine * slot + -(-mine // pages.size) * of_page)


def _selected(case: Case, cache: LayerCache, mine: int) -> int:
    """What a selection visits of the last pool, and what it looks at: values of pages, or every key."""
    pages = cache.pools[-1]
    visited = min(_visited(case, pages, cache.ring.window), mine)
    summaries = case.policy.selection.summary_shapes(pages.size, pages.head_dim).values()
    numbers = sum(math.prod(shape) for shape in summaries)
    looked_at = _streams(case) * -(-mine // pages.size) * 4 * numbers
    if not summaries:
        looked_at = _pages_read(case, pages, mine) // 2
    return _pages_read(case, pages, visited) + looked_at


def _visited(case: Case, pages: Pages, window: int) -> int:
    """Slots of a stream that a selection visits at most, whatever the text."""
    mine = case.mesh.local(pages)
    rows, heads, lists, _ = mine.table.shape
    q = jax.ShapeDtypeStruct((rows, heads * case.spec.groups, pages.head_dim), jnp.dtype(case.dtype))
    total = jax.ShapeDtypeStruct((rows,), jnp.int32)
    select = functools.partial(case.policy.selection.select, None)
    longest = pages.span + window
    picked = jax.eval_shape(lambda q, p, n: select(q, p, lists - 1, n, longest), q, mine, total)
    unit = picked.unit or pages.size
    return picked.entries.shape[-1] * unit


def _all_read(pages: Pages) -> int:
    """Keys, values and scales of a whole pool of one device."""
    found = (pages.k, pages.v, pages.scales)
    return sum(x.size * x.dtype.itemsize for x in found if x is not None)


# --- how large pools are -------------------------------------------------------------------------


def _streams(case: Case) -> int:
    """Rows x KV heads of a device."""
    return (case.rows // case.mesh.size(DATA)) * (case.spec.num_kv_heads // case.mesh.size(TENSOR))


def _parts(case: Case, cache: LayerCache, own: int) -> tuple[int, ...]:
    """Slots of a stream of the fullest device in each pool of a layer."""
    most = min(math.ceil(own * case.fullest), case.context - cache.ring.window)
    if len(cache.pools) < 2:
        return (most,)[: len(cache.pools)]
    exact = min(most, case.policy.exact_slots(cache.ring.window))
    return exact, most - exact


def _owned(case: Case, pages: Pages, mine: int) -> int:
    """Pages that a device's streams of so many slots own; each further list ends in a page of its own."""
    return _streams(case) * (-(-mine // pages.size) + pages.table.shape[2] - 1)


def _of(pages: Pages, count: int) -> Pages:
    """What sizes are computed from: pages of a pool of so many."""
    return dataclasses.replace(pages, pos=jax.ShapeDtypeStruct((count, pages.size), jnp.int32))  # type: ignore[arg-type]


def _pages(case: Case, pages: Pages, at: int, mine: int) -> int:
    """Pages of a pool on each device: as prefill leaves it, and grown for what is written next."""
    fitted = _of(case.mesh.local(pages), pool.size_class(max(1, _owned(case, pages, mine))))
    most = decode.slot_bounds(case.policy, case.context, 1, [pages.size] * 2)[at]
    live = _streams(case) * mine
    (grown,) = pool.grown_sizes(
        [fitted], [live], decode.MAX_STEPS, most, ahead=decode.HORIZON, doubling=False
    )
    return grown


def _read_pages(case: Case, pages: Pages, at: int, mine: int) -> int:
    """Pages of a pool on each device right after its prompt was read, before it is fitted."""
    policy, chunk, window = case.policy, case.chunk, case.policy.window(case.context)
    if policy.whole_prompt:  # as ``decode.prompt_pages`` has it, of slots and not of owned pages
        lists = _streams(case) * pages.table.shape[2]
        return pool.coarse_class(_streams(case) * mine // pages.size + lists)
    most = decode.slot_bounds(policy, case.context, chunk, [pages.size] * 2)[at]
    local, left, count = case.mesh.local(pages), max(case.context - window, 1), 1
    ahead = case.context if policy.admission.idle else chunk
    for tokens in range(0, case.context, chunk):
        live = math.ceil(_streams(case) * mine * max(tokens - window, 0) / left)
        step = min(ahead, case.context - tokens)
        (count,) = pool.grown_sizes([_of(local, count)], [live], step, most, ahead=0, doubling=True)
    return count
