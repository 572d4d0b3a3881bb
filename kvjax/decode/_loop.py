"""The multi-step decode loop: feed each active row its token and draw the next, n times in one program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.algebra import Policy
from kvjax.cache import mapped
from kvjax.cache.state import KVState
from kvjax.decode._by_layer import embed, layer_calls, outer, runs_by_layer, step_layer
from kvjax.decode._step import confidence_after, step
from kvjax.sampling import Sampling, sample
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.types import EMPTY, Network, Params, of_layer, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

R = TypeVar("R", bound=Any)
"""What rows feed next: a pytree with ``active``, bool [B]."""


def decode_loop(
    step: Callable[[KVState, R], tuple[KVState, Any]],
    advance: Callable[[R, Any, KVState], tuple[R, Any]],
    state: KVState,
    rows: R,
    out: Any,
    most: int | Int[Array, ""],
) -> tuple[KVState, R, Any]:
    """Up to ``most`` decode steps of the rows that are active; ends when none is. Pure.

    ``generate``, the engine and studies that replay a text run this loop and differ in its two functions.

    Args:
      step: (state, rows) to the state after a token of each active row, and what the step gave: logits.
      advance: (rows, what the step gave, the state after it) to the rows' next tokens, and a record of the
        step: a pytree of arrays [B, ...].
      state: with pages for what comes.
      rows: what rows feed next.
      out: a pytree like the record, of arrays [B, n, ...], n >= ``most``; step i writes column i.
      most: a number, or traced.

    Returns:
      The state, the rows, and ``out``.
    """

    def any_active(carry: tuple[Array, KVState, R, Any]) -> Array:
        i, _, rows, _ = carry
        return (i < most) & jnp.any(rows.active)

    def once(carry: tuple[Array, KVState, R, Any]) -> tuple[Array, KVState, R, Any]:
        i, state, rows, out = carry
        state, result = step(state, rows)
        rows, record = advance(rows, result, state)
        return i + 1, state, rows, jax.tree.map(lambda x, new: x.at[:, i].set(new), out, record)

    return jax.lax.while_loop(any_active, once, (jnp.asarray(0), state, rows, out))[1:]


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeRows:
    """Rows that are being written.

    Attributes:
      token: the last token of each row, written out but not yet fed.
      done: rows that met a stop token or their limit.
      left: tokens each row may still write.
      stops: ids that end a row, EMPTY-padded; for all rows [Z], or of each [B, Z].
      how: sampling parameters.
    """

    token: Int[Array, " B"]
    done: Bool[Array, " B"]
    left: Int[Array, " B"]
    stops: Int[Array, "*B Z"]
    how: Sampling

    @property
    def active(self) -> Bool[Array, " B"]:
        return ~self.done

    def drawn(self, logits: Float[Array, "B V"], position: Array) -> tuple[DecodeRows, Int[Array, " B"]]:
        """Draw the token that will stand at ``position``; EMPTY for rows that were done."""
        token = sample(logits, self.how, position)
        left = self.left - (~self.done).astype(jnp.int32)
        done = self.done | (left <= 0) | jnp.any(token[:, None] == jnp.atleast_2d(self.stops), axis=-1)
        after = dataclasses.replace(
            self,
            token=jnp.where(self.done, self.token, token),
            done=done,
            left=left,
            how=self.how.after(token, position, self.active),
        )
        return after, jnp.where(self.done, EMPTY, token)


@functools.partial(jax.jit, static_argnums=3)
def first_token(
    rows: DecodeRows, logits: Float[Array, "B V"], length: Int[Array, " B"], mesh: Mesh = ONE
) -> tuple[DecodeRows, Int[Array, " B"]]:
    """Draws the token that follows a prompt, for every row."""
    return mesh.everywhere(rows.drawn(logits, length))  # type: ignore[no-any-return]


@functools.partial(mapped.jit, static=("network", "steps"), donate="state")
def decode_steps(
    network: Network,
    policy: Policy,
    steps: int,
    params: Params,
    weights: Params,
    state: KVState,
    rows: DecodeRows,
) -> tuple[KVState, DecodeRows, Int[Array, "B steps"]]:
    """Up to ``steps`` tokens for every row that is not done, in one program."""
    state, rows, out = decode_loop(
        lambda state, rows: step(network, policy, params, weights, state, rows.token, rows.active),
        lambda rows, logits, state: rows.drawn(logits, state.length),
        state,
        rows,
        jnp.full((state.rows, steps), EMPTY, jnp.int32),
        steps,
    )
    return state, *state.mesh.everywhere((rows, out))


def write(
    network: Network,
    policy: Policy,
    steps: int,
    params: Params,
    weights: Params,
    state: KVState,
    rows: DecodeRows,
) -> tuple[KVState, DecodeRows, Int[Array, "B steps"]]:
    """``decode_steps``; for a deep model on a CPU with one program per layer. The state is donated."""
    if not runs_by_layer(network, params):
        return decode_steps(network, policy, steps, params, weights, state, rows)
    network, rest = network.at(state.context), outer(params)
    calls, caches, mesh = layer_calls(network, policy, params, weights), list(state.layers), state.mesh
    networks = [of_layer(network, at) for at in range(len(calls))]
    out, i = mesh.put((np.full((state.rows, steps), EMPTY, np.int32), np.int32(0)))
    length, confidence = state.length, state.confidence
    x = embed(network, rest, length, rows.token, mesh)
    for _ in range(steps):
        done = rows.done
        for at, (one, call) in enumerate(zip(networks, calls)):
            x, caches[at] = step_layer(
                one, *call, policy, caches[at], x, length, done, state.total, confidence, mesh=mesh
            )
        x, length, confidence, rows, out, i = _between_steps(
            network, policy, rest, x, length, confidence, rows, out, i, mesh
        )
        if np.asarray(done).all():  # of the step before: the device need not be waited for
            break
    state = dataclasses.replace(state, layers=tuple(caches), length=length, confidence=confidence)
    return state, rows, out


@functools.partial(jax.jit, static_argnames=("network", "mesh"), donate_argnames=("length", "out"))
def _between_steps(
    network: Network,
    policy: Policy,
    rest: Params,
    x: Float[Array, "B 1 D"],
    length: Int[Array, " B"],
    confidence: Float[Array, " B"] | None,
    rows: DecodeRows,
    out: Int[Array, "B steps"],
    i: Int[Array, ""],
    mesh: Mesh,
) -> tuple[Array, Array, Array | None, DecodeRows, Array, Array]:
    """Between two steps: logits of one, its tokens in column ``i`` of ``out``, the next one's embedding."""
    logits, fed = network.logits(rest, x[:, 0]), ~rows.done
    length = length + fed.astype(jnp.int32)
    confidence = confidence_after(policy, confidence, logits, fed)
    rows, fresh = rows.drawn(logits, length)
    x = network.embed(rest, rows.token[:, None], length[:, None])
    return mesh.by_row(x), *mesh.everywhere((length, confidence, rows, out.at[:, i].set(fresh), i + 1))
