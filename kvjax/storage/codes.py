"""Pages of symmetric codes with one scale per channel and page.

A page's scale only grows, and growing requantises the page. So a read multiplies once per channel and never
per slot: the scale folds into q and into the output.

Why: kvjax/DESIGN.md, 11.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp

from kvjax.algebra import Storage, Whole
from kvjax.cache.pages import Pages
from pallas_kernels.ragged_decode.api import floats

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Num


@dataclasses.dataclass(frozen=True, repr=False)
class Coded(Storage):
    """What INT8 and INT4 pages have in common.

    Class attributes:
      most: the largest code; the smallest is its negative.
    """

    exact = False
    scaled = True
    arguments = {"recent": Whole(1)}
    most: ClassVar[int]
    recent: int = 128

    def encoded(self, codes: Int[Array, "... H"]) -> Num[Array, "... X"]:
        """Codes as the pool stores them."""
        raise NotImplementedError

    def write(self, pages: Pages, page: Array, slot: Array, k: Array, v: Array) -> Pages:
        """Grows the scales of the pages written to, requantises these pages and writes the new codes."""
        assert pages.scales is not None
        kv = jnp.stack([k, v], axis=-2).astype(jnp.float32)  # [..., 2, H]
        grown = pages.scales.at[page].max(jnp.abs(kv) / self.most, mode="drop")
        shrink = jnp.where(grown > 0, pages.scales / jnp.where(grown > 0, grown, 1.0), 1.0)
        pages = dataclasses.replace(pages, scales=grown)
        if page.shape[-1] == 1:  # one token per KV head: requantise its page only
            pages = self._requantise(pages, page.reshape(-1), shrink)
        else:
            old = (self._rounded(floats(c) * shrink[:, None, i]) for i, c in enumerate((pages.k, pages.v)))
            pages = dataclasses.replace(pages, k=next(old), v=next(old))
        near = jnp.minimum(page, pages.count - 1)
        codes = self._rounded(kv / jnp.where(grown[near] > 0, grown[near], 1.0))
        return dataclasses.replace(
            pages,
            k=pages.k.at[page, slot].set(codes[..., 0, :], mode="drop"),
            v=pages.v.at[page, slot].set(codes[..., 1, :], mode="drop"),
        )

    def read(self, pages: Pages, page: Array, slot: Array) -> tuple[Array, Array]:
        """Codes times scales, in float32."""
        assert pages.scales is not None
        scale = pages.scales[page]
        return floats(pages.k[page, slot]) * scale[..., 0, :], floats(pages.v[page, slot]) * scale[..., 1, :]

    def _rounded(self, x: Float[Array, "... H"]) -> Num[Array, "... X"]:
        return self.encoded(jnp.clip(jnp.round(x), -self.most, self.most).astype(jnp.int8))

    def _requantise(self, pages: Pages, page: Array, shrink: Array) -> Pages:
        """Rescales the codes of these pages; ignores pages out of range."""
        near = jnp.minimum(page, pages.count - 1)
        factor = shrink[near]  # [Q, 2, H]
        k, v = (self._rounded(floats(c[near]) * factor[:, None, i]) for i, c in enumerate((pages.k, pages.v)))
        return dataclasses.replace(
            pages, k=pages.k.at[page].set(k, mode="drop"), v=pages.v.at[page].set(v, mode="drop")
        )
