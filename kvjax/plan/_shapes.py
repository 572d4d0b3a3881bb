"""Sharded shapes of weights, learned weights and the state; slots of heads, sizes of pools, bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode, layer, metrics
from kvjax.algebra import Policy
from kvjax.cache import hosted as hosting
from kvjax.cache import pool
from kvjax.cache import state as states
from kvjax.cache.hosted import Hosted
from kvjax.cache.pages import Pages
from kvjax.cache.state import KVState, LayerCache
from kvjax.models import decoder, quantised
from kvjax.models.spec import ModelSpec
from kvjax.plan._deployment import Deployment, learned_admission
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.specs import WHOLE, of_state
from kvjax.types import Params


def replicated(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An array that every device has whole."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=mesh.sharding(WHOLE))


def device_bytes(tree: Any) -> int:
    """Bytes that one device has of sharded shapes, in its own memory."""
    return sum(size for size, far in _leaves(tree) if not far)


def host_bytes(tree: Any) -> int:
    """Bytes that lie in host memory for one device."""
    return sum(size for size, far in _leaves(tree) if far)


def _leaves(tree: Any) -> Iterator[tuple[int, bool]]:
    """Bytes of each leaf on one device, and whether they lie in host memory."""
    for x in jax.tree.leaves(tree):
        size = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        yield size, x.sharding.memory_kind == hosting.KIND


def params(case: Deployment) -> Params:
    """The model's weights."""
    dtype, weight_dtype = jnp.dtype(case.dtype), case.weight_dtype

    def leaf(path: Any, shape: tuple[int, ...]) -> Any:
        name = path[-1].key
        if weight_dtype and name in quantised.INPUTS:
            return quantised.shapes(shape, name, weight_dtype, dtype).on_mesh()
        return jax.ShapeDtypeStruct(shape, dtype)

    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    tree = jax.tree_util.tree_map_with_path(leaf, decoder.shapes(case.spec), is_leaf=is_shape)
    return case.mesh.shapes(tree, case.mesh.of_model(case.network, tree))


def weights(case: Deployment) -> Params:
    """Learned weights of the policy's parts, sharded as in a call."""
    tree = _learned(case.policy, case.spec)
    return case.mesh.shapes(tree, layer.of_learned(case.policy, tree))


@functools.lru_cache(maxsize=8)  # a search asks a hundred times, and making them up is traced for every layer
def _learned(policy: Policy, spec: ModelSpec) -> Params:
    return {part.place: part.weight_shapes(decoder.Decoder(spec)) for part in policy.learned}


def read_every_step(case: Deployment) -> Params:
    """The weights that a step reads whole: not the tables from which it takes one row a token."""
    tables = ("positions",) if case.spec.tied else ("positions", "embed")
    return {name: x for name, x in params(case).items() if name not in tables}


def full_cache(case: Deployment) -> int:
    """Bytes that a device holds of prompts that are held whole.

    That is keys, values and scores of all layers; where a prompt is fed twice, also a piece's keys and values
    of one, at most as many.
    """
    slot = 2 * case.spec.head_dim * case.itemsize
    piece = slot if case.policy.eviction.replays else 0
    return case.device_heads * case.read_at_once * (case.spec.num_layers * (slot + 4) + piece)


# --- slots ---------------------------------------------------------------------------------------


def slots(case: Deployment) -> tuple[int, ...]:
    """Paged slots of a KV head of each layer once a row has seen the whole context, mean over the heads.

    The prompt is taken as long as the context, so that what is generated later is not counted twice.
    """
    return tuple(_slots(case, index) for index in range(case.spec.num_layers))


def _slots(case: Deployment, index: int) -> int:
    policy, context = case.policy, case.context
    window = policy.window(context)
    if case.spec.windows[index] is not None or not policy.paged(context):
        return 0
    bounds = [context - window]
    if policy.admission.rejects_all:
        bounds.append(policy.sinks)
    elif learned_admission(policy):
        bounds.append(math.ceil((case.share or 0) * (context - window)))
    if policy.budget.limited:
        target = max(_target(case, index), policy.protected)
        bounds.append(math.ceil(target) - window)  # a target counts the ring
    return max(min(bounds), 0)


def _target(case: Deployment, index: int) -> float:
    """The most slots of a KV head that the budget leaves, mean over the heads."""
    spec, budget = case.spec, case.policy.budget
    if budget.voted:
        return (case.share or 0) * case.context
    total: Any = None
    k: Any = jax.ShapeDtypeStruct((1, spec.num_kv_heads, 1, spec.head_dim), jnp.dtype(case.dtype))
    info = layer.LayerInfo(case.policy, {}, index, case.depth or spec.num_layers, None, total)
    length = jnp.full((1,), case.context, jnp.int32)
    if budget.from_scores or budget.learns:
        return float(np.asarray(budget.layer_mean(info.frame(k), length))[0])
    return float(np.asarray(budget.targets(info.frame(k), length, None)).max())


