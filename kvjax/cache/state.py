"""The whole state: ring, pages and summary of each layer, and how many tokens each row has seen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import hosted as hosting
from kvjax.cache import pages as paging
from kvjax.cache import pool
from kvjax.cache import ring as rings
from kvjax.cache.hosted import Hosted
from kvjax.cache.pages import Pages
from kvjax.cache.ring import Ring
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.sharding.reshard import moved, on_host
from kvjax.sharding.specs import CONTEXT, HEADS, POOL, of_state
from kvjax.types import pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCache:
    """What one layer remembers.

    Attributes:
      ring: the newest W tokens.
      pages: what outlived the window; None where nothing can.
      summary: the completion part's φ, any pytree with leading axis B, or None.
      demoted: the older part of the pages, in codes, where precision changes with age
        (``kvjax.layer._demote``); else None.
      hosted: full pages of selectable tokens, where they lie in host memory; else None. The last list of the
        pages goes on from there.
    """

    ring: Ring
    pages: Pages | None
    summary: Any
    demoted: Pages | None = None
    hosted: Hosted | None = None

    @property
    def pools(self) -> tuple[Pages, ...]:
        """The pages: none, one or two pools, in the order of a KV head's slots (``kvjax.cache.per_head``)."""
        return tuple(pages for pages in (self.pages, self.demoted) if pages is not None)

    @property
    def near(self) -> hosting.Near | None:
        """What the device has of the layer's hosted tokens; None: none are."""
        if self.hosted is None:
            return None
        units, unit = self.hosted.cached.pos.shape[2:]
        keys, index = self.hosted.keys is not None, self.hosted.index
        return hosting.Near(units=units, unit=unit, keys=keys, index=index)

    @property
    def on_device(self) -> LayerCache:
        """What of it lies on the device."""
        hosted = None if self.hosted is None else hosting.on_device(self.hosted)
        return dataclasses.replace(self, hosted=hosted)

    @property
    def whole(self) -> LayerCache:
        """Without host memory; a layer of NumPy arrays."""
        if self.hosted is None or self.pages is None:
            return self
        return dataclasses.replace(self, pages=hosting.joined(self.pages, self.hosted), hosted=None)

    def with_pools(self, pools: Sequence[Pages]) -> LayerCache:
        """The same layer with its pools replaced, in their order; missing ones stay."""
        first, second, *_ = [*pools, *self.pools[len(pools) :], None, None]
        return dataclasses.replace(self, pages=first, demoted=second)


