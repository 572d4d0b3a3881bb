"""INT8 pages: symmetric codes with one scale per channel and page.

A page's scale only grows; growing requantises the page, so that a read needs one multiplication per
channel and none per slot (the scale folds into q and into the output). Measured on Gaussian data: 0.6 %
error quantised at once, 0.75 % grown token by token.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.cache.pages import Pages
from kvjax.policy import Policy, PolicyError, Storage

if TYPE_CHECKING:
    from jaxtyping import Array


@dataclasses.dataclass(frozen=True, repr=False)
class Int8(Storage):
    """GLOBAL in INT8; the newest ``recent`` tokens stay exact in the ring.

    Attributes:
      recent: tokens held in the model's own dtype.

    Raises:
      PolicyError: recent < 1.
    """

    name = "int8"
    exact = False
    scaled = True
    recent: int = 128  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if not isinstance(self.recent, int) or self.recent < 1:
            raise PolicyError(f"{self!r}: recent={self.recent!r} is no number of tokens. Give 1 or more.")

    def dtype(self, model: jnp.dtype) -> jnp.dtype:
        """Codes."""
        del model
        return jnp.dtype(jnp.int8)

    def write(self, pages: Pages, page: Array, slot: Array, k: Array, v: Array) -> Pages:
        """Grow the scales of the touched pages, requantise these pages, put the new codes in."""
        assert pages.scales is not None  # noqa: S101  (pools of a scaled storage carry scales)
        kv = jnp.stack([k, v], axis=-2).astype(jnp.float32)  # [..., 2, H]
        grown = pages.scales.at[page].max(jnp.abs(kv) / 127.0, mode="drop")
        shrink = jnp.where(grown > 0, pages.scales / jnp.where(grown > 0, grown, 1.0), 1.0)
        pages = dataclasses.replace(pages, scales=grown)
        if page.shape[-1] == 1:  # one token a stream: touch its page only
            pages = _requantise(pages, page.reshape(-1), shrink)
        else:
            old = (_round(c * shrink[:, None, i]) for i, c in enumerate((pages.k, pages.v)))
            pages = dataclasses.replace(pages, k=next(old), v=next(old))
        near = jnp.minimum(page, pages.count - 1)
        codes = _round(kv / jnp.where(grown[near] > 0, grown[near], 1.0))
        return dataclasses.replace(
            pages,
            k=pages.k.at[page, slot].set(codes[..., 0, :], mode="drop"),
            v=pages.v.at[page, slot].set(codes[..., 1, :], mode="drop"),
        )

    def read(self, pages: Pages, page: Array, slot: Array) -> tuple[Array, Array]:
        """Codes times scales, float32."""
        assert pages.scales is not None  # noqa: S101
        scale = pages.scales[page]
        return pages.k[page, slot] * scale[..., 0, :], pages.v[page, slot] * scale[..., 1, :]


def _round(x: Array) -> Array:
    return jnp.clip(jnp.round(x), -127, 127).astype(jnp.int8)


def _requantise(pages: Pages, page: Array, shrink: Array) -> Pages:
    """Bring the codes of these pages (out of range: none) to their new scales."""
    near = jnp.minimum(page, pages.count - 1)
    factor = shrink[near]  # [Q, 2, H]
    k, v = (_round(c[near] * factor[:, None, i]) for i, c in enumerate((pages.k, pages.v)))
    return dataclasses.replace(
        pages, k=pages.k.at[page].set(k, mode="drop"), v=pages.v.at[page].set(v, mode="drop")
    )


EXAMPLES = (Policy(storage=Int8(recent=16)),)
