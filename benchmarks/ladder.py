"""A network whose attention does only part of its work, to measure what a decode step costs without the rest.

The decode loop is the real one; only attention, or what is around it, is cut. Each program of the ladder adds
one part, and the difference to the one before is what that part costs inside the step.

  weights   embedding, projections, MLP, logits, sampling; attention returns q + k + v
  ring      the new token is also written to the ring, and the ring is read
  read      GLOBAL is also read, where the policy selects, but nothing enters or leaves it; no φ
  all       the real step: admission, window exits, eviction, selection, metadata, φ
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from kvjax import layer as layers
from kvjax.algebra import Nothing, Picked, Policy, SelectAll, Selection
from kvjax.cache import ring as rings
from kvjax.cache.pages import Pages
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.models.decoder import Decoder
from kvjax.types import AttendFn, C, Heads, Params
from pallas_kernels.blockwise.api import blockwise
from pallas_kernels.merge.api import merge

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

Depth = Literal["weights", "ring", "read", "all"]


@dataclasses.dataclass(frozen=True, repr=False)
class FreeSelection(Selection):
    """As many pages as the real selection visits, spread over the list, at no cost."""

    name = "free"
    real: Selection = SelectAll()

    @property
    def splits(self) -> bool:  # type: ignore[override]
        return self.real.splits

    def applies(self, layer: int) -> bool:
        return self.real.applies(layer)

    def select(
        self,
        params: Params | None,
        q: Float[Array, "B N H"],
        pages: Pages,
        list_id: int,
        total: Int[Array, " B"],
        longest: int,
    ) -> Picked:
        real = functools.partial(self.real.select, params, list_id=list_id, total=total, longest=longest)
        shape = jax.eval_shape(lambda q, pages: real(q, pages), q, pages)
        visited, unit = shape.entries.shape[-1], shape.unit or pages.size
        spread = jnp.arange(visited) * (pages.span // unit) // visited
        return Picked(entries=jnp.broadcast_to(spread, shape.entries.shape), unit=shape.unit)


@dataclasses.dataclass(frozen=True)
class Cut(Decoder):
    """A decoder for ``kvjax.decode.decode_steps`` with parts left out.

    Attributes:
      policy: of the decode loop.
      depth: how much attention does.
      weights: False leaves out everything around attention.
    """

    policy: Policy = Policy()
    depth: Depth = "all"
    weights: bool = True

    def at(self, context: int) -> Cut:
        return dataclasses.replace(self, spec=self.spec.at(context))

    def layer(
        self, params: Params, index: int, x: Array, positions: Array, attend: AttendFn[C], carry: C
    ) -> tuple[Array, C]:
        """One block, or its attention alone."""
        cut = attend if self.depth == "all" else self._attention(positions)
        if self.weights:
            return super().layer(params, index, x, positions, cut, carry)
        spec = self.spec
        # Heads that depend on x, so that nothing can be computed before the loop.
        some = x[:, :, None, : spec.head_dim] if spec.head_dim <= spec.model_dim else x[:, :, None, :1]
        q = jnp.broadcast_to(some, (*x.shape[:2], spec.num_heads, spec.head_dim))
        k = q[:, :, : spec.num_kv_heads]
        out, carry = cut(index, Heads(q=q, k=k, v=k, q_pre=q, k_pre=k, hidden=x), carry)
        return x + out.mean(axis=(2, 3))[..., None].astype(x.dtype), carry

    def logits(self, params: Params, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """The real ones; without weights x itself, repeated."""
        if self.weights:
            return super().logits(params, x)
        wide = -(-self.spec.vocab_size // x.shape[-1])
        return jnp.tile(x.astype(jnp.float32), wide)[..., : self.spec.vocab_size]

    def _attention(self, positions: Int[Array, "B 1"]) -> Callable:
        def attend(index: int, heads: Heads, cache: LayerCache) -> tuple[Array, tuple[LayerCache, None]]:
            if self.depth == "weights":
                # Keys and values count, or the compiler would leave out what makes them.
                extra = jnp.repeat(heads.k + heads.v, self.spec.groups, axis=2)
                return heads.q + extra, (cache, None)  # None: no report of what was read
            q = jnp.swapaxes(heads.q, 1, 2)
            cache, out = _ring(cache, heads, q, positions)
            if self.depth == "read" and cache.pages is not None:
                cache = cache.with_pools([_touched(pages, positions[0, 0] < 0) for pages in cache.pools])
                out = merge([out, *self._read(index, cache, q)])
            return jnp.swapaxes(out[0], 1, 2).astype(heads.v.dtype), (cache, None)

        return attend

    def _read(self, index: int, cache: LayerCache, q: Array) -> tuple[layers.Partial, ...]:
        policy = dataclasses.replace(self.policy, completion=Nothing())
        if not policy.selection.idle:
            policy = dataclasses.replace(policy, selection=FreeSelection(real=policy.selection))
        total = jnp.zeros(q.shape[0], jnp.int32)
        info = layers.LayerInfo(policy, {}, index, self.num_layers, None, total)
        return layers.read_pages(info, cache, q, by=policy.selection, softcap=self.spec.attn_softcap).partials


def _ring(
    cache: LayerCache, heads: Heads, q: Array, positions: Int[Array, "B 1"]
) -> tuple[LayerCache, layers.Partial]:
    """Writes the token and reads the ring, without metadata."""
    k, v = jnp.swapaxes(heads.k, 1, 2), jnp.swapaxes(heads.v, 1, 2)
    new = Entry(k=k, v=v, pos=positions, admit=jnp.ones(k.shape[:3], bool), meta={})
    length, one = positions[:, 0], jnp.ones(positions.shape[0], jnp.int32)
    ring = rings.put(dataclasses.replace(cache.ring, meta={}), new, length, one)
    held = rings.positions(length + 1, ring.window)
    recent = blockwise(q, ring.k, ring.v, q_pos=positions, k_pos=held)
    return dataclasses.replace(cache, ring=dataclasses.replace(ring, meta=cache.ring.meta)), recent


def _touched(pages: Pages, no: Array) -> Pages:
    """The same pages, but the compiler cannot know: no part of the read may be computed before the loop."""

    def slot(x: Array) -> Array:
        return x.at[0, 0].set(jnp.where(no, jnp.zeros_like(x[0, 0]), x[0, 0]))

    table, length = jnp.where(no, -1, pages.table), jnp.where(no, 0, pages.length)
    scales = jax.tree.map(slot, pages.scales)
    return dataclasses.replace(
        pages, k=slot(pages.k), v=slot(pages.v), scales=scales, table=table, length=length
    )
