"""H2O: keeps the newest tokens and those that received the most attention.

Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models,
https://arxiv.org/abs/2306.14048
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Eviction, Observation, Policy, Switch, Whole
from kvjax.budgets.uniform import Uniform
from kvjax.cache.pages import Slots
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class H2O(Eviction):
    """Mass of a token: the attention it received from all prompt queries, summed, mean over a group's heads.

    The sum is the paper's and favours old tokens, which more queries see; ``average`` divides it by the
    number of those queries. The paper keeps as many newest tokens as heavy hitters, which are chosen among
    the older ones. Without ``recent`` that holds at any target; an odd slot goes to the newest tokens. Scores
    are then ranks and the same in all heads; to divide a layer's slots by mass (``ada``), give ``recent``.
    Where the budget acts while decoding, every read adds to the sum, and ``recent`` must be a number.

    Attributes:
      recent: newest tokens that are protected, or None for half of the tokens that stay.
      average: divide a token's mass by the number of queries that see it; for prompts only.
    """

    name = "h2o"
    arguments = {"recent": Whole(optional=True), "average": Switch()}
    needs = frozenset({"k", "mass"})
    keeps = ("mass",)
    recent: int | None = None
    average: bool = False

    @property
    def protects(self) -> int:
        return self.recent or 0

    @property
    def scores_prompt(self) -> bool:  # type: ignore[override]
        """Half of what stays, and an average, are only known after a prompt."""
        return self.recent is None or self.average

    @property
    def on_arrival(self) -> str:  # type: ignore[override]
        return f"h2o(recent={self.recent or 8})"

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        return {"mass": jnp.zeros(observed.k.shape[:3], jnp.float32)}

    def query_weights(self, age: Int[Array, "B T"]) -> Float[Array, "B T"]:
        return jnp.ones(age.shape, jnp.float32)

    def accumulate(self, slots: Slots, mass: Float[Array, "B N C"], count: Array) -> dict[str, Array]:
        total = slots.meta["mass"]
        return {"mass": total + mass.reshape(*total.shape[:2], -1, total.shape[2]).mean(axis=2)}

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        return slots.meta["mass"]

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        """Mass of every prompt token; without ``recent``, minus the target from which on the token stays."""
        rows, heads, t, _ = observed.k.shape
        mass = observed.mass.reshape(rows, heads, -1, t).mean(axis=2)
        if self.average:
            mass /= jnp.maximum(observed.total[:, None] - observed.pos, 1)[:, None, :]
        if self.recent is not None:
            return mass
        real = observed.pos >= 0
        order = jnp.argsort(jnp.where(real[:, None, :], -mass, jnp.inf), axis=-1, stable=True)
        age = jnp.where(real, observed.total[:, None] - 1 - observed.pos, 0)
        age = jnp.take_along_axis(jnp.broadcast_to(age[:, None, :], order.shape), order, axis=-1)
        return -jnp.take_along_axis(_turns(age), jnp.argsort(order, axis=-1), axis=-1).astype(jnp.float32)


def _turns(age: Int[Array, "B K T"]) -> Int[Array, "B K T"]:
    """The smallest target at which a token stays (1, 2, 3 ...), for tokens in order of falling mass.

    A target b takes the newest r = ceil(b / 2) and the b - r heaviest of age >= r, so a token of age a stays
    as one of the newest from b = 2a + 1 on. With f(r) heavier tokens of age >= r it stays as a heavy one once
    f(r) < b - r. f falls in r, so the r before that is the largest with f(r) >= r: an h-index.
    """
    h, beyond = _h_index(age)  # f(h) >= h, and beyond = f(h + 1) <= h
    return jnp.minimum(2 * age + 1, 2 * h + 1 + (beyond >= h))


def _h_index(x: Int[Array, "... T"]) -> tuple[Int[Array, "... T"], Int[Array, "... T"]]:
    """For the items before each item: the largest h with h items >= h, and how many items are > h.

    The bits of h are found from the highest on, for all items at once: x is sorted bit by bit (zeros before
    ones, order kept), and [lo, hi) is the range of the items that agree with h so far.
    """
    t = x.shape[-1]
    bits = t.bit_length()

    def decide(i: Int[Array, ""], carry: tuple[Array, ...]) -> tuple[Array, ...]:
        x, lo, hi, h, beyond = carry
        one = (x >> (bits - 1 - i)) & 1
        ones = jnp.pad(jnp.cumsum(one, axis=-1), [(0, 0)] * (x.ndim - 1) + [(1, 0)])
        below, upto = (jnp.take_along_axis(ones, end, axis=-1) for end in (lo, hi))
        count, zeros = beyond + upto - below, t - ones[..., -1:]
        up = count >= h + (1 << (bits - 1 - i))
        lo, hi = jnp.where(up, zeros + below, lo - below), jnp.where(up, zeros + upto, hi - upto)
        h, beyond = h + (up << (bits - 1 - i)), jnp.where(up, beyond, count)
        return jnp.take_along_axis(x, jnp.argsort(one, axis=-1, stable=True), axis=-1), lo, hi, h, beyond

    none = jnp.zeros_like(x)
    upto = jnp.broadcast_to(jnp.arange(t, dtype=x.dtype), x.shape)
    return jax.lax.fori_loop(0, bits, decide, (x, none, upto, none, none))[3:]


PRESETS = {"h2o": "h2o + uniform(0.25)"}

EXAMPLES = (
    Policy(eviction=H2O(), budget=Uniform(24)),
    Policy(eviction=H2O(recent=8), budget=Uniform(21, "every_step"), sinks=2),
)
