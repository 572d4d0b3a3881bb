"""Full pages in host memory, and the units of them that a device holds.

The list that a selection chooses from begins here and goes on in the layer's pages. S = 4, ten tokens:

  hosted   page 3 [a b c d]   page 5 [e f g h]     in host memory, never written again
  pages    page 7 [i j . .]                        on the device, being filled

A program that decodes or reads only reads what is hosted; pages move between programs (``moved``). Units
(pages, chunks or tokens: what the selection chooses together) are numbered through both, hosted ones first.
Those of a saved file may be mapped from it (``kvjax.cache.mapped``): then no page follows them.

Why: kvjax/DESIGN.md, 39.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on
from jax.sharding import NamedSharding

from kvjax.cache import pages as paging
from kvjax.cache.pages import Pages
from kvjax.cache.write import DROP, split
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.sharding.specs import HEADS, POOL, WHOLE
from kvjax.types import EMPTY, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Num

KIND = "pinned_host"
"""What jax calls the host memory that devices read."""

OLDEST = (0, 10)
"""The oldest jax with which a program's loops read host memory."""


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cached:
    """Units that were brought to the device, C of each KV head; the least recently used goes first.

    Attributes:
      k, v, pos: as they are hosted, U slots a unit.
      holds: which unit a place holds; EMPTY for none.
      place: where a unit is; EMPTY for one that is not here.
      used: when a place was last read, by ``clock``.
      clock: reads so far.
      asked, hits: units that reads asked for, and those that were here.
    """

    k: Num[Array, "B K C U X"]
    v: Num[Array, "B K C U X"]
    pos: Int[Array, "B K C U"]
    holds: Int[Array, "B K C"]
    place: Int[Array, "B K N"]
    used: Int[Array, "B K C"]
    clock: Int[Array, "B K"]
    asked: Int[Array, "B K"]
    hits: Int[Array, "B K"]

    @property
    def unit(self) -> int:
        """U, slots of a unit."""
        return self.pos.shape[3]


class Index(Protocol):
    """Codes of the keys that a selection ranks; see ``kvjax.storage.codes.Coded``."""

    def of_page(self, k: Array) -> tuple[Array, Array]:
        """Codes of the keys [S, H] of a page, and their scales [2, H]."""
        ...


@pytree(static=("index",))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosted:
    """The full pages of one layer's selectable tokens; P pages of S slots.

    Attributes:
      k, v: in host memory, slot after slot; as the pool stores them, bfloat16 as its bits.
      pos: true position of the token in each slot; in host memory.
      scales, summary: of each page, as in ``Pages``; on the device.
      keys: what a selection that reads every key ranks by, on the device: keys as they are stored, or codes
        with ``key_scales``; None for selections that rank by ``summary``.
      table: ids of the pages of each KV head, in list order; EMPTY beyond the last.
      owned: pages of each KV head.
      taken: pages of the pool that are owned; the first ones.
      cached: what the device holds of them.
      begins: first slot of each page, of pages that are mapped from a file; None: page after page.
      index: how ``keys`` are coded; None: as they are stored. Static.
    """

    k: Num[Array, "PS X"]
    v: Num[Array, "PS X"]
    pos: Int[Array, " PS"]
    scales: Any
    summary: dict[str, Array]
    keys: Num[Array, "P S X"] | None
    key_scales: Float[Array, "P 2 H"] | None
    table: Int[Array, "B K M"]
    owned: Int[Array, "B K"]
    taken: Int[Array, ""]
    cached: Cached
    begins: Int[Array, " P"] | None = None
    index: Index | None = None

    per_device = ("taken",)

    @property
    def mapped(self) -> bool:
        """Are they mapped from a file?"""
        return self.begins is not None

    @property
    def size(self) -> int:
        """S, slots of a page."""
        return self.cached.place.shape[2] * self.cached.unit // self.table.shape[2]

    def first_slot(self, page: Int[Array, ...]) -> Int[Array, ...]:
        """Where these pages begin."""
        return page * self.size if self.begins is None else self.begins[page]

    def specs(self) -> Any:
        """How it is cut over devices: the pool by device, the rest by row and KV head."""
        by_head = jax.tree.map(lambda _: HEADS, self)
        names = (*OF_PAGES, "keys", "key_scales")
        of_pool = {name: jax.tree.map(lambda _: POOL, getattr(self, name)) for name in names}
        return dataclasses.replace(by_head, **of_pool, taken=POOL)


IN_HOST = ("k", "v", "pos")
"""Arrays that lie in host memory."""

