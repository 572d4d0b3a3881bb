"""A network whose seam does only part of the work: what a decode step costs without the rest.

The compiled segment is the real one; only what stands behind the seam, or around it, is left out. Each step
of the ladder adds one part, and the difference to the step before is what that part costs inside the step.

  weights   embedding, projections, MLP, logits, sampling; attention gives back q + k + v
  ring      and the new token is written into the ring, and the ring is read
  read      and GLOBAL is read, at what the policy selects, but nothing enters or leaves it; no φ
  all       the real step: admission, the door, eviction, selection, metadata, φ
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
class Given(Selection):
    """As many pages as the real selection visits, spread over the list, at no cost."""

    name = "given"
    real: Selection = SelectAll()

    @property
    def splits(self) -> bool:  # type: ignore[override]
        """As the real one."""
        return self.real.splits

    def applies(self, layer: int) -> bool:
        """Where the real one does."""
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
        """Of the real one's shape."""
        real = functools.partial(self.real.select, params, list_id=list_id, total=total, longest=longest)
        shape = jax.eval_shape(lambda q, pages: real(q, pages), q, pages)
        visited, unit = shape.entries.shape[-1], shape.unit or pages.size
        spread = jnp.arange(visited) * (pages.span // unit) // visited
        return Picked(entries=jnp.broadcast_to(spread, shape.entries.shape), unit=shape.unit)


@dataclasses.dataclass(frozen=True)
class Cut(Decoder):
    """A decoder for ``kvjax.decode.decode_steps`` with parts left out.

    Attributes:
      policy: as in the segment.
      depth: how much stands behind the seam.
      weights: False leaves out everything around the seam.
    """

    policy: Policy = Policy()
    depth: Depth = "all"
    weights: bool = True

    def at(self, context: int) -> Cut:
        """As the real one."""
        return dataclasses.replace(self, spec=self.spec.at(context))

    def layer(
        self, params: Params, index: int, x: Array, positions: Array, attend: AttendFn[C], carry: C
    ) -> tuple[Array, C]:
        """One block, or its seam alone."""
        seam = attend if self.depth == "all" else self._seam(positions)
        if self.weights:
            return super().layer(params, index, x, positions, seam, carry)
        spec = self.spec
        # Heads that depend on x, so that nothing can be computed before the loop.
        some = x[:, :, None, : spec.head_dim] if spec.head_dim <= spec.model_dim else x[:, :, None, :1]
        q = jnp.broadcast_to(some, (*x.shape[:2], spec.num_heads, spec.head_dim))
        k = q[:, :, : spec.num_kv_heads]
        out, carry = seam(index, Heads(q=q, k=k, v=k, q_pre=q, k_pre=k, hidden=x), carry)
        return x + out.mean(axis=(2, 3))[..., None].astype(x.dtype), carry

    def logits(self, params: Params, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """As the real one; without weights x itself, repeated."""
        if self.weights:
            return super().logits(params, x)
        wide = -(-self.spec.vocab_size // x.shape[-1])
        return jnp.tile(x.astype(jnp.float32), wide)[..., : self.spec.vocab_size]

    def _seam(self, positions: Int[Array, "B 1"]) -> Callable:
        def attend(index: int, heads: Heads, room: LayerCache) -> tuple[Array, tuple[LayerCache, None]]:
            out, room = answer(index, heads, room)
            return out, (room, None)  # a step's seam tells of its read; nobody asks here

        def answer(index: int, heads: Heads, room: LayerCache) -> tuple[Array, LayerCache]:
            if self.depth == "weights":
                # Keys and values count, or the compiler would leave out what makes them.
                extra = jnp.repeat(heads.k + heads.v, self.spec.groups, axis=2)
                return heads.q + extra, room
            q = jnp.swapaxes(heads.q, 1, 2)
            room, recent = _ring(room, heads, q, positions)
            if self.depth == "ring" or room.pages is None:
                return jnp.swapaxes(recent[0], 1, 2).astype(heads.v.dtype), room
            room = _touched(room, positions)
            parts = [recent, *self._read(index, room, q)]
            return jnp.swapaxes(merge(parts)[0], 1, 2).astype(heads.v.dtype), room

        return attend

    def _read(self, index: int, room: LayerCache, q: Array) -> tuple[layers.Partial, ...]:
        policy = self.policy
        if not policy.selection.idle:
            policy = dataclasses.replace(policy, selection=Given(real=policy.selection))
        policy = dataclasses.replace(policy, completion=Nothing())
        total = jnp.zeros(q.shape[0], jnp.int32)
        site = layers.LayerInfo(policy, {}, index, self.num_layers, None, total)
        return layers.read_pages(site, room, q, decoding=True, softcap=self.spec.attn_softcap).partials


def _ring(
    room: LayerCache, heads: Heads, q: Array, positions: Int[Array, "B 1"]
) -> tuple[LayerCache, layers.Partial]:
    """Write the token and read the ring, without metadata."""
    k, v = jnp.swapaxes(heads.k, 1, 2), jnp.swapaxes(heads.v, 1, 2)
    new = Entry(k=k, v=v, pos=positions, admit=jnp.ones(k.shape[:3], bool), meta={})
    length, one = positions[:, 0], jnp.ones(positions.shape[0], jnp.int32)
    ring = rings.put(dataclasses.replace(room.ring, meta={}), new, length, one)
    held = rings.positions(length + 1, ring.window)
    recent = blockwise(q, ring.k, ring.v, q_pos=positions, k_pos=held)
    return dataclasses.replace(room, ring=dataclasses.replace(ring, meta=room.ring.meta)), recent


def _touched(room: LayerCache, positions: Int[Array, "B 1"]) -> LayerCache:
    """The same pages, but the compiler cannot know: nothing of the read may be computed before the loop."""
    return room.with_pools([_touched_pages(pages, positions[0, 0] < 0) for pages in room.pools])


def _touched_pages(pages: Pages, no: Array) -> Pages:

    def slot(x: Array) -> Array:
        return x.at[0, 0].set(jnp.where(no, jnp.zeros_like(x[0, 0]), x[0, 0]))

    table, length = jnp.where(no, -1, pages.table), jnp.where(no, 0, pages.length)
    scales = None if pages.scales is None else slot(pages.scales)
    return dataclasses.replace(
        pages, k=slot(pages.k), v=slot(pages.v), scales=scales, table=table, length=length
    )
