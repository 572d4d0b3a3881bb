"""What a part may see of the tokens that arrive at a layer: the quantities it declares, nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.numpy as jnp

from kvjax.algebra._errors import PolicyError
from kvjax.sharding.all_heads import HERE, AllHeads
from kvjax.types import EMPTY, Project, Rotate, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


V = TypeVar("V")

OBSERVABLE = ("k", "v", "k_pre", "q", "q_pre", "q_last", "hidden", "wo_norm", "replayed", "mass")
"""What a part may name in ``needs``; ``wo_norm`` comes with ``v``."""

OF_EVICTIONS = ("replayed", "mass")
"""What only an eviction may name."""


@pytree(static=("layers", "softcap", "rotate", "heads"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """What a part may see of T tokens arriving at one layer; only declared quantities are present.

    ``k``, ``v``, ``k_pre``, ``q``, ``q_pre``, ``hidden`` are those of ``Heads``; ``q_last`` is the query
    (after RoPE) of each row's last real token; ``wo_norm`` is a method; ``mass`` is the attention that each
    token of a prompt received, weighted by ``Eviction.query_weights``, and ``replayed`` the highest score
    that ``Eviction.replayed`` gave it.

    Attributes:
      pos: true positions, EMPTY for padding.
      total: length of each row's prompt, known from the start; for tokens that are ranked later, of the row.
      layer: index of this layer (may be traced).
      layers: number of layers.
      values: the declared quantities by name; read them through the properties.
      softcap, rotate, project: the bound on the model's scores, its RoPE at this layer, and its map from
        hidden states to queries; see ``Heads``.
      wo: the layer's output projection, where ``wo_norm`` is declared.
      sinks: of each query head, a logit in the sum of its softmax; see ``Heads``.
      seeds: of each row's request, for random draws; None for tokens that come after a prompt.
      admitted: which tokens of a prompt may stay (for a budget, and for an eviction that ranks a prompt);
        None while that is not decided.
      heads: all KV heads of the layer, also those on other devices.
      asked: positions of the queries, oldest first, where only the newest are there (EMPTY: none); None where
        every token's query is.
    """

    pos: Int[Array, "B T"]
    total: Int[Array, " B"]
    layer: int | Int[Array, ""]
    layers: int
    values: dict[str, Array]
    softcap: float | None = None
    rotate: Rotate | None = None
    project: Project | None = None
    wo: Float[Array, "D N H"] | None = None
    sinks: Float[Array, "*B N"] | None = None
    seeds: Int[Array, " B"] | None = None
    admitted: Bool[Array, "B K T"] | None = None
    heads: AllHeads = HERE
    asked: Int[Array, "B Q"] | None = None

    def queries(
        self, name: str, count: int | None = None
    ) -> tuple[Float[Array, "B N I H"], Int[Array, "B I"]]:
        """Each row's newest ``count`` queries, or all, oldest first; and their positions.

        A shorter row has fewer: other positions are EMPTY, with any query.

        Args:
          name: "q" or "q_pre".
          count: not more than the eviction keeps (``Eviction.queries``).
        """
        q = self._declared(name)
        if self.asked is not None:
            newest = slice(None if count is None else max(q.shape[2] - count, 0), None)
            return q[:, :, newest], self.asked[:, newest]
        if count is None:
            return q, self.pos
        count = min(count, q.shape[2])  # no row has more
        at = self.total[:, None] - count + jnp.arange(count)[None, :]
        taken = jnp.take_along_axis(q, jnp.maximum(at, 0)[:, None, :, None], axis=2)
        return taken, jnp.where(at >= 0, at, EMPTY)

    def rotation_ahead(self, count: int, head_dim: int) -> Float[Array, "B H H"] | None:
        """Mean of the model's rotations over the ``count`` positions that follow each row's tokens.

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

    def wo_norm(self, order: int = 1) -> Float[Array, "B N T"]:
        """The norm of what each value adds to the output of each query head, ||W_o v||; float32.

        Args:
          order: 1 or 2, of the norm.
        """
        return output_norm(self.wo, self.v, order)

    def with_sinks(self, lse: Float[Array, "... N T"]) -> Float[Array, "... N T"]:
        """The log of a softmax's sum, with the sinks in it."""
        return lse if self.sinks is None else jnp.logaddexp(lse, self.sinks.astype(lse.dtype)[..., None])

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
    def replayed(self) -> Float[Array, "B K T"]:
        return self._declared("replayed")

    @property
    def mass(self) -> Float[Array, "B N T"]:
        return self._declared("mass")


def output_norm(
    wo: Float[Array, "D N H"] | None, v: Float[Array, "B K T H"], order: int
) -> Float[Array, "B N T"]:
    """The norm of what each value adds to the output of each query head; float32."""
    if wo is None:
        raise PolicyError(
            "a part reads 'wo_norm', and no output projection is there. Declare it in `needs`, on a model "
            "whose layers hand `attend` their `wo` (Heads.wo)."
        )
    group = wo.shape[1] // v.shape[1]

    def of_head(n: Int[Array, ""]) -> Float[Array, "B T"]:
        # One line of rows: XLA of jax 0.7 on a CPU cannot run a bfloat16 product of rows and tokens.
        rows = v[:, n // group].reshape(-1, v.shape[-1])
        out = jnp.einsum("rh,dh->rd", rows, wo[:, n], preferred_element_type=jnp.float32)
        return jnp.linalg.norm(out, ord=order, axis=-1).reshape(v.shape[0], -1)

    # A head at a time, so that only B * T * D numbers are in memory.
    return jnp.moveaxis(jax.lax.map(of_head, jnp.arange(wo.shape[1])), 0, 1)
