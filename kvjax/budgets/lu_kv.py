"""LU-KV: a calibrated table says what every layer and head keeps at each share of the cache.

Tang et al., Predicting Future KV Utility: Global Combinatorial Optimization for Task-Agnostic KV Cache
Eviction, https://arxiv.org/abs/2602.08585

Calibration (``train.utility``) finds for each share which heads lose least by it, for one eviction. The table
is read here as kvpress's ``LUKVPress`` reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.algebra import Frame, PolicyError
from kvjax.budgets import amount as amounts
from kvjax.types import Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

SHARES = 99
"""Columns of a table: of every head, what goes when 1, 2, ... 99 % of all slots go."""


@dataclasses.dataclass(frozen=True, repr=False)
class LUKV(amounts.Sized):
    """Each KV head keeps the share of a prompt that the table has for it in the column nearest to ``amount``.

    A layer's heads keep the nearest whole number of slots together: each its share rounded down, and one more
    where most was cut off, at least one. It acts once, after the prompt.

    The table belongs to the model and to the eviction that it was calibrated for, with its protected tokens.

    Attributes:
      amount: the mean over the KV heads of all layers; slots per head, share kept, or bytes of a row; 1.0
        keeps everything.

    Learned weights: ``removed`` [K, 99] per layer, shares from 0 to 1.
    """

    name = "lu_kv"
    arguments = {"amount": amounts.Size()}
    traced = ("amount",)
    learns = "lu_kv"
    trained_by = (
        "python -m train.utility --config FILE --eviction WORDS --export FILE, and python -m kvjax.weights "
        "convert from the authors' files"
    )
    amount: amounts.Amount = 0.25

    def leaves(self) -> dict[str, Any]:
        return {"limit": self.limit}

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        for index, layer in enumerate(weights):
            self.check_shapes(index, layer, {"removed": (network.num_kv_heads, SHARES)}, network)

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        """Tables that rise from 0 to 1, in every head at another speed."""
        share = jnp.arange(1, SHARES + 1) / (SHARES + 1)
        speed = jnp.exp2(jax.random.uniform(key, (network.num_layers, network.num_kv_heads, 1), minval=-1))
        return [{"removed": share**layer} for layer in speed]

    def smallest(self, frame: Frame, length: int) -> None:
        return None

    def layer_mean(self, frame: Frame, length: Int[Array, " B"]) -> Int[Array, " B"]:
        """Of all layers: what a layer keeps stands in the table."""
        return jnp.floor(self.limit.slots(frame, length) + 0.5).astype(jnp.int32)

    def targets(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B K"]:
        if frame.weights is None:
            raise PolicyError(f"{self!r} has no table. Pass weights=kvjax.weights_for(policy, model).")
        seen = length.astype(jnp.float32)
        kept = self.limit.slots(frame, length) / jnp.maximum(seen, 1)
        column = jnp.clip(jnp.round((1 - kept) * (SHARES + 1)).astype(jnp.int32) - 1, 0, SHARES - 1)
        removed = frame.heads.gather(frame.weights["removed"].astype(jnp.float32)[:, column].T)
        ideal = jnp.clip(1 - removed, 0, 1) * seen[:, None]
        down = jnp.floor(ideal)
        left = jnp.round(ideal.sum(axis=1)) - down.sum(axis=1)
        slots = (down + (amounts.rank(ideal - down) < left[:, None])).astype(jnp.int32)
        slots = jnp.where(kept[:, None] < 1, jnp.clip(slots, 1, length[:, None]), length[:, None])
        return frame.heads.local(slots)


PRESETS = {"lu-kv": "expected_attention(floor=0.02) + lu_kv(0.2) + sinks(4) + recent(1)"}

EXAMPLES = ("expected_attention(16, sinks=2) + lu_kv(0.4) + sinks(2) + recent(1)",)
