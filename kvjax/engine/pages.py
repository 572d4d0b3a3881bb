"""How the cache of a policy lies in pages: the layout of rows, the pages they need, the pages they share.

Rows of a batch that begin with the same stored state share its full pages. A full page is never written again
where nothing leaves a list once the prompt is read (``can_lend``). So the new row takes another row's full
pages into its own lists and copies the rest: the page that is partly full, the ring, φ. This is copy-on-write
with the copy made on entry. A page returns to the pool when the last of its owners goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from kvjax import decode, metrics
from kvjax.algebra import AdmitAll, Policy, PolicyError
from kvjax.cache import rows as row_ops
from kvjax.cache import state as states
from kvjax.cache.pages import Pages
from kvjax.cache.state import KVState, LayerCache
from kvjax.sharding.mesh import ONE, mesh_of
from kvjax.sharding.specs import WHOLE, of_state
from kvjax.types import Weighted

if TYPE_CHECKING:
    from jaxtyping import Int

WINDOW = 64
"""Ring slots of a cache that keeps everything."""


# --- layout --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class AdmitAllPaged(AdmitAll):
    """Admits every token; the window only says where the ring ends and the pages begin."""

    window: int = WINDOW  # type: ignore[assignment]


def paged(policy: Policy, context: int) -> Policy:
    """The policy, in pages where alone it would be one ring as long as the context.

    Rows of a batch differ in length; a ring for each as long as the longest may be would hold mostly nothing.

    Raises:
      PolicyError: one that keeps pages in host memory.
    """
    if policy.storage.hosted:
        raise PolicyError(
            f"{policy!r}: running batches hold their pages on the device, so {policy.storage!r} has no place "
            "here. Use generate or stream; idle contexts go to host memory by --host-memory."
        )
    idle = all(part.idle for part in policy.parts)
    window = max(WINDOW, policy.protects)
    if not idle or window >= context:
        return policy
    return dataclasses.replace(policy, admission=AdmitAllPaged(window))


def empty(
    model: Weighted,
    policy: Policy,
    *,
    rows: int,
    context: int,
    chunk: int,
    page: int | None,
    counts: Sequence[int] = (),
) -> KVState:
    """A state that has seen nothing; ``counts`` are pages of its pools on a device, one by default. Pure."""
    dtype, mesh = model.params["embed"].dtype, mesh_of(model.params)
    sizes: dict[str, Any] = {"rows": rows, "context": context, "page": page, "chunk_size": chunk}
    layers = decode.empty_layers(model.network, policy, **sizes, dtype=dtype, mesh=mesh)
    layers = tuple(
        layer.with_pools([states.resize(pages, n, mesh) for pages, n in zip(layer.pools, counts)])
        for layer in layers
    )
    numbers = {
        "length": jnp.zeros(rows, jnp.int32),
        "total": jnp.zeros(rows, jnp.int32),
        "peak": jnp.zeros(2, jnp.float32),
        "confidence": jnp.zeros(rows, jnp.float32) if policy.budget.needs_logits else None,
    }
    return KVState(
        layers=layers,
        **mesh.everywhere(numbers),
        context=context,
        chunk=chunk,
        structure=policy.structure,
        mesh=mesh,
    )


@jax.jit
def copied(tree: Any) -> Any:
    """The same in buffers of its own, to be donated; one program."""
    return jax.tree.map(jnp.copy, tree)


def shortened(state: KVState, tokens: Int[jax.Array, ""], counts: tuple[int, ...]) -> KVState:
    """A state of one row as it was after fewer tokens (``can_shorten``), in pools of so many pages. Pure."""
    layers = tuple(row_ops.shortened(layer, state.length, tokens, *counts) for layer in state.layers)
    return dataclasses.replace(state, layers=layers, length=tokens[None])


def resized(state: KVState, counts: Sequence[int], resize: Callable[..., Pages]) -> KVState:
    """The state with pools of so many pages a device, one number for each pool of a layer; layer by layer.

    ``resize`` is ``kvjax.cache.state.resize``, compiled.
    """
    layers, mesh = list(state.layers), state.mesh
    state = dataclasses.replace(state, layers=())
    for index, layer in enumerate(layers):
        pools = [resize(pages, n, mesh) for pages, n in zip(layer.pools, counts)]
        layers[index] = layer.with_pools(pools)
        del layer, pools  # frees the old pools before the next layer's are made
    return dataclasses.replace(state, layers=tuple(layers))


# --- shapes, for programs that are compiled before they run --------------------------------------


def shapes_with(state: KVState, counts: Sequence[int] = ()) -> KVState:
    """Shapes of a state, with pools of so many pages a device; nothing is traced."""
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    layers = tuple(sized(layer, [n * state.mesh.pools for n in counts]) for layer in state.layers)
    return sharded_shapes(dataclasses.replace(state, layers=layers))


def sized(layer: LayerCache, counts: Sequence[int]) -> LayerCache:
    """Shapes of a layer with pools of so many pages, all devices together."""
    fixed = ("table", "length", "n_free", "overflow")  # are not a page's

    def pages_with(pages: Pages, count: int) -> Pages:
        own: dict[str, Any] = {name: getattr(pages, name) for name in fixed}
        none: dict[str, Any] = dict.fromkeys(fixed)
        bare = dataclasses.replace(pages, **none)
        grown = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), bare)
        return dataclasses.replace(grown, **own)

    return layer.with_pools([*map(pages_with, layer.pools, counts)])


def widened(row: KVState, rows: int) -> KVState:
    """Shapes of a state of so many rows, from those of one row; nothing is traced."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), tree)

    layers = []
    for cache in row.layers:
        pools = [dataclasses.replace(p, table=wide(p.table), length=wide(p.length)) for p in cache.pools]
        bare = dataclasses.replace(cache, ring=wide(cache.ring), summary=wide(cache.summary))
        layers.append(bare.with_pools(pools))
    numbers = {name: wide(getattr(row, name)) for name in ("length", "total", "confidence")}
    return sharded_shapes(dataclasses.replace(row, layers=tuple(layers), **numbers))


