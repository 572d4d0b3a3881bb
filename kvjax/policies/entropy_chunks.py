"""Entropy-gated ChunkKV: of runs whose score comes from few tokens only those tokens stay.

kvpress's EntropyGatedChunkKVPress, built on ChunkKV, https://arxiv.org/abs/2502.00299
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import PolicyError, Runs, Whole, places, run_means

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

TINY = 1e-8
"""Added to sums and inside the logarithm."""


@dataclasses.dataclass(frozen=True, repr=False)
class EntropyChunks(Runs):
    """``chunks``, but an important run with few important tokens keeps ``spiky`` of them.

    The entropy of a run is that of its tokens' shares of the score, over its largest possible value. A run is
    spiky if its mean score is at least the median of the row's runs and its entropy below their median (the
    lower one of an even number). What is left of spiky runs comes after all other runs, by score.

    Attributes:
      size: tokens of a run.
      spiky: tokens of a spiky run that stay with it, fewer than ``size``.

    Raises:
      PolicyError: ``spiky`` is not below ``size``.
    """

    name = "entropy_chunks"
    arguments = {"size": Whole(2), "spiky": Whole(1)}
    size: int = 10
    spiky: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spiky >= self.size:
            raise PolicyError(
                f"{self.word}: spiky={self.spiky} is not below size={self.size}. Give a whole number from 1 "
                f"to {self.size - 1}."
            )

    def order(self, scores: Float[Array, "B M S"]) -> Int[Array, "B T"]:
        mean, entropy = run_means(scores), _entropies(scores)
        real = mean > -jnp.inf
        spiky = real & (mean >= _median(mean, real)) & (entropy < _median(entropy, real))
        later = spiky[..., None] & (places(scores) >= self.spiky)
        run = jnp.where(later, 0, places(mean)[..., None])
        rows = len(scores)
        return jnp.lexsort((-scores.reshape(rows, -1), run.reshape(rows, -1), later.reshape(rows, -1)))


def _entropies(scores: Float[Array, "B M S"]) -> Float[Array, "B M"]:
    """Of each run, in shares of the largest possible one; 0 for a single token."""
    may = scores > -jnp.inf
    lowest = jnp.minimum(jnp.where(may, scores, jnp.inf).min(axis=-1, keepdims=True), 0.0)
    weight = jnp.where(may, scores - lowest, 0.0)
    share = weight / (weight.sum(axis=-1, keepdims=True) + TINY)
    count = may.sum(axis=-1)
    entropy = -(share * jnp.log(share + TINY)).sum(axis=-1) / jnp.log(jnp.maximum(count, 2))
    return jnp.where(count > 1, jnp.clip(entropy, 0.0, 1.0), 0.0)


def _median(x: Float[Array, "B M"], real: Array) -> Float[Array, "B 1"]:
    """The lower median of the real ones."""
    at = jnp.maximum(real.sum(axis=-1, keepdims=True) - 1, 0) // 2
    return jnp.take_along_axis(jnp.sort(jnp.where(real, x, jnp.inf), axis=-1), at, axis=-1)


PRESETS = {"entropy-chunkkv": "snapkv + entropy_chunks + uniform(0.25)"}

EXAMPLES = ("snapkv(8) + entropy_chunks(6, spiky=2) + uniform(24)",)
