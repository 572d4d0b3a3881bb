"""Quest: reads only the chunks of tokens whose keys could score high for the query.

Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference,
https://arxiv.org/abs/2406.10774
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Anchored, Picked, Policy, PolicyError, Whole
from kvjax.cache.pages import Pages
from kvjax.types import EMPTY

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Quest(Anchored):
    """Each decode read visits the ``chunks`` chunks of 16 tokens with the highest bound on q·k.

    The bound of a chunk is sum_h max(q_h min_h, q_h max_h) over its keys' channelwise range; a KV head takes
    the largest over its group's query heads. Prefill and the first ``dense`` layers read everything. Without
    anchors (``sinks`` and ``tail`` 0, as in the paper) a read chooses among all tokens that left the ring,
    generated ones included; with anchors, as in Top-K, only in the prompt's middle.

    Attributes:
      chunks: how many a read visits, per KV head.
      chunk: tokens of a chunk; divides the page.
      dense: number of first layers that are read whole.
      recent: newest tokens, always read (they stay in the ring); with anchors these are ``tail``.
      sinks, tail: first and last tokens of the prompt, always read, as generated tokens are.
    """

    name = "quest"
    arguments = {
        "chunks": Whole(1, "number of chunks"),
        "chunk": Whole(1),
        "dense": Whole(0, "number of layers"),
        "recent": Whole(1),
        "sinks": Whole(),
        "tail": Whole(),
    }
    sizes = ("chunks",)
    by_worth = True
    chunks: int = 32
    chunk: int = 16
    dense: int = 2
    recent: int = 64  # type: ignore[assignment]
    sinks: int = 0
    tail: int = 0

    @property
    def splits(self) -> bool:  # type: ignore[override]
        return self.sinks + self.tail > 0

    def selectable(self, pos: Int[Array, "B T"], total: Int[Array, " B"]) -> Bool[Array, "B T"]:
        return super().selectable(pos, total) if self.splits else jnp.ones(pos.shape, bool)

    def summary_shapes(self, size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Range of the keys of each chunk: [S / chunk, 2 H], the lowest and then the highest."""
        if size % self.chunk:
            raise PolicyError(f"{self!r}: chunk={self.chunk} does not divide pages of {size} slots.")
        return {"range": (size // self.chunk, 2 * head_dim)}

    def summarise(
        self, k: Float[Array, "Q S H"], live: Bool[Array, "Q S"]
    ) -> dict[str, Float[Array, "Q ..."]]:
        """Lowest and highest live key of each chunk, per channel; zeros where a chunk is empty."""
        parts = (k.shape[0], -1, self.chunk)
        live = live.reshape(parts)[..., None]
        k = k.astype(jnp.float32).reshape(*parts, k.shape[-1])
        ends = [jnp.min(jnp.where(live, k, jnp.inf), axis=2), jnp.max(jnp.where(live, k, -jnp.inf), axis=2)]
        ranges = jnp.concatenate(ends, axis=2)
        return {"range": jnp.where(jnp.isfinite(ranges), ranges, 0.0)}

    @property
    def unit(self) -> int:
        return self.chunk

    def most_units(self, longest: int) -> int:
        return self.chunks

    def best(self, worth: Float[Array, "B K C"], total: Int[Array, " B"], longest: int) -> Picked:
        """The best chunks; all of them while there are no more than ``chunks``."""
        best, at = jax.lax.top_k(worth, min(self.chunks, worth.shape[-1]))
        return Picked(entries=jnp.where(best > -jnp.inf, at, EMPTY), unit=self.chunk)

    def worth(self, q: Float[Array, "B N H"], pages: Pages, list_id: int) -> Float[Array, "B K C"]:
        """Upper bound of q·k over each chunk of each KV head; -inf for empty chunks."""
        rows, heads = pages.table.shape[:2]
        # The ranges are copied into one array per KV head: one product per page would be many times slower.
        ends = pages.summary["range"][jnp.maximum(pages.table[:, :, list_id], 0)]
        ends = ends.reshape(rows, heads, -1, ends.shape[-1])
        q = q.astype(jnp.float32).reshape(rows, heads, -1, q.shape[-1])
        # max(q lo, q hi) = q- lo + q+ hi, so the range acts as a key of 2 H channels.
        halves = jnp.concatenate([jnp.minimum(q, 0), jnp.maximum(q, 0)], axis=-1)
        bound = jnp.einsum("bkch,bkgh->bkcg", ends, halves, precision=jax.lax.Precision.HIGHEST).max(axis=-1)
        first = jnp.arange(bound.shape[-1]) * self.chunk
        return jnp.where(first < pages.length[:, :, list_id, None], bound, -jnp.inf)


PRESETS = {"quest": "quest"}

EXAMPLES = (
    Policy(selection=Quest(chunks=3, chunk=4, dense=1, recent=8)),
    Policy(selection=Quest(chunks=2, chunk=4, dense=1, recent=6, sinks=2, tail=6)),
)
