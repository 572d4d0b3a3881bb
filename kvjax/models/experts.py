"""Mixture of experts: a token's router chooses a few MLPs, and their weighted sum is what it gets.

The cost follows the experts that are used. On a GPU or TPU tokens are sorted by expert and ``ragged_dot``
multiplies each group by its expert's matrix. XLA on a CPU would multiply every token by every expert, so
there a loop takes some tokens of one expert at a time and reads that expert's matrices alone. So do steps
with quantised matrices everywhere, whose codes no grouped product takes.

Why: kvjax/DESIGN.md, 31 and 33.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kvjax.models.activations import gated
from kvjax.models.quantised import Quantised, times_one, widened
from kvjax.models.spec import Experts, ModelSpec
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.specs import CONTEXT, ROWS, TENSOR
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

FEWEST, MOST = 8, 64
"""Tokens of one expert that a turn of the loop on a CPU multiplies at least, where there are more, and at
most."""

BF16_AS_IT_LIES = jax.__version_info__ >= (0, 8)
"""XLA on a CPU has a kernel for some rows of bfloat16; see ``decoder.product``."""


class Choice(NamedTuple):
    """The experts of each token, C of them.

    Attributes:
      expert: their numbers.
      weight: what each counts, float32.
    """

    expert: Int[Array, "B T C"]
    weight: Float[Array, "B T C"]


class Groups(NamedTuple):
    """Pairs of a token and one of its experts, sorted by expert.

    Attributes:
      order: the i-th pair in that order; pair j belongs to token j // C.
      size: pairs of each expert. The pairs after them belong to no expert that is here.
    """

    order: Int[Array, " P"]
    size: Int[Array, " E"]


def route(experts: Experts, scores: Float[Array, "B T E"]) -> Choice:
    """The best experts of each token, by float32 scores."""
    best, expert = jax.lax.top_k(scores, experts.chosen)
    if experts.normed:
        return Choice(expert, jax.nn.softmax(best, axis=-1))
    return Choice(expert, jnp.exp(best - jax.nn.logsumexp(scores, axis=-1, keepdims=True)))


def through_experts(
    spec: ModelSpec, p: Params, x: Float[Array, "B T D"], choice: Choice, mesh: Mesh
) -> Float[Array, "B T D"]:
    """The weighted sum of what each token's experts give, in x's dtype.

    On a mesh each device has an equal share of the experts and adds up theirs; sums go between devices.
    """
    weights = {name: leaf for name, leaf in p.items() if name.startswith("experts_")}
    if mesh.grid is None:
        return _mixed(spec.mlp, weights, x, choice).astype(x.dtype)

    def on_one(weights: Params, x: Array, choice: Choice) -> Array:
        first = jax.lax.axis_index((TENSOR, CONTEXT)) * weights["experts_up"].shape[0]
        own = choice._replace(expert=choice.expert - first)
        return jax.lax.psum(_mixed(spec.mlp, weights, x, own), (TENSOR, CONTEXT)).astype(x.dtype)

    cut = jax.tree.map(lambda _: P((TENSOR, CONTEXT)), weights)
    return mesh.each(on_one, (weights, x, choice), (cut, ROWS, ROWS), ROWS)  # type: ignore[no-any-return]


def _mixed(kind: str, weights: Params, x: Float[Array, "B T D"], choice: Choice) -> Float[Array, "B T D"]:
    """The sum over experts whose numbers are from 0 to E - 1, float32."""
    count, rows = weights["experts_up"].shape[0], x.reshape(-1, x.shape[-1])
    expert = choice.expert.reshape(-1)
    expert = jnp.where((expert >= 0) & (expert < count), expert, count)
    groups = Groups(jnp.argsort(expert), jnp.bincount(expert, length=count + 1)[:count].astype(jnp.int32))
    inputs = weights, rows, choice.weight.reshape(-1), groups
    in_turns, in_groups = functools.partial(_in_turns, kind), functools.partial(_in_groups, kind)
    if isinstance(weights["experts_up"], Quantised) and x.shape[1] == 1:
        y = in_turns(*inputs)
    else:
        y = jax.lax.platform_dependent(*inputs, cpu=in_turns, default=in_groups)
    return y.reshape(x.shape)  # type: ignore[no-any-return]


# --- where the compiler groups --------------------------------------------------------------------

_OF_GROUP = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
"""Rows [P, X] times the matrices [E, Y, X] of their groups."""


def _in_groups(
    kind: str, weights: Params, rows: Float[Array, "R D"], weight: Float[Array, " P"], groups: Groups
) -> Float[Array, "R D"]:
    each, pairs = len(groups.order) // len(rows), len(groups.order)
    ends = jnp.cumsum(groups.size)
    expert = jnp.minimum((ends <= jnp.arange(pairs)[:, None]).sum(axis=-1), len(ends) - 1)

    def product(x: Array, name: str) -> Array:
        leaf = weights[name]
        leaf = widened(leaf) if isinstance(leaf, Quantised) else leaf
        y = jax.lax.ragged_dot_general(
            x, leaf, groups.size, _OF_GROUP, preferred_element_type=jnp.dtype("float32")
        )
        bias = weights.get(f"{name}_bias")
        return y if bias is None else y + bias[expert].astype(jnp.float32)

    x = rows[groups.order // each]
    inner = gated(kind, product(x, "experts_gate"), product(x, "experts_up")).astype(x.dtype)
    y = product(inner, "experts_down") * weight[groups.order][:, None]
    y = jnp.where((jnp.arange(pairs) < ends[-1])[:, None], y, 0.0)
    # Back in the order of the tokens, so that their sums do not depend on who adds first.
    return y[jnp.argsort(groups.order)].reshape(len(rows), each, -1).sum(axis=1)


# --- on a CPU, and with quantised matrices --------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_turns(
    kind: str, weights: Params, rows: Float[Array, "R D"], weight: Float[Array, " P"], groups: Groups
) -> Float[Array, "R D"]:
    """A loop with a turn for up to ``turn`` tokens of one expert.

    A turn runs in a branch: from a loop's body XLA moves what does not change with the turn out of the loop,
    and turns all experts into float32 there.
    """
    each, pairs, count = len(groups.order) // len(rows), len(groups.order), len(groups.size)
    turn = min(len(rows), MOST, max(FEWEST, pairs // count))
    most = min(count, pairs) + (pairs // turn if turn < len(rows) else 0)
    quantised = isinstance(weights["experts_up"], Quantised)
    if rows.dtype != jnp.float32 and BF16_AS_IT_LIES and not quantised:
        turn = max(turn, 2)  # for one row XLA writes the matrix out in float32
    starts, turns = jnp.cumsum(groups.size) - groups.size, -(-groups.size // turn)
    ends = jnp.cumsum(turns)

    def take(at: Int[Array, ""], y: Float[Array, "R D"]) -> Array:
        expert = jnp.minimum((ends <= at).sum(), count - 1)
        place = starts[expert] + turn * (at - ends[expert] + turns[expert]) + jnp.arange(turn)
        pair = groups.order[jnp.minimum(place, pairs - 1)]
        token = jnp.where(place < starts[expert] + groups.size[expert], pair // each, len(rows))

        def run(y: Array) -> Array:
            x = rows[jnp.minimum(token, len(rows) - 1)]
            out = _through_one(kind, weights, expert, x) * weight[pair][:, None]
            return y.at[token].add(out, mode="drop")

        return jax.lax.cond(at < ends[-1], run, lambda y: y, y)  # type: ignore[no-any-return]

    return jax.lax.fori_loop(0, most, take, jnp.zeros(rows.shape, jnp.float32))


def _through_one(
    kind: str, weights: Params, expert: Int[Array, ""], x: Float[Array, "M D"]
) -> Float[Array, "M D"]:
    """Rows through one expert; float32."""

    def product(x: Array, name: str) -> Array:
        stack = weights[name]
        if isinstance(stack, Quantised):
            y = times_one(x, stack, expert)
        else:
            leaf = _of_expert(stack, expert)
            y = jnp.einsum("mx,yx->my", x.astype(leaf.dtype), leaf, preferred_element_type=jnp.float32)
        bias = weights.get(f"{name}_bias")
        return y if bias is None else y + bias[expert].astype(jnp.float32)

    inner = gated(kind, product(x, "experts_gate"), product(x, "experts_up")).astype(x.dtype)
    return product(inner, "experts_down")


def _of_expert(leaf: Float[Array, "E ..."], expert: Int[Array, ""]) -> Float[Array, " ..."]:
    """One expert's matrix, cut out as integers: XLA would turn bfloat16 into float32 to cut it."""
    if leaf.dtype == jnp.float32:
        return leaf[expert]
    bits = jax.lax.bitcast_convert_type(leaf, jnp.uint16)[expert]
    if leaf.dtype == jnp.bfloat16 and not BF16_AS_IT_LIES:  # bfloat16 is float32 without its lower bits
        return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
    return jax.lax.bitcast_convert_type(bits, leaf.dtype)


def _forward(
    kind: str, weights: Params, rows: Array, weight: Array, groups: Groups
) -> tuple[Array, tuple[Params, Array, Array, Groups]]:
    return _in_turns(kind, weights, rows, weight, groups), (weights, rows, weight, groups)


def _backward(kind: str, kept: tuple[Params, Array, Array, Groups], cotangent: Array) -> tuple[object, ...]:
    weights, rows, weight, groups = kept
    pull = jax.vjp(lambda p, x, g: _in_groups(kind, p, x, g, groups), weights, rows, weight)[1]
    return (*pull(cotangent), None)


_in_turns.defvjp(_forward, _backward)
