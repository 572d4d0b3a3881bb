"""Pages of symmetric codes with one scale per channel and page.

A page's scale only grows, and growing requantises the page. So a read multiplies once per channel and never
per slot: the scale folds into q and into the output.

Why: kvjax/DESIGN.md, 11 and 26.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from kvjax.algebra import PolicyError, Storage, Switch, Whole
from kvjax.cache.pages import Coming, Pages
from kvjax.cache.write import DROP, there
from pallas_kernels.ragged_decode.api import floats, turned

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Num


@dataclasses.dataclass(frozen=True, repr=False)
class Coded(Storage):
    """What INT8, INT4 and FP8 pages have in common.

    Class attributes:
      most: the largest code; the smallest is its negative.
    """

    exact = False
    scaled = True
    arguments = {"recent": Whole(1), "hadamard": Switch()}
    most: ClassVar[int]
    recent: int = 128
    hadamard: bool = False

    @property
    def turned(self) -> bool:
        return self.hadamard

    def width(self, head_dim: int) -> int:
        if self.hadamard and head_dim % 2:
            raise PolicyError(
                f"{self!r} turns pairs of channels, but this model's heads have {head_dim} channels. Leave "
                "hadamard out, or use a model with an even head dim."
            )
        return head_dim

    def scales(self, size: int, head_dim: int) -> Any:
        return jax.ShapeDtypeStruct((2, head_dim), jnp.float32)

    def scale(self, size: Float[Array, ...]) -> Float[Array, ...]:
        """The scale with which ``size`` is still a code."""
        return size / self.most

    def rounded(self, x: Float[Array, "... H"]) -> Num[Array, "... X"]:
        """The codes nearest to x, as the pool stores them."""
        return self.encoded(jnp.clip(jnp.round(x), -self.most, self.most).astype(jnp.int8))

    def of_page(self, k: Float[Array, "S H"]) -> tuple[Num[Array, "S X"], Float[Array, "2 H"]]:
        """Codes of the keys of a page, quantised at once, and their scales as a pool has them."""
        k = k.astype(jnp.float32)
        scale = self.scale(jnp.abs(k).max(axis=0))
        return self.rounded(k / jnp.where(scale > 0, scale, 1.0)), jnp.stack([scale, scale])

    def encoded(self, codes: Int[Array, "... H"]) -> Num[Array, "... X"]:
        """Whole numbers as the pool stores them."""
        raise NotImplementedError

    def write(
        self, pages: Pages, page: Array, slot: Array, k: Array, v: Array, coming: Coming | None = None
    ) -> Pages:
        """Grows the scales of the pages written to, requantises these pages and writes the new codes."""
        kv = jnp.stack([k, v], axis=-2).astype(jnp.float32)  # [..., 2, H]
        kv = turned(kv) if self.hadamard else kv
        grown = pages.scales.at[page].max(self.scale(jnp.abs(kv)), **DROP)
        shrink = jnp.where(grown > 0, pages.scales / jnp.where(grown > 0, grown, 1.0), 1.0)
        pages = dataclasses.replace(pages, scales=grown)
        if page.shape[-1] == 1:  # one token per KV head: requantise its page only
            pages = self._requantise(pages, page.reshape(-1), shrink)
        else:
            old = (self.rounded(floats(c) * shrink[:, None, i]) for i, c in enumerate((pages.k, pages.v)))
            pages = dataclasses.replace(pages, k=next(old), v=next(old))
        near = jnp.minimum(page, pages.count - 1)
        scale = there(grown, near)
        codes = self.rounded(kv / jnp.where(scale > 0, scale, 1.0))
        return dataclasses.replace(
            pages,
            k=pages.k.at[page, slot].set(codes[..., 0, :], **DROP),
            v=pages.v.at[page, slot].set(codes[..., 1, :], **DROP),
        )

    def read(self, pages: Pages, page: Array, slot: Array) -> tuple[Array, Array]:
        """Codes times scales, turned back, in float32."""
        scale, held = there(pages.scales, page), (pages.k, pages.v)
        k, v = (floats(there(x, page, slot)) * scale[..., i, :] for i, x in enumerate(held))
        return (turned(k), turned(v)) if self.hadamard else (k, v)

    def _requantise(self, pages: Pages, page: Array, shrink: Array) -> Pages:
        """Rescales the codes of these pages; ignores pages out of range."""
        near = jnp.minimum(page, pages.count - 1)
        factor = there(shrink, near)  # [Q, 2, H]

        def rescaled(codes: Array, i: int) -> Array:
            fresh = self.rounded(floats(there(codes, near)) * factor[:, None, i])
            return codes.at[page].set(fresh, **DROP)

        return dataclasses.replace(pages, k=rescaled(pages.k, 0), v=rescaled(pages.v, 1))
