"""What a part may see of the tokens that arrive at a layer: the quantities it declares, nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.numpy as jnp

from kvjax.algebra._errors import PolicyError
from kvjax.sharding.all_heads import HERE, AllHeads
from kvjax.types import Project, Rotate, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


V = TypeVar("V")

OBSERVABLE = ("k", "v", "k_pre", "q", "q_pre", "q_last", "hidden", "mass")
"""What a part may name in ``needs``; only an eviction may name ``mass``."""


@pytree(static=("layers", "softcap", "rotate", "heads"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """What a part may see of T tokens arriving at one layer; only declared quantities are present.

    ``k``, ``v``, ``k_pre``, ``q``, ``q_pre``, ``hidden`` are those of ``Heads``; ``q_last`` is the query
    (after RoPE) of each row's last real token; ``mass`` is the attention that each token of a prompt
    received, weighted by ``Eviction.query_weights``.

    Attributes:
      pos: true positions, EMPTY for padding.
      total: length of each row's prompt, known from the start.
      layer: index of this layer (may be traced).
      layers: number of layers.
      values: the declared quantities by name; read them through the properties.
      softcap, rotate, project: the bound on the model's scores, its RoPE at this layer, and its map from
        hidden states to queries; see ``Heads``.
      sinks: of each query head, a logit in the sum of its softmax; see ``Heads``.
      seeds: of each row's request, for random draws; None for tokens that come after a prompt.
      admitted: which tokens of a prompt may stay (for a budget, and for an eviction that ranks a prompt);
        None while that is not decided.
      heads: all KV heads of the layer, also those on other devices.
    """

    pos: Int[Array, "B T"]
    total: Int[Array, " B"]
    layer: int | Int[Array, ""]
    layers: int
    values: dict[str, Array]
    softcap: float | None = None
    rotate: Rotate | None = None
    project: Project | None = None
    sinks: Float[Array, " N"] | None = None
    seeds: Int[Array, " B"] | None = None
    admitted: Bool[Array, "B K T"] | None = None
    heads: AllHeads = HERE

    def rotation_ahead(self, count: int, head_dim: int) -> Float[Array, "B H H"] | None:
        """Mean of the model's rotations over the ``count`` positions that follow each row's prompt.

        Row i is the image of basis vector i. None where the model has no RoPE.
        """
        rotate = self.rotate
        if rotate is None:
            return None
        basis = jnp.broadcast_to(
            jnp.eye(head_dim), (1, count, head_dim, head_dim)
        )  # each basis vector as a "head"

        def images(total: Int[Array, ""]) -> Float[Array, "H H"]:
            return rotate(basis, (total + jnp.arange(count))[None]).mean(axis=(0, 1))

        # One row at a time, so that only count * H * H numbers are in memory.
        return jax.lax.map(images, self.total)

    def with_sinks(self, lse: Float[Array, "... N T"]) -> Float[Array, "... N T"]:
        """The log of a softmax's sum, with the sinks in it."""
        return lse if self.sinks is None else jnp.logaddexp(lse, self.sinks.astype(lse.dtype)[:, None])

    def once(self, name: str, make: Callable[[], V]) -> V:
        """The result of ``make()``, cached under ``name``: parts that need the same value share it."""
        results: dict[str, Any] = vars(self).setdefault("_results", {})
        if name not in results:
            results[name] = make()
        return cast(V, results[name])

    def draws(self, seed: int | Int[Array, ""]) -> Float[Array, "B K T"]:
        """Uniform draws in [0, 1) that depend only on seed, layer, head and position, never on the batch."""
        key = jax.random.fold_in(jax.random.PRNGKey(seed), self.layer)
        heads = self.heads.count(self.k.shape[1])

        def draw(pos: Array) -> Array:
            return jax.random.uniform(jax.random.fold_in(key, pos), (heads,))

        drawn = jnp.moveaxis(jax.vmap(jax.vmap(draw))(self.pos), 2, 1)
        return cast("Array", self.heads.local(drawn))

    def _declared(self, name: str) -> Array:
        if name not in self.values:
            raise PolicyError(f"a part reads {name!r} of the arriving tokens. Declare it in `needs`.")
        return self.values[name]

    @property
    def k(self) -> Float[Array, "B K T H"]:
        return self._declared("k")

    @property
    def v(self) -> Float[Array, "B K T H"]:
        return self._declared("v")

    @property
    def k_pre(self) -> Float[Array, "B K T H"]:
        return self._declared("k_pre")

    @property
    def q(self) -> Float[Array, "B N T H"]:
        return self._declared("q")

    @property
    def q_pre(self) -> Float[Array, "B N T H"]:
        return self._declared("q_pre")

    @property
    def q_last(self) -> Float[Array, "B N H"]:
        return self._declared("q_last")

    @property
    def hidden(self) -> Float[Array, "B T D"]:
        return self._declared("hidden")

    @property
    def mass(self) -> Float[Array, "B N T"]:
        return self._declared("mass")