OF_PAGES = (*IN_HOST, "scales", "summary")
"""Arrays that begin with the pages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Near:
    """What a device has of the tokens in host memory, beside what is kept for every page.

    Attributes:
      units: units of each KV head in its cache.
      unit: slots of a unit.
      keys: does the selection rank by every key?
      index: how these are coded, or None.
    """

    units: int
    unit: int
    keys: bool = False
    index: Index | None = None


def shapes(pages: Pages, near: Near, mesh: Mesh = ONE) -> Hosted:
    """Shapes of a layer's hosted pages, with room for as much as the tables can name.

    Args:
      pages: those of the layer, whose last list goes on from here; shapes suffice.
      near: what the device has.
      mesh: where it will lie.
    """
    (rows, heads, _, entries), unit, dim = pages.table.shape, near.unit, pages.head_dim
    count, places = rows * heads * entries, (rows, heads, near.units)
    bits = jnp.uint16 if pages.k.dtype == jnp.bfloat16 else pages.k.dtype
    slots, width = count * pages.size, pages.k.shape[2]

    def of(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    whole = lambda *shape: of(jnp.int32, *shape)  # noqa: E731
    of_pages = lambda tree: jax.tree.map(lambda x: of(x.dtype, count, *x.shape[1:]), tree)  # noqa: E731
    cached = Cached(
        k=of(bits, *places, unit, width),
        v=of(bits, *places, unit, width),
        pos=whole(*places, unit),
        holds=whole(*places),
        place=whole(rows, heads, entries * pages.size // unit),
        used=whole(*places),
        clock=whole(rows, heads),
        asked=whole(rows, heads),
        hits=whole(rows, heads),
    )
    keys = key_scales = None
    if near.keys and near.index is None:
        keys = of(pages.k.dtype, count, *pages.k.shape[1:])
    if near.keys and near.index is not None:
        codes = jax.eval_shape(near.index.of_page, of(jnp.float32, pages.size, dim))
        keys, key_scales = (of(x.dtype, count, *x.shape) for x in codes)
    return Hosted(
        k=of(bits, slots, width),
        v=of(bits, slots, width),
        pos=whole(slots),
        scales=of_pages(pages.scales),
        summary=of_pages(pages.summary),
        keys=keys,
        key_scales=key_scales,
        index=near.index,
        table=whole(rows, heads, entries),
        owned=whole(rows, heads),
        taken=whole(*() if mesh.grid is None else (mesh.pools,)),
        cached=cached,
    )


def empty(shapes: Hosted) -> Hosted:
    """None yet; NumPy arrays, to be ``placed``."""
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    none = lambda x: np.full(x.shape, EMPTY, x.dtype)  # noqa: E731
    near = shapes.cached
    cached = dataclasses.replace(zeros.cached, holds=none(near.holds), place=none(near.place))
    return dataclasses.replace(zeros, table=none(shapes.table), cached=cached)


def placed(hosted: Hosted, mesh: Mesh = ONE) -> Hosted:
    """Of NumPy arrays: what lies in host memory there, the rest on the devices."""
    names: dict[str, Any] = {
        name: jax.device_put(getattr(hosted, name), host_memory(mesh)) for name in IN_HOST
    }
    rest = on_device(hosted)
    return dataclasses.replace(mesh.put(rest, rest.specs()), **names)


def host_memory(mesh: Mesh = ONE) -> NamedSharding:
    """Host memory that the devices can read, of arrays that begin with the pages.

    For one device a grid of it alone: a program knows where an array lies by the sharding of a grid only.
    """
    if mesh.grid is not None:
        return NamedSharding(mesh.grid, POOL, memory_kind=KIND)
    grid = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("device",))
    return NamedSharding(grid, WHOLE, memory_kind=KIND)


def absent(*, codes: bool = False) -> str:
    """Why pages, in ``codes`` or not, cannot lie in host memory here, as the end of a sentence; or ""."""
    if jax.__version_info__ < OLDEST:
        return (
            f"jax {jax.__version__} compiles no read of it inside a loop; {'.'.join(map(str, OLDEST))} does"
        )
    platform = jax.default_backend()
    if platform not in ("cpu", "tpu"):
        return f"programs that read it are compiled and tested for CPU and TPU, not for {platform}"
    if codes and platform == "tpu":
        return (
            "on TPU the device lays codes out otherwise than the host's cores, and a step would copy them all"
        )
    return ""


def sharded(mesh: Mesh, shapes: Hosted) -> Hosted:
    """Shapes with where each array lies, of a mesh."""
    placed = mesh.shapes(shapes, shapes.specs())
    host = host_memory(mesh)
    far = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host)  # noqa: E731
    named: dict[str, Any] = {name: far(x) for name, x in in_host(shapes).items()}
    return dataclasses.replace(placed, **named)


def as_stored(x: Array, dtype: Any) -> Array:
    """An array of host memory as the pool holds it: bits are numbers again."""
    return jax.lax.bitcast_convert_type(x, dtype) if x.dtype != dtype else x


def as_bits(x: Array) -> Array:
    """The other way."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


# --- moving --------------------------------------------------------------------------------------