# --- the state -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LayerSize:
    """A layer's cache.

    Attributes:
      cache: sharded shapes.
      allocated: its bytes on each device.
      live: of those, bytes of slots that hold a token, on the fullest device.
      read: bytes of keys and values that a step must load, on the fullest device; selections load less than
        is live.
      walked: bytes that a step loads if it reads whole pools, free pages included, as ``xla`` does.
      host: bytes of full pages in host memory, of each device.
      chosen: of these, bytes that a step chooses, and brings where the device's cache has none of them.
      brought: bytes of a whole list, which a piece of a prompt brings.
      index: bytes that the device keeps of pages in host memory for the selection to choose by.
      cached: bytes of the device's cache of them.
    """

    cache: LayerCache
    allocated: int
    live: int
    read: int
    walked: int
    host: int = 0
    chosen: int = 0
    brought: int = 0
    index: int = 0
    cached: int = 0


def layer_sizes(case: Deployment, *, reading: bool = False) -> tuple[LayerSize, ...]:
    """All layers of a state that is full; ``reading``: with pools as they are while the prompt is read."""
    size_of = functools.cache(functools.partial(_layer_size, case, reading))
    applies = map(case.policy.selection.applies, range(case.spec.num_layers))
    return tuple(size_of(*kind) for kind in zip(case.spec.windows, slots(case), applies))


def state(case: Deployment, layers: tuple[LayerSize, ...]) -> KVState:
    """The state of these layers."""
    mesh, rows = case.mesh, case.rows
    return KVState(
        layers=tuple(one.cache for one in layers),
        length=replicated(mesh, (rows,), "int32"),  # type: ignore[arg-type]
        total=replicated(mesh, (rows,), "int32"),  # type: ignore[arg-type]
        peak=replicated(mesh, (2,), "float32"),  # type: ignore[arg-type]
        confidence=replicated(mesh, (rows,), "float32") if case.policy.budget.needs_logits else None,  # type: ignore[arg-type]
        context=case.context,
        chunk=case.chunk,
        structure=case.policy.structure,
        mesh=mesh,
    )


