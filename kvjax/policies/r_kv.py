"""R-KV: keeps tokens that the last queries attend to and that no other key resembles.

Cai et al., R-KV: Redundancy-aware KV Cache Compression for Reasoning Models, https://arxiv.org/abs/2505.24133;
details as in the authors' code (github.com/Zefan-Cai/R-KV).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Every, Eviction, Number, Observation, Policy, PolicyError, Whole
from kvjax.budgets.uniform import Uniform
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

EXACT = jax.lax.Precision.HIGHEST

BLOCK = 64
"""Keys that are compared with all others at a time, so that T * T numbers are never in memory."""


@dataclasses.dataclass(frozen=True, repr=False)
class RKV(Eviction):
    """Score = share * importance - (1 - share) * redundancy; the last ``window`` tokens stay.

    Importance: the group's largest score of each of the last ``window`` queries, softmax over the tokens
    before them, mean over the queries, then the largest of ``kernel`` neighbours. Redundancy: cosine to the
    other keys, mean over them, softmax over all tokens. Of the keys that a key resembles (cosine above
    ``similar``) the newest is not counted, so of several alike the newest stays; a key that resembles none
    does not count the first token. Neighbours are the held tokens in order of position.

    Attributes:
      share: of the importance (the authors' mix_lambda; the paper's text has 0.1).
      window: number of queries.
      kernel: width of the pooling, odd.
      similar: cosine from which on two keys are alike.

    Raises:
      PolicyError: a kernel that is not odd.
    """

    name = "r_kv"
    arguments = {
        "share": Number(0, 1),
        "window": Whole(1, "number of queries", by_positions=True),
        "kernel": Whole(1, "odd width", 255, by_positions=True),
        "similar": Number(-1, 1),
    }
    traced = ("share", "similar")
    needs = frozenset({"q", "k"})
    scores_prompt = ranks_held = True
    share: float = 0.07
    window: int = 8
    kernel: int = 7
    similar: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise PolicyError(f"{self!r}: kernel={self.kernel!r} is even. Give an odd whole number.")

    @property
    def protects(self) -> int:
        return self.window

    @property
    def queries(self) -> int:
        return self.window

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        real = observed.pos >= 0
        old = real & (observed.pos < (observed.total - self.window)[:, None])
        importance, redundancy = self._importance(observed, old), self._redundancy(observed.k, real)
        return self.share * importance - (1 - self.share) * redundancy

    def _importance(self, observed: Observation, old: Bool[Array, "B T"]) -> Float[Array, "B K T"]:
        rows, heads, t, h = observed.k.shape
        q, at = observed.queries("q", self.window)
        q = q.astype(jnp.float32).reshape(rows, heads, -1, *q.shape[2:])
        s = jnp.einsum("bkgih,bkth->bkgit", q, observed.k.astype(jnp.float32), precision=EXACT) * h**-0.5
        s = s if observed.softcap is None else observed.softcap * jnp.tanh(s / observed.softcap)
        s = jnp.where(old[:, None, None], s.max(axis=2), -jnp.inf)
        voters = (at >= 0)[:, None, :, None]
        attention = jnp.where(voters & old[:, None, None], jax.nn.softmax(s, axis=-1), 0.0)
        attention = attention.sum(axis=2) / jnp.maximum(voters.sum(axis=2), 1)
        side = self.kernel // 2
        wide = jnp.pad(attention, ((0, 0), (0, 0), (side, side)))
        return jnp.stack([wide[..., i : i + t] for i in range(self.kernel)]).max(axis=0)

    def _redundancy(self, k: Float[Array, "B K T H"], real: Bool[Array, "B T"]) -> Float[Array, "B K T"]:
        k = jnp.where(real[:, None, :, None], k.astype(jnp.float32), 0.0)
        unit = k / (jnp.linalg.norm(k, axis=-1, keepdims=True) + 1e-8)
        t = unit.shape[2]
        place, blocks = jnp.arange(t), -(-t // BLOCK)
        padded = jnp.pad(unit, ((0, 0), (0, 0), (0, blocks * BLOCK - t), (0, 0)))

        def add(total: Float[Array, "B K T"], block: Array) -> tuple[Array, None]:
            some = jax.lax.dynamic_slice_in_dim(padded, block * BLOCK, BLOCK, axis=2)
            itself = place == (block * BLOCK + jnp.arange(BLOCK))[:, None]
            cosine = jnp.einsum("bkih,bkth->bkit", some, unit, precision=EXACT)
            cosine = jnp.where(itself, 0.0, cosine)
            newest = jnp.where(cosine > self.similar, place, 0).max(axis=-1, keepdims=True)
            return total + jnp.where(place == newest, 0.0, cosine).sum(axis=2), None

        total = jax.lax.scan(add, jnp.zeros(unit.shape[:3]), jnp.arange(blocks))[0]
        mean = total / jnp.maximum(real.sum(axis=-1), 1)[:, None, None]
        return jax.nn.softmax(jnp.where(real[:, None], mean, -jnp.inf), axis=-1)


PRESETS = {"r-kv": "r_kv + uniform(1024, when=every(128))"}

EXAMPLES = (Policy(eviction=RKV(window=4, kernel=3), budget=Uniform(24, Every(8))),)