def moved(pages: Pages, hosted: Hosted) -> tuple[Pages, Hosted]:
    """The full pages of the last list go to host memory, one copy a page; both are donated.

    The pool must have room for them.
    """
    rows, heads, _, entries = pages.table.shape
    table = pages.table[:, :, -1]
    full = split(pages.length[:, :, -1], pages.size)[0]
    goes = jnp.arange(entries) < full[..., None]
    flat, count = goes.reshape(-1), goes.sum()
    from_ = jnp.maximum(table.reshape(-1)[jnp.argsort(~flat, stable=True)], 0)

    def one(i: Int[Array, ""], hosted: Hosted) -> Hosted:
        page, to = from_[i], hosted.taken + i
        taken = {name: _cut(getattr(pages, name), page) for name in OF_PAGES}
        keys, key_scales = hosted.keys, hosted.key_scales
        if keys is not None:
            k, scale = taken["k"], None
            if hosted.index is not None:
                k, scale = hosted.index.of_page(k)
            keys, key_scales = _put(keys, k, to), _put(key_scales, scale, to)
        first = to * pages.size
        after: dict[str, Any] = {
            name: _sent(x, as_bits(taken[name]), first) for name, x in in_host(hosted).items()
        }
        after |= {name: _put(getattr(hosted, name), taken[name], to) for name in ("scales", "summary")}
        return dataclasses.replace(hosted, **after, keys=keys, key_scales=key_scales)

    hosted = jax.lax.fori_loop(0, count, one, hosted)
    b, k = jnp.arange(rows)[:, None, None], jnp.arange(heads)[:, None]
    entry = jnp.where(goes, hosted.owned[..., None] + jnp.arange(entries), entries)
    ids = hosted.taken + jnp.cumsum(flat).reshape(goes.shape) - 1
    after = dataclasses.replace(
        hosted,
        table=hosted.table.at[b, k, entry].set(ids, **DROP),
        owned=hosted.owned + full,
        taken=hosted.taken + count.astype(jnp.int32),
    )
    return paging.without_first(pages, full), after


def _sent(x: Num[Array, "C ..."], slots: Num[Array, "S ..."], first: Int[Array, ""]) -> Num[Array, "C ..."]:
    """An array of host memory with these slots from ``first`` on, written by the host's cores."""
    space = jax.memory.Space.Host

    @compute_on("device_host")
    @jax.jit
    def written(x: Array, slots: Array, first: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, slots, first, axis=0)

    return written(x, jax.device_put(slots, space), jax.device_put(first, space))


def _cut(tree: Any, page: Int[Array, ""]) -> Any:
    """One page of arrays that begin with the pages."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, page, keepdims=False), tree)


def _put(tree: Any, values: Any, page: Int[Array, ""]) -> Any:
    """The arrays with the values of one page in them."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, page, 0), tree, values)


# --- whole ---------------------------------------------------------------------------------------


def joined(pages: Pages, hosted: Hosted) -> Pages:
    """All pages in one pool, as they would lie without host memory; of NumPy arrays, on the host."""
    size, count, table = pages.size, pages.count, np.array(pages.table)
    far, owned, entries = np.asarray(hosted.table), np.asarray(hosted.owned), table.shape[-1]
    ids = far[far >= 0]
    first = ids * size if hosted.begins is None else np.asarray(hosted.begins)[ids]

    def slots(mine: Any, others: Any) -> Any:
        mine, others = np.asarray(mine), np.asarray(others)
        return np.concatenate([mine, others.view(mine.dtype)[first[:, None] + np.arange(size)]])

    def of_pages(mine: Any, others: Any) -> Any:
        return np.concatenate([np.asarray(mine), np.asarray(others)[ids]])

    behind = np.arange(entries) - owned[..., None]
    own = np.take_along_axis(table[:, :, -1], np.clip(behind, 0, entries - 1), axis=-1)
    renamed = np.full_like(far, EMPTY)
    renamed[far >= 0] = count + np.arange(len(ids))
    table[:, :, -1] = np.where(behind < 0, renamed, own)
    length = np.array(pages.length)
    length[:, :, -1] += owned * size
    whole: dict[str, Any] = {name: slots(getattr(pages, name), x) for name, x in in_host(hosted).items()}
    whole |= {
        "scales": jax.tree.map(of_pages, pages.scales, hosted.scales),
        "summary": jax.tree.map(of_pages, pages.summary, hosted.summary),
        "table": table,
        "length": length,
        "refs": np.concatenate([np.asarray(pages.refs), np.ones(len(ids), np.int32)]),
        "free": np.concatenate([np.asarray(pages.free), np.zeros(len(ids), np.int32)]),
    }
    return dataclasses.replace(pages, **whole)


def on_device(hosted: Hosted) -> Hosted:
    """What of it lies on the device."""
    nothing: dict[str, Any] = dict.fromkeys(IN_HOST)
    return dataclasses.replace(hosted, **nothing)


def in_host(hosted: Hosted) -> dict[str, Array]:
    """What of it lies in host memory."""
    return {name: getattr(hosted, name) for name in IN_HOST}