@pytree(static=("context", "chunk", "structure", "mesh"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVState:
    """Everything a batch of sequences remembers.

    Attributes:
      layers: one ``LayerCache`` per layer.
      length: tokens each row has seen; the next token's position.
      total: prompt length of each row.
      peak: most bytes so far (live, allocated), taken before pools shrink, after each layer of a
        whole-prompt prefill (the layer's uncompressed keys and values included, or those of all layers and a
        piece where a prompt is fed twice), and at the end.
      context: most tokens a row may ever see.
      chunk: most tokens of a row that may arrive at a time.
      structure: of the policy it was made under (``Policy.structure``); under another it is not continued.
      confidence: what the budget read off each row's last logits; it decides their next step. None where no
        budget asks.
      mesh: the devices it lies on.
    """

    layers: tuple[LayerCache, ...]
    length: Int[Array, " B"]
    total: Int[Array, " B"]
    peak: Float[Array, " 2"]
    context: int
    chunk: int
    structure: str
    confidence: Float[Array, " B"] | None = None
    mesh: Mesh = ONE

    @property
    def rows(self) -> int:
        """B."""
        return self.length.shape[0]

    @property
    def hosted(self) -> bool:
        """Does some of it lie in host memory?"""
        return any(layer.hosted is not None for layer in self.layers)

    @property
    def gone(self) -> bool:
        """Were its buffers donated to a call before? Asked on the host; costs nothing on the device."""
        here = isinstance(self.length, jax.Array) and not isinstance(self.length, jax.core.Tracer)
        return here and self.length.is_deleted()


DONATED = (
    "the state was donated to an earlier call, which used its buffers up. Go on with the state that call "
    "gave back; to use one state twice, copy it before: kvjax.fork(state, row, n) for a row, "
    "jax.tree.map(jnp.copy, state) for all."
)
"""The error for a state that is ``gone``."""


class PoolOverflowError(RuntimeError):
    """A pool or a page list was too small: a fault of the reservation, never of the user."""


_COUNTED = ("n_free", "overflow", "length")


def counts(state: KVState) -> dict[str, np.ndarray]:
    """Owned pages, live slots and overflow flags of all pools, layer by layer; read in one go.

    On a mesh those of the device that has most, since all have pools of one size.

    Raises:
      PoolOverflowError: a token was lost.
    """
    paged, mesh = _pools(state), state.mesh
    if not paged:
        return {}
    numbers = [[getattr(p, n) for p in paged] for n in _COUNTED]
    if mesh == ONE:  # fetched and added up here: a program costs a call more
        free, overflow, lengths = jax.device_get(numbers)
        free, overflow, slots = np.asarray(free), np.asarray(overflow), [x.sum() for x in lengths]
    else:  # fetching so many arrays off so many devices would cost more than a step's call
        free, overflow, slots = mesh.read(_by_device(*numbers, mesh)).swapaxes(0, 1)
        free, overflow, slots = free.min(axis=0), overflow.any(axis=0), slots.max(axis=0)
    totals = {
        "used": np.asarray([p.count // mesh.pools for p in paged]) - free,
        "overflow": np.asarray(overflow, bool),
        "slots": np.asarray(slots),
    }
    if totals["overflow"].any():
        where = [index for index, layer in enumerate(state.layers) for _ in layer.pools]
        short = sorted({where[at] for at in np.flatnonzero(totals["overflow"])})
        raise PoolOverflowError(f"layers {short} ran out of pages. Reserve more before the segment.")
    return totals


@functools.partial(jax.jit, static_argnums=3)
def _by_device(free: list[Any], overflow: list[Any], length: list[Any], mesh: Mesh) -> Int[Array, "D 3 n"]:
    """What ``counts`` needs of each device's pools, in one array."""

    def own(free: list[Any], overflow: list[Any], length: list[Any]) -> Any:
        slots = [x.sum(dtype=jnp.int32) for x in length]
        numbers = [jnp.concatenate(free), jnp.concatenate(overflow).astype(jnp.int32), jnp.stack(slots)]
        return jnp.stack(numbers)[None]

    return mesh.each(own, [free, overflow, length], [POOL, POOL, HEADS], POOL)


def reserve(
    state: KVState,
    tokens: int,
    most: Sequence[int | None],
    *,
    ahead: int = 0,
    doubling: bool = False,
    uneven: bool = False,
) -> KVState:
    """Grow pools until ``tokens`` more tokens a row fit whatever is admitted (host side, reads page counts).

    Args:
      state: the state; pools that need not grow keep their buffers.
      tokens: tokens a row about to come.
      most: the most slots a KV head can ever own of each of a layer's pools, or None.
      ahead: a pool that must grow makes room for this many tokens, so that not every segment of a long
        answer meets a new size and a compilation.
      doubling: a pool that must grow at least doubles, for the same reason; for prefill, after which
        ``fit`` gives the excess back.
      uneven: each prompt makes layers of other sizes; growth goes by ``pool.familiar``.
    """
    totals = counts(state)
    if not totals:
        return state
    pools, live = [state.mesh.local(pages) for pages in _pools(state)], [int(n) for n in totals["slots"]]
    kinds = len(pools) // sum(layer.pages is not None for layer in state.layers)  # pools of a layer
    sizes = [pages.count for pages in pools]
    for kind in range(kinds):
        every = slice(kind, None, kinds)
        sizes[every] = pool.grown_sizes(
            pools[every],
            live[every],
            tokens,
            most[kind],
            ahead=ahead,
            doubling=doubling,
            uneven=uneven,
        )
    same = all(pages.count == size for pages, size in zip(pools, sizes))
    return state if same else _resized(state, tuple(sizes))


def with_host(layer: LayerCache, near: hosting.Near | None, mesh: Mesh) -> LayerCache:
    """A layer whose full pages have gone to host memory; room for all that its tables name is taken at once.

    Args:
      layer: donated; one that has pages in host memory stays as it is.
      near: what the device has of them; None: nothing goes.
      mesh: where the layer lies.
    """
    if near is None or layer.pages is None or layer.hosted is not None:
        return layer
    shapes = hosting.shapes(layer.pages, near, mesh)
    hosted = hosting.placed(hosting.empty(shapes), mesh)
    return _sent(dataclasses.replace(layer, hosted=hosted), mesh)


def sent(state: KVState) -> KVState:
    """The state with its full pages in host memory, where they belong there; it is donated.

    Behind pages that are mapped from a file none goes: what is written later stays in the layer's pages.
    """
    stays = [layer.hosted is None or layer.hosted.mapped for layer in state.layers]
    layers = tuple(x if stay else _sent(x, state.mesh) for x, stay in zip(state.layers, stays))
    return dataclasses.replace(state, layers=layers)


def _sent(layer: LayerCache, mesh: Mesh) -> LayerCache:
    pages, hosted = _moved(layer.pages, layer.hosted, mesh)
    return dataclasses.replace(layer, pages=pages, hosted=hosted)


@functools.partial(jax.jit, static_argnums=2, donate_argnums=(0, 1))
def _moved(pages: Pages, hosted: Hosted, mesh: Mesh) -> tuple[Pages, Hosted]:
    specs = of_state(pages), of_state(hosted)
    return mesh.each(hosting.moved, [pages, hosted], [*specs], specs)  # type: ignore[no-any-return]


def fit(state: KVState) -> KVState:
    """Shrink every pool to the smallest size class that holds its owned pages."""
    totals = counts(state)
    return (
        _resized(state, tuple(pool.size_class(max(1, int(n))) for n in totals["used"])) if totals else state
    )


def _pools(state: KVState) -> list[Pages]:
    """All pools, layer by layer."""
    return [pages for layer in state.layers for pages in layer.pools]


@functools.partial(jax.jit, static_argnums=(1, 2))
def resize(pages: Pages, count: int, mesh: Mesh = ONE) -> Pages:
    """The pages in a pool of so many on each device; see ``pool.resize``."""
    specs = of_state(pages)
    return mesh.each(lambda shard: pool.resize(shard, count), [pages], [specs], specs)


def _resized(state: KVState, sizes: tuple[int, ...]) -> KVState:
    """The state with all pools at these sizes; untouched pools keep their buffers."""
    size = iter(sizes)

    def sized(pages: Pages) -> Pages:
        want = next(size)
        return pages if want == pages.count // state.mesh.pools else resize(pages, want, state.mesh)

    layers = tuple(layer.with_pools([sized(pages) for pages in layer.pools]) for layer in state.layers)
    return dataclasses.replace(state, layers=layers)


def reshard(state: KVState, mesh: Mesh) -> KVState:
    """The state on another mesh, or on one device (``ONE``), in pools that just hold it.

    Args:
      state: left as it is.
      mesh: must divide its rows and KV heads.
    """
    if state.mesh == mesh:
        return state
    numbers = {name: getattr(state, name) for name in ("length", "total", "peak", "confidence")}
    layers = tuple(
        with_host(moved(cache, state.mesh, mesh, pool.size_class), cache.near, mesh) for cache in state.layers
    )
    return dataclasses.replace(state, layers=layers, mesh=mesh, **mesh.put(state.mesh.read(numbers)))


def fork(state: KVState, row: int, n: int) -> KVState:
    """n rows, each a copy of ``row``: several continuations of one compressed context.

    Pages are copied, so every page keeps exactly one owner; on a mesh by way of the host.

    Raises:
      IndexError: no such row.
      ValueError: n < 1, or a state that was donated.
      MeshError: a mesh that does not divide n rows.
    """
    heads = state.layers[0].ring.k.shape[1]
    state.mesh.check(f"fork(n={n})", rows=n, heads=heads * state.mesh.size(CONTEXT), kv_heads=heads)
    if state.gone:
        raise ValueError(f"fork(row={row}): {DONATED}")
    if not 0 <= row < state.rows:
        raise IndexError(
            f"fork(row={row}) asks for a row of a state that has {state.rows}. Rows count from 0."
        )
    if n < 1:
        raise ValueError(f"fork(n={n}) makes no row. Give n of 1 or more.")
    single = reshard(state, ONE)
    near = [layer.near for layer in single.layers]
    whole = tuple(
        layer if layer.hosted is None else jax.device_put(on_host(layer, ONE)) for layer in single.layers
    )
    single = dataclasses.replace(single, layers=whole)
    owned = [int(paging.used(pages)[row].sum()) for pages in _pools(single)]
    sizes = tuple(pool.size_class(max(1, count * n)) for count in owned)
    rows = _pick_rows(single, jnp.full(n, row), sizes)
    layers = tuple(with_host(layer, one, ONE) for layer, one in zip(rows.layers, near))
    return reshard(dataclasses.replace(rows, layers=layers), state.mesh)


@functools.partial(jax.jit, static_argnums=2)
def _pick_rows(state: KVState, index: Array, sizes: tuple[int, ...]) -> KVState:
    size = iter(sizes)
    layers = tuple(
        dataclasses.replace(
            layer,
            ring=rings.rows(layer.ring, index),
            summary=jax.tree.map(lambda x: x[index], layer.summary),
        ).with_pools([pool.pick_rows(pages, index, next(size)) for pages in layer.pools])
        for layer in state.layers
    )
    return dataclasses.replace(
        state,
        layers=layers,
        length=state.length[index],
        total=state.total[index],
        confidence=None if state.confidence is None else state.confidence[index],
    )
