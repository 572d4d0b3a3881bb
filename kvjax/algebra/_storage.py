"""Storage: how is a paged slot stored?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp

from kvjax.algebra._part import Part
from kvjax.cache.pages import Pages
from kvjax.cache.write import scattered

if TYPE_CHECKING:
    from jaxtyping import Array


class Storage(Part):
    """How a paged slot is stored; the newest ``recent`` tokens are stored in the model's own dtype.

    Class attributes:
      exact: a slot holds the key and value in the model's own dtype.
      scaled: pages carry scales, one per channel.
    """

    place = "storage"
    exact: ClassVar[bool] = True
    scaled: ClassVar[bool] = False
    recent: int = 0

    def dtype(self, model: jnp.dtype) -> jnp.dtype:
        """Element type of the pool, for a model that computes in ``model``."""
        return model

    def width(self, head_dim: int) -> int:
        """Elements of a stored key or value.

        Raises:
          PolicyError: this layout cannot store keys of ``head_dim`` channels.
        """
        return head_dim

    def write(self, pages: Pages, page: Array, slot: Array, k: Array, v: Array) -> Pages:
        """Writes k, v [..., H] into the slots; drops those whose page is out of range."""
        return dataclasses.replace(
            pages,
            k=scattered(pages.k, (page, slot), k),
            v=scattered(pages.v, (page, slot), v),
        )

    def read(self, pages: Pages, page: Array, slot: Array) -> tuple[Array, Array]:
        """The k, v [..., H] that a read sees in these slots."""
        return pages.k[page, slot], pages.v[page, slot]


@dataclasses.dataclass(frozen=True, repr=False)
class Native(Storage):
    """The model's own dtype."""

    name = "native"
    idle = True
