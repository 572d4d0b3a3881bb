"""What a part may see of the tokens that arrive at a layer: the quantities it declared, nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from kvjax.algebra._errors import PolicyError
from kvjax.sharding.all_heads import HERE, AllHeads
from kvjax.types import Project, Rotate, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


V = TypeVar("V")

OBSERVABLE = ("k", "v", "k_pre", "q", "q_pre", "q_last", "hidden", "mass")
"""What a part may name in ``needs``; ``mass`` is an eviction's alone."""


@pytree(static=("layers", "softcap", "rotate", "heads"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """What a part may see of T tokens arriving at one layer; only declared quantities are there.

    Attributes:
      pos: true positions, EMPTY for padding.
      total: length of each row's prompt, known from the start.
      layer: index of this layer (may be traced).
      layers: how many there are.
      values: the declared quantities by name; read them through the properties.
      softcap, rotate, project: what bounds the model's scores, its RoPE at this layer, and its map from
        hidden states to queries; see ``Heads``.
      seeds: of each row's request, for draws that belong to it; None while tokens come after a prompt.
      admitted: which tokens of a prompt may stay, once that is decided (for a budget, and for an eviction
        that ranks a prompt); None before.
      heads: what a part may ask of heads that are elsewhere.
    """

    pos: Int[Array, "B T"]
    total: Int[Array, " B"]
    layer: int | Int[Array, ""]
    layers: int
    values: dict[str, Array]
    softcap: float | None = None
    rotate: Rotate | None = None
    project: Project | None = None
    seeds: Int[Array, " B"] | None = None
    admitted: Bool[Array, "B K T"] | None = None
    heads: AllHeads = HERE

    def rotation_ahead(self, count: int, head_dim: int) -> Float[Array, "B H H"] | None:
        """Mean of the model's rotations over the ``count`` positions that follow each row's prompt.

        Row i is the image of basis vector i. None where positions turn nothing.
        """
        rotate = self.rotate
        if rotate is None:
            return None
        basis = jnp.broadcast_to(jnp.eye(head_dim), (1, count, head_dim, head_dim))  # a "head" each

        def images(total: Int[Array, ""]) -> Float[Array, "H H"]:
            return rotate(basis, (total + jnp.arange(count))[None]).mean(axis=(0, 1))

        # A row at a time: count * H * H numbers are enough to hold.
        return jax.lax.map(images, self.total)

    def once(self, name: str, make: Callable[[], V]) -> V:
        """``make()``, and from then on what it gave: for parts of two places that ask the same question."""
        made: dict[str, Any] = vars(self).setdefault("_made", {})
        if name not in made:
            made[name] = make()
        found: V = made[name]
        return found

    def _declared(self, name: str) -> Array:
        if name not in self.values:
            raise PolicyError(
                f"a part reads {name!r} of the arriving tokens without declaring it in `needs`."
            )
        return self.values[name]

    @property
    def k(self) -> Float[Array, "B K T H"]:
        """Keys after RoPE."""
        return self._declared("k")

    @property
    def v(self) -> Float[Array, "B K T H"]:
        """Values."""
        return self._declared("v")

    @property
    def k_pre(self) -> Float[Array, "B K T H"]:
        """Keys before RoPE."""
        return self._declared("k_pre")

    @property
    def q(self) -> Float[Array, "B N T H"]:
        """Queries after RoPE."""
        return self._declared("q")

    @property
    def q_pre(self) -> Float[Array, "B N T H"]:
        """Queries before RoPE."""
        return self._declared("q_pre")

    @property
    def q_last(self) -> Float[Array, "B N H"]:
        """The query after RoPE of each row's last real token."""
        return self._declared("q_last")

    @property
    def hidden(self) -> Float[Array, "B T D"]:
        """The input of the attention block."""
        return self._declared("hidden")

    @property
    def mass(self) -> Float[Array, "B N T"]:
        """Attention each token of a prompt received, weighed by the eviction (``Eviction.query_weights``)."""
        return self._declared("mass")
