"""LagKV: keeps the tokens that differ most from the tokens that follow them.

Liang et al., LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important,
https://arxiv.org/abs/2504.04704
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Eviction, Observation, Policy, Switch, Whole
from kvjax.budgets.ada import Ada
from kvjax.budgets.uniform import Uniform
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, repr=False)
class LagKV(Eviction):
    """Partitions of ``lag`` tokens, each compared with the next; a target takes the same share of each.

    After the first ``sinks`` tokens the prompt is cut into partitions. Keys and values of partition p are
    scaled, channel by channel, by the range of partition p + 1 (a channel without range counts as 0). The
    score of a token is the deviation over channels (H - 1), turned by softmax over the partition into a
    share, and averaged over keys and values. The rank within the partition decides; equal ranks keep the
    lowest positions, so partitions differ by one token at most, the earlier ones having more. With ``cross``
    the share decides, so that partitions, and heads that compete for slots, may keep different numbers.

    The last full partition and the tokens after it have no successor. Like the sinks they go only when every
    ranked token is gone: first the oldest, the sinks last. A prompt with fewer than two partitions has no
    ranked tokens. The paper adds sinks and tail to its share of the partitions; here they count towards the
    target like all other tokens. Where the budget acts while decoding, the held tokens are cut so each time.

    Attributes:
      lag: tokens of a partition.
      sinks: first tokens, outside the partitions.
      cross: rank by shares across partitions.
    """

    name = "lagkv"
    arguments = {"lag": Whole(2, by_positions=True), "sinks": Whole(), "cross": Switch()}
    needs = frozenset({"k", "v"})
    scores_prompt = ranks_held = True
    lag: int = 128
    sinks: int = 4
    cross: bool = False

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        """Ranks (or shares) in partitions; above them the tail by position, and the sinks above all."""
        rows, heads, t, _ = observed.k.shape
        real = observed.pos >= 0
        place = jnp.where(real, jnp.arange(t), -1)[:, None, :]  # among the tokens that are there
        full = jnp.maximum(real.sum(axis=-1) - self.sinks, 0) // self.lag
        tail = self.sinks + jnp.maximum(full - 1, 0) * self.lag  # its first place
        protected = jnp.where(place < self.sinks, 2 * t - place, place) + self.lag
        ranks = jnp.zeros((rows, heads, t), jnp.float32)
        parts = max(t - self.sinks, 0) // self.lag
        if parts > 1:
            ranked = slice(self.sinks, self.sinks + (parts - 1) * self.lag)
            ranks = ranks.at[:, :, ranked].set(self._ranks(observed, parts).reshape(rows, heads, -1))
        judged = (place >= self.sinks) & (place < tail[:, None, None])
        return jnp.where(judged, ranks, protected.astype(jnp.float32))

    def _ranks(self, observed: Observation, parts: int) -> Float[Array, "B K M S"]:
        """Ranks in all partitions but the last: 0 for the least remarkable token, of equals the later one.

        With ``cross`` the shares themselves.
        """
        share = (self._shares(observed.k, parts) + self._shares(observed.v, parts)) / 2
        if self.cross:
            return share
        worse = jnp.argsort(jnp.argsort(-share, axis=-1, stable=True), axis=-1)
        return (self.lag - 1 - worse).astype(jnp.float32)

    def _shares(self, x: Float[Array, "B K T H"], parts: int) -> Float[Array, "B K M S"]:
        rows, heads, _, h = x.shape
        x = x[:, :, self.sinks : self.sinks + parts * self.lag].astype(jnp.float32)
        x = x.reshape(rows, heads, parts, self.lag, h)
        low, high = x[:, :, 1:].min(axis=3, keepdims=True), x[:, :, 1:].max(axis=3, keepdims=True)
        span = high - low
        scaled = jnp.where(span > 0, (x[:, :, :-1] - low) / jnp.where(span > 0, span, 1.0), 0.0)
        return jax.nn.softmax(jnp.std(scaled, axis=-1, ddof=1), axis=-1)


PRESETS = {"lagkv": "lagkv + uniform(0.25)"}

EXAMPLES = (
    Policy(eviction=LagKV(lag=8, sinks=2), budget=Uniform(24)),
    Policy(eviction=LagKV(lag=8, sinks=2, cross=True), budget=Ada(20)),
)
