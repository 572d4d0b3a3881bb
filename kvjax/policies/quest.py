"""Quest: read only the chunks of tokens whose keys could score high for this query.

Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference,
https://arxiv.org/abs/2406.10774
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Picked, Policy, PolicyError, Selection, Whole
from kvjax.cache.pages import Pages
from kvjax.types import EMPTY, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


@dataclasses.dataclass(frozen=True, repr=False)
class Quest(Selection):
    """Each decode read visits the ``chunks`` chunks of 16 tokens with the highest bound on q·k.

    The bound of a chunk is sum_h max(q_h min_h, q_h max_h) over its keys' channelwise range; a KV head
    takes the largest over its group's query heads. Prefill and the first ``dense`` layers read everything.

    Attributes:
      chunks: how many a read visits, per KV head.
      chunk: tokens of a chunk; divides the page.
      dense: first layers that are read whole.
      recent: newest tokens, always read (they stay in the ring).

    Raises:
      PolicyError: a number below 1 (``dense``: below 0).
    """

    name = "quest"
    renamed = {"pages": "chunks"}
    arguments = {
        "chunks": Whole(1, "number of chunks"),
        "chunk": Whole(1),
        "dense": Whole(0, "number of layers"),
        "recent": Whole(1),
    }
    sizes = ("chunks",)
    chunks: int = 32
    chunk: int = 16
    dense: int = 2
    recent: int = 64  # type: ignore[assignment]

    def applies(self, layer: int) -> bool:
        """All layers but the first ``dense``."""
        return layer >= self.dense

    def summary_shapes(self, size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Range of the keys of each chunk: [S / chunk, 2, H], lowest and highest."""
        if size % self.chunk:
            raise PolicyError(f"{self!r}: chunk={self.chunk} does not divide pages of {size} slots.")
        return {"range": (size // self.chunk, 2, head_dim)}

    def summarise(
        self, k: Float[Array, "Q S H"], live: Bool[Array, "Q S"]
    ) -> dict[str, Float[Array, "Q ..."]]:
        """Lowest and highest live key of each chunk, per channel; zeros where a chunk is empty."""
        parts = (k.shape[0], -1, self.chunk)
        live = live.reshape(parts)[..., None]
        k = k.astype(jnp.float32).reshape(*parts, k.shape[-1])
        ends = [
            jnp.min(jnp.where(live, k, jnp.inf), axis=2),
            jnp.max(jnp.where(live, k, -jnp.inf), axis=2),
        ]
        found = jnp.stack(ends, axis=2)
        return {"range": jnp.where(jnp.isfinite(found), found, 0.0)}

    def select(self, params: Params | None, q: Float[Array, "B N H"], pages: Pages, list_id: int) -> Picked:
        """The best chunks, as pages and a bitmask; all of them while there are no more than ``chunks``."""
        del params
        rows, heads, _, entries = pages.table.shape
        per = pages.size // self.chunk
        bound = self._bounds(q, pages, list_id)  # [B, K, M * per]
        chosen = min(self.chunks, entries * per)
        best, at = jax.lax.top_k(bound, chosen)
        hit = jnp.zeros(bound.shape, bool)
        b, k = jnp.arange(rows)[:, None, None], jnp.arange(heads)[None, :, None]
        hit = hit.at[b, k, at].set(best > -jnp.inf).reshape(rows, heads, entries, per)
        # A page with a chosen chunk holds one of the best ``chosen`` bounds, so it is among the best pages.
        top = jnp.max(jnp.where(hit, bound.reshape(hit.shape), -jnp.inf), axis=-1)
        value, page = jax.lax.top_k(top, min(chosen, entries))
        slots = jnp.take_along_axis(hit, page[..., None], axis=2)
        return Picked(
            entries=jnp.where(value > -jnp.inf, page, EMPTY), slots=jnp.repeat(slots, self.chunk, axis=-1)
        )

    def _bounds(self, q: Float[Array, "B N H"], pages: Pages, list_id: int) -> Float[Array, "B K C"]:
        """Upper bound of q·k over each chunk of each stream; -inf for empty chunks."""
        rows, heads, _, entries = pages.table.shape
        ends = pages.summary["range"][jnp.maximum(pages.table[:, :, list_id], 0)]
        per = ends.shape[3]
        ends = ends.reshape(rows, heads, entries * per, 2, -1)
        q = q.astype(jnp.float32).reshape(rows, heads, -1, q.shape[-1])
        # max(q lo, q hi) = q+ hi + q- lo, so the bound is two products.
        bound = jnp.einsum("bkgh,bkch->bkgc", jnp.maximum(q, 0), ends[:, :, :, 1])
        bound += jnp.einsum("bkgh,bkch->bkgc", jnp.minimum(q, 0), ends[:, :, :, 0])
        first = jnp.arange(entries * per) * self.chunk
        live = first < pages.length[:, :, list_id, None]
        return jnp.where(live, bound.max(axis=2), -jnp.inf)


PRESETS = {"quest": "quest"}

EXAMPLES = (Policy(selection=Quest(chunks=3, chunk=4, dense=1, recent=8)),)
