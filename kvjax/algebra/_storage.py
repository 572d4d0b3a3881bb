"""Storage: how is a paged slot stored?"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from kvjax.algebra._part import Part
from kvjax.cache.pages import Coming, Pages
from kvjax.cache.write import one_a_page, scattered, there

if TYPE_CHECKING:
    from jaxtyping import Array


class Storage(Part):
    """How a paged slot is stored; the newest ``recent`` tokens are stored in the model's own dtype.

    Class attributes:
      exact: a slot holds the key and value in the model's own dtype.
      scaled: pages carry scales (``scales``).
      hosted: full pages of what a selection chooses among lie in host memory.
    """

    place = "storage"
    exact: ClassVar[bool] = True
    scaled: ClassVar[bool] = False
    hosted: ClassVar[bool] = False
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

    def scales(self, size: int, head_dim: int) -> Any:
        """Shapes and dtypes of the scales of a page of ``size`` slots, a pytree; None where it has none.

        Raises:
          PolicyError: pages of so many slots do not fit.
        """
        return None

    def read_dtype(self, model: jnp.dtype) -> Any:
        """Of the keys that ``read`` gives, and of what a selection keeps of them for each page."""
        return model if self.exact else jnp.float32

    def layout(self, size: int, head_dim: int, model: jnp.dtype) -> dict[str, Any]:
        """What ``cache.pool.empty`` has to know of it, by name."""
        return {
            "width": self.width(head_dim),
            "dtype": self.dtype(model),
            "scales": self.scales(size, head_dim),
            "turned": self.turned,
            "summary_dtype": self.read_dtype(model),
        }

    def page_bytes(self, size: int, head_dim: int) -> int:
        """Bytes of these scales."""
        leaves = jax.tree.leaves(self.scales(size, head_dim))
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    @property
    def turned(self) -> bool:
        """Are keys and values stored turned, so that a read turns its queries, too (``Pages.turned``)?"""
        return False

    @property
    def foresees(self) -> int:
        """How many of the tokens that leave the window next ``write`` is shown (``coming``)."""
        return 0

    @property
    def index(self) -> Any:
        """How keys are coded by which a selection ranks ``hosted`` tokens; None: as they are stored."""
        return None

    def cached(self, context: int) -> int:
        """Tokens of a KV head that the device holds of the ``hosted`` ones, in rows of ``context`` tokens."""
        return 0

    def slot_bytes(self, head_dim: int, model: jnp.dtype) -> float:
        """Bytes that a byte budget counts for a slot: its key and value, and scales where they are many."""
        return 2 * self.width(head_dim) * self.dtype(model).itemsize

    def write(
        self, pages: Pages, page: Array, slot: Array, k: Array, v: Array, coming: Coming | None = None
    ) -> Pages:
        """Writes k, v [..., H] into the slots; drops those whose page is out of range."""
        if page.shape[-1] == 1:  # a token of each KV head, which share no page
            k, v = one_a_page(pages.k, page, slot, k), one_a_page(pages.v, page, slot, v)
        else:
            k, v = scattered(pages.k, (page, slot), k), scattered(pages.v, (page, slot), v)
        return dataclasses.replace(pages, k=k, v=v)

    def read(self, pages: Pages, page: Array, slot: Array) -> tuple[Array, Array]:
        """The k, v [..., H] that a read sees in these slots."""
        return there(pages.k, page, slot), there(pages.v, page, slot)


@dataclasses.dataclass(frozen=True, repr=False)
class Native(Storage):
    """The model's own dtype."""

    name = "native"
    idle = True