def sharded_shapes(state: KVState) -> KVState:
    """Shapes of a state with their shardings; on one device as they are."""
    mesh = state.mesh
    if mesh == ONE:
        return state

    def one(x: Any, spec: P = WHOLE) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=mesh.sharding(spec))

    layers = jax.tree.map(one, state.layers, of_state(state.layers))
    return dataclasses.replace(jax.tree.map(one, dataclasses.replace(state, layers=())), layers=layers)


# --- counting pages ------------------------------------------------------------------------------


def layer_pools(state: KVState) -> Sequence[Pages]:
    """Pools of the first layer that has any; all layers that have pools have them of the same sizes."""
    return next((layer.pools for layer in state.layers if layer.pools), ())


def list_shapes(state: KVState) -> tuple[tuple[int, int], ...]:
    """(slots of a page, entries of a list) of each pool of a layer."""
    return tuple((pages.size, pages.table.shape[-1]) for pages in layer_pools(state))


def page_counts(state: KVState) -> list[int]:
    """Pages that a device has of each pool of a layer."""
    return [pages.count // state.mesh.pools for pages in layer_pools(state)]


def page_bytes(state: KVState) -> list[float]:
    """Bytes that one more page on each device takes, of each pool of a layer."""

    def of(pages: Pages) -> float:
        tables = (pages.table, pages.length, pages.n_free, pages.overflow)
        return (metrics.size(pages) - metrics.size(tables)) / pages.count

    return [of(pages) * state.mesh.pools for pages in layer_pools(state)]


def pages_for(slots: Int[np.ndarray, "*B K R"], size: int, devices: int) -> Int[np.ndarray, "*B D"]:
    """Pages that lists of so many slots own on each device, whose KV heads are neighbours."""
    return by_device(-(-slots // size), devices)


def by_device(x: Int[np.ndarray, "*B K R"], devices: int) -> Int[np.ndarray, "*B D"]:
    """Sums over the lists of each device."""
    return x.reshape(*x.shape[:-2], devices, -1).sum(axis=-1)


def most_pages(
    policy: Policy,
    state: KVState,
    coming: int,
    arriving: int,
    lists: Sequence[np.ndarray] | None = None,
    lent: Sequence[np.ndarray] | None = None,
) -> list[int]:
    """Pages that suffice for a row on each device, one number for each pool of a layer: its fullest layer's.

    Args:
      policy: what the row keeps.
      state: any state of its batch, for the sizes.
      coming: tokens that may still come, all of them to be stored.
      arriving: how many at a time.
      lists: live slots [K, R] of the row, of each pool of each layer in turn; none in an empty row.
      lent: pages [K, R] of these lists that another row lends, which are not counted.
    """
    shapes = list_shapes(state)
    if not shapes:
        return []
    if lists is None:
        lists = [np.zeros(x.length.shape[1:], np.int32) for layer in state.layers for x in layer.pools]
    bounds = decode.slot_bounds(policy, state.context, arriving, [size for size, _ in shapes])
    result, devices = [], state.mesh.pools
    for kind, ((size, entries), bound) in enumerate(zip(shapes, bounds)):
        most = entries * size if bound is None else min(bound, entries * size)
        need = 0
        for index in range(kind, len(lists), len(shapes)):
            live = lists[index]
            head = live.sum(axis=-1)
            after = np.maximum(np.minimum(head + coming, most), head)
            more = pages_for(after, size, devices) + (live.shape[-1] - 1) * (len(live) // devices)
            need = max(need, int((more if lent is None else more - by_device(lent[index], devices)).max()))
        result.append(need)
    return result


# --- sharing pages -------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False, kw_only=True)
class StoredState:
    """A state that rows may begin with: a prefix, a context.

    Attributes:
      tokens: it has seen.
      state: one row, copied before it is continued; None once it was dropped.
      bytes: on the device.
      pages: full pages of each list, int [K, R], of each pool of each layer in turn.
    """

    tokens: Int[np.ndarray, " T"]
    state: KVState | None

    def __post_init__(self) -> None:
        assert self.state is not None
        self.bytes = metrics.allocated(self.state.layers)
        pools = [pages for layer in self.state.layers for pages in layer.pools]
        self.pages = [np.asarray(pages.length)[0] // pages.size for pages in pools]

    @property
    def row(self) -> KVState:
        """The state, which was not dropped."""
        assert self.state is not None
        return self.state

    @property
    def whole(self) -> StoredState:
        """That holds the state: this one."""
        return self

    @property
    def lists(self) -> list[np.ndarray]:
        """Live slots [K, R] of each pool of each layer in turn."""
        return [np.asarray(pages.length)[0] for layer in self.row.layers for pages in layer.pools]


@dataclasses.dataclass(eq=False)
class Shorter:
    """The beginning of a stored state that keeps everything; a stored state itself, as far as rows see.

    Attributes:
      whole: it is a part of.
      tokens: of the beginning.
    """

    whole: StoredState
    tokens: Int[np.ndarray, " T"]

    def __post_init__(self) -> None:
        self.lists = [np.minimum(x, max(0, len(self.tokens) - WINDOW)) for x in self.whole.lists]
        pools = [pages for layer in self.whole.row.layers for pages in layer.pools]
        self.pages = [live // pages.size for live, pages in zip(self.lists, pools)]

    @property
    def state(self) -> KVState | None:
        """Of the whole; None once it was dropped."""
        return self.whole.state

    @property
    def row(self) -> KVState:
        """The state of the whole, which was not dropped."""
        return self.whole.row


def can_shorten(policy: Policy, state: KVState) -> bool:
    """Does a row hold every token, exact and with nothing beside it? Then it has any beginning, too."""
    admits_all = isinstance(policy.admission, AdmitAllPaged) and policy.admission.window == WINDOW
    others = all(part.idle for part in policy.parts if part is not policy.admission)
    return (
        admits_all and others and state.mesh == ONE and all(len(layer.pools) == 1 for layer in state.layers)
    )


def can_lend(policy: Policy) -> bool:
    """Does nothing leave a list, or change in it, once the prompt is read?"""
    return not policy.decides_later


def marked_shared(state: KVState, shared: bool) -> KVState:
    """The state whose pages may have several owners, or may not; nothing is copied."""
    layers = [
        layer.with_pools([dataclasses.replace(pages, shared=shared) for pages in layer.pools])
        for layer in state.layers
    ]
    return dataclasses.replace(state, layers=tuple(layers))
