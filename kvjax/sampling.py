"""Sampling the next token: parameters per row, randomness owned by a request and a position.

The key of a draw is fold_in(fold_in(PRNGKey(seed), request), position): a request gives the same text in
every batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.types import pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, UInt


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How each row draws.

    Attributes:
      temperature: 0 is greedy.
      top_k: draw among the k best; 0 is all.
      top_p: draw among the smallest set of best tokens with at least this probability; 1 is all.
      key: one PRNG key a row.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    key: UInt[Array, "B 2"]


def sampling(
    rows: int,
    *,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    seed: int = 0,
    requests: Sequence[int] | None = None,
) -> Sampling:
    """Sampling parameters for ``rows`` rows; scalars hold for all of them.

    Args:
      rows: B.
      temperature, top_k, top_p: see ``Sampling``.
      seed: of the run.
      requests: a number per row that names its request; by default 0, 1, …

    Raises:
      ValueError: a parameter out of range.
    """
    spread = [np.broadcast_to(np.asarray(x), (rows,)) for x in (temperature, top_k, top_p)]
    rules = (
        ("temperature", spread[0], lambda x: x >= 0, "0 (greedy) or more"),
        ("top_k", spread[1], lambda x: x >= 0, "0 (all) or more"),
        ("top_p", spread[2], lambda x: (x > 0) & (x <= 1), "in (0, 1]"),
    )
    for name, value, legal, rule in rules:
        if not np.all(legal(value)):
            raise ValueError(f"sampling({name}={value.tolist()}) is out of range. Give numbers {rule}.")
    names = np.asarray(range(rows) if requests is None else requests, np.int32)
    return Sampling(  # device_put compiles nothing, asarray one program for each
        temperature=jax.device_put(spread[0].astype(np.float32)),
        top_k=jax.device_put(spread[1].astype(np.int32)),
        top_p=jax.device_put(spread[2].astype(np.float32)),
        key=_keys(np.int64(seed), names),
    )


@jax.jit
def _keys(seed: Int[Array, ""], names: Int[Array, " B"]) -> UInt[Array, "B 2"]:
    return jax.vmap(lambda name: jax.random.fold_in(jax.random.PRNGKey(seed), name))(names)


def sample(logits: Float[Array, "B V"], how: Sampling, position: Int[Array, " B"]) -> Int[Array, " B"]:
    """The next token of each row, at ``position``."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Int[Array, " B"]:
        keys = jax.vmap(jax.random.fold_in)(how.key, position)
        warm = logits / jnp.maximum(how.temperature, 1e-6)[:, None]
        drawn = jax.vmap(jax.random.categorical)(keys, _truncated(warm, how)).astype(jnp.int32)
        return jnp.where(how.temperature > 0, drawn, greedy)

    # A batch that is greedy throughout pays for no sort.
    return jax.lax.cond(jnp.any(how.temperature > 0), draw, lambda: greedy)


def _truncated(logits: Float[Array, "B V"], how: Sampling) -> Float[Array, "B V"]:
    """-inf outside the top-k and the nucleus; ties with the last token kept stay too."""
    vocab = logits.shape[-1]
    best = -jnp.sort(-logits, axis=-1)
    k = jnp.where(how.top_k > 0, jnp.minimum(how.top_k, vocab), vocab)
    p = jax.nn.softmax(best, axis=-1)
    before = jnp.cumsum(p, axis=-1) - p  # probability of everything better
    nucleus = jnp.sum(before < how.top_p[:, None], axis=-1)
    last = jnp.clip(jnp.minimum(k, nucleus), 1, vocab) - 1
    floor = jnp.take_along_axis(best, last[:, None], axis=-1)
    return jnp.where(logits >= floor, logits, -jnp.inf)
