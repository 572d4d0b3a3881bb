"""Overall: the KV heads of all layers share one number of slots, and the highest scores of them all stay.

Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, section 3.3,
https://arxiv.org/abs/2505.23416
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Frame, Number
from kvjax.budgets import amount as amounts

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Overall(amounts.Shared):
    """One threshold for all layers and heads, such that ``amount`` slots a KV head stay on average.

    Scores must mean the same everywhere, as those of ``kvzip``, ``kvzap_scores`` and ``fast_kvzip`` do.
    Shares of attention (``snapkv``, ``tova``, ``h2o``) are compared as in AdaKV. With other scores a layer of
    large ones takes what it can.

    Ties at the threshold go to the lowest layer, then the lowest head and position. Layers that see a window
    alone keep it and take no part. It acts once, after the prompt, which is held whole until then.

    Attributes:
      amount: the mean over the KV heads of all layers; slots per head, share kept, or bytes of a row.
      floor: share of the mean that every head keeps whatever its scores; KVzip has none.
    """

    name = "overall"
    arguments = {"amount": amounts.Size(), "floor": Number(0, 1)}
    traced = ("amount", "floor")
    from_scores = True
    over_layers = True
    amount: amounts.Amount = 0.25
    floor: float = 0.0

    def targets_of_layers(
        self, frame: Frame, length: Int[Array, " B"], scores: Sequence[Float[Array, "B K T"]]
    ) -> list[Int[Array, "B K"]]:
        """Of each layer, how many of its heads' scores are among the best of all."""
        heads, mean = scores[0].shape[1], self.layer_mean(frame, length)
        total = mean * len(scores) * heads
        sure = [
            jnp.minimum(self.guaranteed(frame, length)[:, None], (x > -jnp.inf).sum(axis=-1)) for x in scores
        ]

        def reach(level: Array) -> list[Int[Array, "B K"]]:
            """Tokens of each head at a level or above, and no fewer than it is sure of."""
            counts = [(amounts.in_order(x) >= level[:, None, None]).sum(axis=-1) for x in scores]
            return [jnp.maximum(one, least) for one, least in zip(counts, sure)]

        def turn(i: Array, low: Array) -> Array:
            raised = low | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
            enough = sum(one.sum(axis=1) for one in reach(raised)) >= total
            return jnp.where(enough, raised, low)

        # The highest level that enough tokens reach. One bit after the other, as a sort of all layers takes
        # several times their scores. Level 0 is that of what may not stay.
        level = jax.lax.fori_loop(0, 32, turn, jnp.zeros(total.shape, jnp.uint32))
        above = jnp.concatenate(reach(jnp.maximum(level, 1) + 1), axis=1)
        ties = jnp.concatenate(reach(jnp.maximum(level, 1)), axis=1) - above
        spare = total - above.sum(axis=1)
        given = jnp.clip(spare[:, None] - (jnp.cumsum(ties, axis=1) - ties), 0, ties)
        return jnp.split(above + given, len(scores), axis=1)


EXAMPLES = (
    "snapkv(8) + overall(24) + sinks(2)",
    "kvzip(16, sinks=2, instruction=(5, 7)) + overall(20, floor=0.2)",
)
