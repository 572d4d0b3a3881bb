"""KIVI: keys in 2 or 4 bits by channel, values by token, the newest tokens exact.

Liu et al., KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache, https://arxiv.org/abs/2402.02750

A few channels of keys stand out, so a key's code counts from the lowest value of its channel among ``group``
tokens; a value's code from the lowest of ``group`` channels of its token. Each group has a lowest value and a
step, in float16. Reads decode in plain XLA.

A group of keys is ``group`` slots of a page, and fills one token at a time. Where the window still holds the
tokens that will fill it, the group is opened with all their keys in view, as if it were coded at once. Where
not (a budget that evicts while decoding, a window shorter than a group, a token that moves into a hole), its
range grows, and the group is coded again.

Why: kvjax/DESIGN.md, 30.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.algebra import Argument, Policy, PolicyError, Storage, Whole
from kvjax.cache.pages import Coming, Pages
from kvjax.cache.write import DROP
from pallas_kernels.ragged_decode.api import PAIRED, Grouped, decoded, lowest_and_step, packed, unpacked

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class Bits(Argument):
    """How many bits a code has."""

    what = "number of bits"
    expected = "2 or 4"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, int) and value in (2, 4)


@dataclasses.dataclass(frozen=True, repr=False)
class Kivi(Storage):
    """Pages in codes of ``bits`` bits, except for the newest ``recent`` retained tokens.

    Attributes:
      bits: of a code.
      recent: as in ``int8``; the paper's residual length.
      group: tokens of a channel, or channels of a token, that share a lowest value and a step; a head with
        fewer channels, or with a number that ``group`` does not divide, has shorter groups of channels.
    """

    name = "kivi"
    exact = False
    scaled = True
    arguments = {"bits": Bits(), "recent": Whole(1), "group": Whole(2, most=64)}
    bits: int = 2
    recent: int = 128
    group: int = 32

    def dtype(self, model: jnp.dtype) -> jnp.dtype:
        return PAIRED

    def width(self, head_dim: int) -> int:
        if head_dim % (8 // self.bits):
            raise PolicyError(
                f"{self!r} stores {8 // self.bits} channels in a byte, but this model's heads have "
                f"{head_dim} channels. Use int8."
            )
        return head_dim * self.bits // 8

    def channels(self, head_dim: int) -> int:
        """Channels of a value that share a step."""
        return math.gcd(self.group, head_dim)

    def scales(self, size: int, head_dim: int) -> Any:
        if size % self.group:
            raise PolicyError(
                f"{self!r}: group={self.group} does not divide pages of {size} slots. Use pages or groups of "
                "another size."
            )
        groups, parts = size // self.group, head_dim // self.channels(head_dim)
        return Grouped(
            k=jax.ShapeDtypeStruct((groups, 2, head_dim), jnp.float16),
            v=jax.ShapeDtypeStruct((size, 2, parts), jnp.float16),
        )

    def slot_bytes(self, head_dim: int, model: jnp.dtype) -> float:
        own = 4 * head_dim / self.group + 4 * head_dim / self.channels(head_dim)
        return super().slot_bytes(head_dim, model) + own

    @property
    def foresees(self) -> int:
        return self.group - 1

    def write(
        self, pages: Pages, page: Array, slot: Array, k: Array, v: Array, coming: Coming | None = None
    ) -> Pages:
        """Widens the ranges of the keys' groups, codes these groups again, and writes the new codes."""
        k, v = k.astype(jnp.float32), v.astype(jnp.float32)
        pages = (self._key_of_each if page.shape[-1] == 1 else self._keys)(pages, page, slot, k, coming)
        parts = v.reshape(*v.shape[:-1], -1, self.channels(v.shape[-1]))
        steps = self._grid(parts.min(axis=-1), parts.max(axis=-1))
        codes = self._encoded(parts, steps, -1).reshape(v.shape)
        return dataclasses.replace(
            pages,
            v=pages.v.at[page, slot].set(packed(codes, self.bits), **DROP),
            scales=pages.scales._replace(v=pages.scales.v.at[page, slot].set(steps, **DROP)),
        )

    def read(self, pages: Pages, page: Array, slot: Array) -> tuple[Array, Array]:
        """Lowest values and steps times codes, in float32."""
        k, v = (unpacked(x[page, slot], self.bits) for x in (pages.k, pages.v))
        steps = pages.scales.v[page, slot]
        parts = decoded(v.reshape(*v.shape[:-1], steps.shape[-1], -1), steps, -1)
        return decoded(k, pages.scales.k[page, slot // self.group]), parts.reshape(v.shape)

    def _key_of_each(
        self, pages: Pages, page: Array, slot: Array, k: Float[Array, "B K 1 H"], coming: Coming | None
    ) -> Pages:
        """One key per KV head: touches its group alone."""
        group, near = slot // self.group, jnp.minimum(page, pages.count - 1)
        low = high = k
        if coming is not None:
            same = ((coming.page == page) & (coming.slot // self.group == group))[..., None]
            low = jnp.minimum(k, jnp.where(same, coming.k, jnp.inf).min(axis=-2, keepdims=True))
            high = jnp.maximum(k, jnp.where(same, coming.k, -jnp.inf).max(axis=-2, keepdims=True))
        old = pages.scales.k[near, group]  # [B, K, 1, 2, H]
        new = self._widened(old, low, high)
        at = group[..., None] * self.group + jnp.arange(self.group)
        held = decoded(unpacked(pages.k[near[..., None], at], self.bits), old, -2)
        keys = jnp.where((at == slot[..., None])[..., None], k[..., None, :], held)
        codes = packed(self._encoded(keys, new, -2), self.bits)
        return dataclasses.replace(
            pages,
            k=pages.k.at[page[..., None], at].set(codes, **DROP),
            scales=pages.scales._replace(k=pages.scales.k.at[page, group].set(new, **DROP)),
        )

    def _keys(
        self, pages: Pages, page: Array, slot: Array, k: Float[Array, "B K T H"], coming: Coming | None
    ) -> Pages:
        """Several keys per KV head, of one group or of many."""
        old, group = pages.scales.k, slot // self.group
        low = jnp.full(old[:, :, 0].shape, jnp.inf).at[page, group].min(k, **DROP)
        high = jnp.full(low.shape, -jnp.inf).at[page, group].max(k, **DROP)
        if coming is not None:  # only where a key opens or continues the group now
            place, touched = (coming.page, coming.slot // self.group), jnp.isfinite(low).any(axis=-1)
            now = jnp.where(touched.at[place].get(mode="fill", fill_value=False), coming.page, pages.count)
            low = low.at[now, place[1]].min(coming.k.astype(jnp.float32), **DROP)
            high = high.at[now, place[1]].max(coming.k.astype(jnp.float32), **DROP)
        new = self._widened(old, low, high)
        pages = dataclasses.replace(pages, scales=pages.scales._replace(k=new))
        pages = self._again(pages, old, ((old[:, :, 1:] > 0) & (old != new)).any(axis=(1, 2, 3)))
        near = jnp.minimum(page, pages.count - 1)
        codes = packed(self._encoded(k, new[near, group]), self.bits)
        return dataclasses.replace(pages, k=pages.k.at[page, slot].set(codes, **DROP))

    def _again(self, pages: Pages, old: Float[Array, "P g 2 H"], changed: Array) -> Pages:
        """The keys of the changed pages in codes of their new ranges, page by page."""
        order = jnp.argsort(~changed, stable=True)

        def one(i: Array, k: Array) -> Array:
            page = order[i]
            by_group = unpacked(k[page], self.bits).reshape(old.shape[1], self.group, -1)
            held = decoded(by_group, old[page], -2)
            codes = self._encoded(held, pages.scales.k[page], -2)
            return k.at[page].set(packed(codes.reshape(pages.size, -1), self.bits))

        return dataclasses.replace(pages, k=jax.lax.fori_loop(0, changed.sum(), one, pages.k))

    def _widened(self, old: Array, low: Float[Array, "... H"], high: Float[Array, "... H"]) -> Array:
        """Grids [..., 2, H] that hold the old ones and ``low`` to ``high``; the old ones where they do."""
        lowest, step = (old[..., i, :].astype(jnp.float32) for i in (0, 1))
        highest, fresh = lowest + self._most * step, step == 0
        inside = (lowest <= low) & (high <= highest) & ~fresh | (low > high)
        new = self._grid(
            jnp.where(fresh, low, jnp.minimum(low, lowest)),
            jnp.where(fresh, high, jnp.maximum(high, highest)),
        )
        return jnp.where(inside[..., None, :], old, new)

    @property
    def _most(self) -> int:
        return 2**self.bits - 1

    def _grid(self, low: Float[Array, "... H"], high: Float[Array, "... H"]) -> Float[Array, "... 2 H"]:
        """Lowest value and step in float16, rounded so that the range holds ``low`` and ``high``.

        A step is above 0: 0 says that a group has not been opened.
        """
        lowest = _rounded(low, -jnp.inf)
        step = _rounded((high - lowest.astype(jnp.float32)) / self._most, jnp.inf)
        return jnp.stack([lowest, jnp.maximum(step, jnp.finfo(jnp.float16).smallest_subnormal)], axis=-2)

    def _encoded(
        self, x: Float[Array, ...], grid: Float[Array, ...], axis: int | None = None
    ) -> Int[Array, ...]:
        """The nearest codes of x; for ``axis`` see ``decoded``."""
        lowest, step = lowest_and_step(grid, axis)
        codes = jnp.round((x - lowest) / jnp.where(step > 0, step, 1.0))
        return jnp.clip(codes, 0, self._most).astype(jnp.uint8)


def _rounded(x: Float[Array, ...], towards: float) -> Float[Array, ...]:
    """x in float16, rounded towards minus or plus infinity."""
    limit = float(jnp.finfo(jnp.float16).max)
    x = jnp.clip(x, -limit, limit)
    near = x.astype(jnp.float16)
    over = near.astype(jnp.float32) > x if towards < 0 else near.astype(jnp.float32) < x
    return jnp.where(over, jnp.nextafter(near, jnp.float16(towards)), near)


PRESETS = {"kivi": "kivi(2)"}

EXAMPLES = (Policy(storage=Kivi(2, recent=16, group=4)), Policy(storage=Kivi(4, recent=2, group=4)))
