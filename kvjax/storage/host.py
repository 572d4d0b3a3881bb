"""Host: pages that are full lie in host memory, and a decode step brings what the selection chose.

What stays on the device is the ring, what is always read, pages that are being filled, what the selection
ranks by, and a cache of what was brought.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvjax.algebra import Argument, Native, Number, Part, Storage
from kvjax.cache.pages import Coming, Pages
from kvjax.storage.codes import Coded
from kvjax.storage.int4 import Int4
from kvjax.storage.int8 import Int8

if TYPE_CHECKING:
    from jaxtyping import Array


INDEX: dict[str, Coded | None] = {"native": None, "int8": Int8(), "int4": Int4()}
"""What keys can be coded as, to rank them."""


class Coding(Argument):
    """How the keys are coded that a selection ranks."""

    what = "coding of keys"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str) and value in INDEX

    @property
    def expected(self) -> str:
        return ", ".join(INDEX)


class HeldStorage(Argument):
    """The storage that ``host`` holds."""

    what = "storage"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, Storage) and not isinstance(value, Host)

    @property
    def expected(self) -> str:
        return "a storage, as in Host(of=Int8())"


@dataclasses.dataclass(frozen=True, repr=False)
class Host(Storage):
    """The tokens that a selection chooses among lie in host memory, stored as the storage before it says.

    A page leaves the device when it is full. Each read brings the units that the selection chose and that
    the device's cache does not hold, and then is the read of those units: the same sum, in the same order.
    What was brought stays in the cache until it is the least recently used. In the one-string form ``host``
    follows the storage, or stands alone for the model's own dtype: ``quest(chunks=32) + int8(32) + host``.

    Attributes:
      cache: size of the device's cache, as a share of the context.
      keys: what ``topk`` ranks by, of the pages in host memory: native, int8 or int4. In codes it chooses by
        rounded keys; what it chose is read as it is stored.
      of: how a slot is stored.
    """

    name = "host"
    arguments = {"cache": Number(high=1.0, open="low"), "keys": Coding(), "of": HeldStorage()}
    wraps = True
    hosted = True
    cache: float = 0.01
    keys: str = "native"
    of: Storage = dataclasses.field(default=Native(), kw_only=True)

    @property
    def chain(self) -> tuple[Part, ...]:
        holds = isinstance(self.of, Storage) and not self.of.idle
        return (*self.of.chain, self) if holds else (self,)

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.of.exact

    @property
    def scaled(self) -> bool:  # type: ignore[override]
        return self.of.scaled

    @property
    def recent(self) -> int:  # type: ignore[override]
        return self.of.recent

    @property
    def turned(self) -> bool:
        return self.of.turned

    @property
    def foresees(self) -> int:
        return self.of.foresees

    def dtype(self, model: jnp.dtype) -> jnp.dtype:
        return self.of.dtype(model)

    def width(self, head_dim: int) -> int:
        return self.of.width(head_dim)

    def scales(self, size: int, head_dim: int) -> Any:
        return self.of.scales(size, head_dim)

    def slot_bytes(self, head_dim: int, model: jnp.dtype) -> float:
        return self.of.slot_bytes(head_dim, model)

    def write(
        self, pages: Pages, page: Array, slot: Array, k: Array, v: Array, coming: Coming | None = None
    ) -> Pages:
        return self.of.write(pages, page, slot, k, v, coming)

    def read(self, pages: Pages, page: Array, slot: Array) -> tuple[Array, Array]:
        return self.of.read(pages, page, slot)

    @property
    def index(self) -> Any:
        return INDEX[self.keys]

    def cached(self, context: int) -> int:
        return int(context * self.cache)

    def _fields(self) -> list[dataclasses.Field[Any]]:
        return [field for field in super()._fields() if field.name != "of"]


PRESETS: dict[str, str] = {}

EXAMPLES = (
    "quest(3, chunk=4, dense=1, recent=8) + host(cache=0.5)",
    "quest(2, chunk=4, dense=1, recent=6, sinks=2, tail=6) + int8(6) + host(cache=0.5)",
)
