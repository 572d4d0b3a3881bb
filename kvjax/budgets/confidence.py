"""Confidence: few slots where the model is confident of its next token, many where it is not.

Li, Miao: CONF-KV: Confidence-Aware KV Cache Eviction with Mixed-Precision Storage for Long-Horizon LLM,
https://arxiv.org/abs/2605.24786
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.algebra import Budget, Frame, Number, PolicyError, Whole

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Confidence(Budget):
    """Each step may keep ``tight`` slots per KV head if c >= ``threshold``, else ``loose``.

    With p = softmax(logits), p1 >= p2 the two largest, and H(p) the entropy of V tokens,

      c = wh (1 - H(p) / log V) + wm sigmoid(log p1 - log p2) + wp p1

    of the logits that produced the step's token. Tokens that the user gave (a prompt, its chunks) have no
    such logits: they use ``loose``, and the first step after them uses the logits at their end.

    Both targets fall linearly over layers, from 2 - 1 / slope times the mean at the first layer to 1 / slope
    times the mean at the last, rounded to the nearest slot (halves away from the mean), so that the mean is
    preserved.

    Attributes:
      tight, loose: slots per KV head, ring included.
      threshold: c*, in [0, 1].
      slope: the mean divided by the last layer's target; 1 is uniform, more is CONF-KV-L.
      wh, wm, wp: weights of entropy, margin and the best token's probability; they sum to 1. The paper names
        no values; these are ours.

    Raises:
      PolicyError: a value is out of range, tight > loose, or the weights do not sum to 1.
    """

    name = "confidence"
    arguments = {
        "tight": Whole(1, "number of slots"),
        "loose": Whole(1, "number of slots"),
        "threshold": Number(0, 1, "threshold"),
        "slope": Number(1, what="slope"),
        "wh": Number(0, 1, "weight"),
        "wm": Number(0, 1, "weight"),
        "wp": Number(0, 1, "weight"),
    }
    traced = tuple(arguments)
    needs_logits = True
    when = "every_step"
    sizes = ("tight", "loose")
    tight: int = 128
    loose: int = 512
    threshold: float = 0.7
    slope: float = 1.0
    wh: float = 0.4
    wm: float = 0.3
    wp: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tight > self.loose:
            raise PolicyError(
                f"{self!r}: tight={self.tight} exceeds loose={self.loose}. A confident step keeps less: swap "
                "them."
            )
        total = self.wh + self.wm + self.wp
        if abs(total - 1) > 1e-6:
            raise PolicyError(f"{self!r}: the weights wh + wm + wp sum to {total:g}. Make it 1.")

    @functools.cached_property
    def spread(self) -> float:
        """1 - 1 / slope: how far the first layer lies above the mean, relative to it."""
        return 1 - 1 / self.slope

    def leaves(self) -> dict[str, Any]:
        return super().leaves() | {"spread": self.spread}

    @property
    def least(self) -> int | None:
        return self.tight - int(self.spread * self.tight + 0.5)

    @property
    def most(self) -> int | None:
        return self.loose + int(self.spread * self.loose + 0.5)

    def confidence(self, logits: Float[Array, "B V"]) -> Float[Array, " B"]:
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        p = jnp.exp(log_p)
        entropy = -jnp.where(p > 0, p * log_p, 0.0).sum(axis=-1)
        best = jnp.argmax(log_p, axis=-1)
        first = log_p.max(axis=-1)
        second = jnp.where(jnp.arange(logits.shape[-1]) == best[:, None], -jnp.inf, log_p).max(axis=-1)
        flat = entropy / jnp.log(logits.shape[-1])
        return self.wh * (1 - flat) + self.wm * jax.nn.sigmoid(first - second) + self.wp * jnp.exp(first)

    def targets(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B 1"]:
        mean = jnp.full(length.shape, self.loose)
        if frame.confidence is not None:
            mean = jnp.where(frame.confidence >= self.threshold, self.tight, self.loose)
        steps = frame.layers - 1
        # Of two layers equally far from the ends, one lies as far above the mean as the other below it.
        above = mean * self.spread * (steps - 2 * frame.layer) / max(steps, 1)
        above = jnp.sign(above) * jnp.floor(jnp.abs(above) + 0.5)
        return (mean + above.astype(jnp.int32))[:, None]
