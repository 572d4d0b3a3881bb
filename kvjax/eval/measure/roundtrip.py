"""What storing costs: keys and values of real texts, stored and read back.

Per layer, for keys and for values: the Frobenius norm of (read back - exact) over that of exact, over all
rows, KV heads and tokens. What is stored is what a full cache holds after reading the texts: keys after RoPE,
in the model's own dtype. Layers whose own sliding window rules are left out: no storage part acts there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode
from kvjax.algebra import Policy, SelectAll, Storage
from kvjax.cache import pages as paging
from kvjax.cache import pool
from kvjax.cache.ring import Entry
from kvjax.eval.tasks.sample import Samples
from kvjax.types import Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Way:
    """How tokens come into pages.

    Attributes:
      name: for tables.
      page: slots of a page, which share their scales; None for one page a stream.
      grown: token by token, each of which may grow the scales, instead of all at once.
    """

    name: str
    page: int | None
    grown: bool


WAYS = (
    Way("pages, a prompt at once", decode.PAGE, False),
    Way("pages, token by token", decode.PAGE, True),
    Way("one scale a head and channel", None, False),
)
"""As a prompt and as generated tokens are stored here; and the paper's one scale for the whole line."""


@dataclasses.dataclass(frozen=True)
class Error:
    """Relative error of a storage, by layer."""

    storage: str
    way: str
    k: tuple[float, ...]
    v: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over layers, keys and values."""
        return float(np.mean([*self.k, *self.v]))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def read_back(
    k: Float[Array, "B K T H"], v: Float[Array, "B K T H"], storage: Storage, page: int, grown: bool
) -> tuple[Float[Array, "B K T H"], Float[Array, "B K T H"]]:
    """What a read sees of T tokens a stream after they were stored in pages of ``page`` slots."""
    rows, heads, t, dim = k.shape
    entries, chooser = -(-t // page), SelectAll()
    pages = pool.empty(
        pages=rows * heads * entries,
        size=page,
        rows=rows,
        heads=heads,
        lists=1,
        entries=entries,
        head_dim=dim,
        width=storage.width(dim),
        dtype=storage.dtype(k.dtype),
        scaled=storage.scaled,
        meta=(),
        summary={},
    )

    def put(pages: paging.Pages, start: Any, count: int) -> paging.Pages:
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=count, axis=2)
        pos = jnp.broadcast_to(start + jnp.arange(count), (rows, count))
        new = Entry(k=cut(k), v=cut(v), pos=pos, admit=jnp.ones((rows, heads, count), bool), meta={})
        return paging.append(pages, storage, chooser, new, jnp.zeros((rows, heads, count), jnp.int32))

    pages = jax.lax.fori_loop(0, t, lambda i, p: put(p, i, 1), pages) if grown else put(pages, 0, t)
    at = jnp.arange(t)
    return storage.read(pages, pages.table[:, :, 0, at // page], at % page)


def exact(model: Weighted, samples: Samples) -> list[tuple[Array, Array]]:
    """Keys and values of each layer that takes a policy, [B, K, T, H]; texts are cut to the shortest."""
    texts = [[*e.context, *e.question, *e.prefix, *e.answer] for _, e in samples]
    t = min(map(len, texts))
    state, _ = decode.prefill(
        model, Policy(), [text[:t] for text in texts], context=decode.bucket(t, model.network.max_positions)
    )
    own = [layer.ring for layer, window in zip(state.layers, model.network.windows) if window is None]
    return [(ring.k[:, :, :t], ring.v[:, :, :t]) for ring in own]  # position p is in slot p


def _off(found: Array, true: Array) -> float:
    true = true.astype(jnp.float32)
    return float(jnp.linalg.norm(found.astype(jnp.float32) - true) / jnp.linalg.norm(true))


def errors(layers: list[tuple[Array, Array]], storages: Sequence[Storage]) -> list[Error]:
    """Every storage in every way it can be written."""
    found = []
    for storage in storages:
        for way in WAYS:
            k, v = [], []
            for layer in layers:
                back = read_back(*layer, storage, way.page or layer[0].shape[2], way.grown)
                k.append(_off(back[0], layer[0]))
                v.append(_off(back[1], layer[1]))
            found.append(Error(storage.name, way.name, tuple(k), tuple(v)))
    return found


def markdown(found: Sequence[Error]) -> str:
    """One line a storage and way: means over layers, and the worst layer."""
    lines = ["| storage | written | K | V | mean | worst layer |", "|---|---|---|---|---|---|"]
    for e in found:
        numbers = np.mean(e.k), np.mean(e.v), e.mean, max(*e.k, *e.v)
        lines.append(f"| `{e.storage}` | {e.way} | " + " | ".join(f"{x:.2%}" for x in numbers) + " |")
    return "\n".join(lines)


def as_json(found: Sequence[Error]) -> list[dict[str, Any]]:
    """The same with every layer."""
    return [dataclasses.asdict(e) | {"mean": e.mean} for e in found]