def _layer_size(
    case: Deployment, reading: bool, window: int | None, head_slots: int, selective: bool
) -> LayerSize:
    mesh, heads = case.mesh, case.device_heads
    spec = dataclasses.replace(case.spec, num_layers=1, windows=(window,))
    sizes: dict[str, Any] = {"rows": case.rows, "context": case.context, "chunk_size": case.chunk}
    make = functools.partial(
        decode.empty_layers,
        decoder.Decoder(spec),
        case.policy,
        **sizes,
        dtype=jnp.dtype(case.dtype),
        mesh=mesh,
    )
    (cache,) = jax.eval_shape(make)
    used = _used_slots(case, cache, head_slots)
    selects = [at for at in range(case.spec.num_layers) if case.policy.selection.applies(at)]
    near = case.policy.near(case.context, selects[0]) if selective and cache.pools else None
    full = used
    if near is not None:  # what is full lies in host memory
        fed = case.chunk if reading else decode.MAX_STEPS
        used = (min(used[0], case.policy.selection.always + cache.pools[0].size - 1 + fed),)
    count = _pages_while_reading if reading else _pages
    pools = []
    for index, (pages, slots) in enumerate(zip(cache.pools, used)):
        resize = functools.partial(states.resize, count=count(case, pages, index, slots), mesh=mesh)
        pools.append(jax.eval_shape(resize, pages))
    cache = cache.with_pools(pools)
    cache = mesh.shapes(cache, of_state(cache))
    host = chosen = index = cached = 0
    if near is not None:
        shapes = hosting.shapes(cache.pages, near, mesh)
        cache = dataclasses.replace(cache, hosted=hosting.sharded(mesh, shapes))
        slot = metrics.page_costs(cache.pages)[0]
        host, far = host_bytes(cache.hosted), cache.hosted
        index, cached = _index(far), device_bytes(far.cached)
        chosen = heads * min(case.policy.selection.most_units(case.context) * near.unit, full[0]) * slot
    ring, summary = cache.ring, device_bytes(cache.summary)
    ring_slots = heads * min(case.context, ring.window)
    live = ring_slots * metrics.ring_slot(ring) + device_bytes(ring.queries) + summary
    for pages, slots in zip(cache.pools, used):
        slot, page = metrics.page_costs(pages)
        live += heads * (slots * slot + -(-slots // pages.size) * page)
    read = [_pages_read(case, pages, slots) for pages, slots in zip(cache.pools, used)]
    walked = [_pool_read(mesh.local(pages)) for pages in cache.pools]
    if selective:
        read[-1:] = [_selected(case, cache, slots) for slots in full[-1:]]
        walked = read
    ring_read = ring_slots * 2 * ring.k.shape[-1] * ring.k.dtype.itemsize + summary
    return LayerSize(
        cache,
        allocated=device_bytes(cache),
        live=live,
        read=ring_read + sum(read),
        walked=ring_read + sum(walked),
        host=host,
        chosen=chosen,
        brought=heads * full[0] * slot if near is not None else 0,
        index=index,
        cached=cached,
    )


# --- what a step loads ---------------------------------------------------------------------------


def _pages_read(case: Deployment, pages: Pages, slots: int) -> int:
    """Keys, values and scales of so many slots of each KV head."""
    slot = 2 * pages.k.shape[-1] * pages.k.dtype.itemsize
    page = metrics.size(pages.scales) // pages.count
    return case.device_heads * (slots * slot + -(-slots // pages.size) * page)


def _pool_read(pages: Pages) -> int:
    """Keys, values and scales of a whole pool of one device."""
    return metrics.size((pages.k, pages.v, pages.scales))


def _selected(case: Deployment, cache: LayerCache, slots: int) -> int:
    """What a selection visits of the last pool, and what it ranks by: values of pages, or every key."""
    pages, selection = cache.pools[-1], case.policy.selection
    visited = min(_visited(case, pages, cache.ring.window), slots)
    summaries = selection.summary_shapes(pages.size, pages.head_dim).values()
    if cache.hosted is not None:
        ranked = _index(cache.hosted)
    elif summaries:
        numbers = sum(math.prod(shape) for shape in summaries)
        item = jnp.dtype(case.policy.storage.read_dtype(jnp.dtype(case.dtype))).itemsize
        ranked = case.device_heads * -(-slots // pages.size) * item * numbers
    else:
        ranked = _pages_read(case, pages, slots) // 2
    return _pages_read(case, pages, visited) + ranked


def _index(hosted: Hosted) -> int:
    """What a selection ranks hosted pages by, on each device."""
    return device_bytes((hosted.keys, hosted.key_scales, hosted.summary))


def _visited(case: Deployment, pages: Pages, window: int) -> int:
    """Slots of a KV head that a selection visits at most, whatever the text."""
    local = case.mesh.local(pages)
    rows, heads, lists, _ = local.table.shape
    q = jax.ShapeDtypeStruct((rows, heads * case.spec.groups, pages.head_dim), jnp.dtype(case.dtype))
    total = jax.ShapeDtypeStruct((rows,), jnp.int32)
    select = functools.partial(case.policy.selection.select, None)
    longest = pages.span + window
    picked = jax.eval_shape(lambda q, p, n: select(q, p, lists - 1, n, longest), q, local, total)
    return picked.entries.shape[-1] * (picked.unit or pages.size)


# --- how large pools are -------------------------------------------------------------------------


def _used_slots(case: Deployment, cache: LayerCache, head_slots: int) -> tuple[int, ...]:
    """Slots that a KV head of the fullest device uses in each pool of a layer."""
    most = min(math.ceil(head_slots * case.fullest), case.context - cache.ring.window)
    if len(cache.pools) < 2:
        return (most,)[: len(cache.pools)]
    exact = min(most, case.policy.exact_slots(cache.ring.window))
    return exact, most - exact


def _resized(pages: Pages, count: int) -> Pages:
    """A pool of so many pages, with the shape from which sizes are computed."""
    return dataclasses.replace(pages, pos=jax.ShapeDtypeStruct((count, pages.size), jnp.int32))  # type: ignore[arg-type]


def _pages(case: Deployment, pages: Pages, index: int, slots: int) -> int:
    """Pages of a pool on each device: as prefill leaves it, and grown for what is written next."""
    heads = case.device_heads
    owned = heads * (
        -(-slots // pages.size) + pages.table.shape[2] - 1
    )  # each further list ends in its own page
    fitted = _resized(case.mesh.local(pages), pool.size_class(max(1, owned)))
    most = decode.slot_bounds(case.policy, case.context, 1, [pages.size] * 2)[index]
    (grown,) = pool.grown_sizes(
        [fitted], [heads * slots], decode.MAX_STEPS, most, ahead=decode.HORIZON, doubling=False
    )
    return grown


def _pages_while_reading(case: Deployment, pages: Pages, index: int, slots: int) -> int:
    """Pages of a pool on each device right after its prompt was read, before the pool is fitted."""
    policy, chunk, heads = case.policy, case.chunk, case.device_heads
    if policy.whole_prompt:  # like ``decode.prompt_pages``: of slots, not of owned pages
        return pool.coarse_class(heads * slots // pages.size + heads * pages.table.shape[2])
    window = policy.window(case.context)
    most = decode.slot_bounds(policy, case.context, chunk, [pages.size] * 2)[index]
    local, left, count = case.mesh.local(pages), max(case.context - window, 1), 1
    ahead = case.context if policy.admission.idle and not policy.storage.hosted else chunk
    for tokens in range(0, case.context, chunk):
        live = math.ceil(heads * slots * max(tokens - window, 0) / left)
        step = min(ahead, case.context - tokens)
        (count,) = pool.grown_sizes([_resized(local, count)], [live], step, most, ahead=0, doubling=True)
    return count
