"""Decoding by drafts: a selection writes a few tokens ahead, and one full read of them all says which stand.

A round of a row that has seen L tokens and feeds t next, with three tokens drafted and the first accepted:

  position    L    L+1  L+2  L+3
  fed         t    d1   d2   d3     by draft steps, beside the cache; then all at once, by full reads
  drawn            y1   y2   y3 y4  from the verified logits, as plain decoding draws there
  stands      t    y1=d1            t and d1 are written; y2 is fed next, whatever was drafted

Draft and verification draw with the same key at a position (``kvjax.sampling``), so text is that of plain
decoding at every temperature.

Why: kvjax/DESIGN.md, 38.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import layer
from kvjax.algebra import Policy
from kvjax.cache import mapped
from kvjax.cache.ring import ENTRY
from kvjax.cache.state import KVState
from kvjax.decode._draft_length import DraftLength
from kvjax.decode._loop import DecodeRows, decode_loop
from kvjax.decode._step import layer_info, read_in_turn, run_layers, step
from kvjax.sharding.specs import of_state
from kvjax.types import EMPTY, Network, Params, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tally:
    """What became of each row's drafts.

    Attributes:
      rounds: verifications, of all rows together.
      drafted: tokens that were drafted and fed.
      judged: of these, those before which every other one of their round was accepted.
      accepted: of these, those that plain decoding writes.
    """

    rounds: Int[Array, ""]
    drafted: Int[Array, " B"]
    judged: Int[Array, " B"]
    accepted: Int[Array, " B"]

    @staticmethod
    def zero(rows: int) -> Any:
        none = jnp.zeros(rows, jnp.int32)
        return Tally(rounds=jnp.int32(0), drafted=none, judged=none, accepted=none)


@functools.partial(mapped.jit, static=("network", "width", "length"), donate="state")
def drafted_steps(
    network: Network,
    policy: Policy,
    width: int,
    length: int,
    params: Params,
    weights: Params,
    state: KVState,
    rows: DecodeRows,
    most: Int[Array, ""],
) -> tuple[KVState, DecodeRows, Int[Array, "B width"], Tally]:
    """Up to ``most`` tokens, at most ``width``, for every row that is not done, in one program.

    Args:
      network, policy, params, weights, rows: as in ``decode_steps``; ``policy.selection.drafts`` drafts.
      width: columns of the result.
      length: tokens drafted in a round; one more are verified, so each length is a program of its own.
      state: with pages for ``most`` tokens; donated.
      most: tokens of a row.

    Returns:
      The state, the rows, the tokens with EMPTY behind each row's last one, and what became of drafts.
    """
    out = jnp.full((state.rows, width), EMPTY, jnp.int32)

    def any_left(carry: tuple[KVState, DecodeRows, Array, Array, Tally]) -> Array:
        _, rows, _, written, _ = carry
        return jnp.any(rows.active & (written < most))

    def once(carry: tuple[KVState, DecodeRows, Array, Array, Tally]) -> Any:
        state, rows, out, written, tally = carry
        state, rows, drawn, seen, _ = round_of(
            network, policy, length, params, weights, state, rows, most - written
        )
        at = jnp.where(drawn >= 0, written[:, None] + jnp.arange(drawn.shape[1]), width)
        out = out.at[jnp.arange(len(out))[:, None], at].set(drawn, mode="drop")
        written = written + (drawn >= 0).sum(axis=1)
        return state, rows, out, written, jax.tree.map(jnp.add, tally, seen)

    carry = (state, rows, out, jnp.zeros(state.rows, jnp.int32), Tally.zero(state.rows))
    state, rows, out, _, tally = jax.lax.while_loop(any_left, once, carry)
    return state, *state.mesh.everywhere((rows, out, tally))


@functools.partial(mapped.jit, static=("network", "width"), donate="state")
def plain_steps(
    network: Network,
    policy: Policy,
    width: int,
    params: Params,
    weights: Params,
    state: KVState,
    rows: DecodeRows,
    most: Int[Array, ""],
) -> tuple[KVState, DecodeRows, Int[Array, "B width"], Tally]:
    """``drafted_steps`` without drafts: ``decode_steps`` of any number of tokens up to ``width``."""
    state, rows, out = decode_loop(
        lambda state, rows: step(network, policy, params, weights, state, rows.token, rows.active),
        lambda rows, logits, state: rows.drawn(logits, state.length),
        state,
        rows,
        jnp.full((state.rows, width), EMPTY, jnp.int32),
        most,
    )
    steps = (out >= 0).any(axis=0).sum(dtype=jnp.int32)
    return state, *state.mesh.everywhere(
        (rows, out, dataclasses.replace(Tally.zero(state.rows), rounds=steps))
    )


def round_of(
    network: Network,
    policy: Policy,
    length: int,
    params: Params,
    weights: Params,
    state: KVState,
    rows: DecodeRows,
    spare: Int[Array, " B"],
) -> tuple[KVState, DecodeRows, Int[Array, "B T"], Tally, Float[Array, "B T V"]]:
    """Drafts, verifies and writes, once. Pure; T is one more than ``length``.

    Args:
      network, policy, length, params, weights, state, rows: as in ``drafted_steps``.
      spare: tokens that each row may be given; rows with none are left as they are.

    Returns:
      The state, the rows, the tokens drawn with EMPTY behind each row's last one, what became of drafts, and
      the logits that tokens were drawn from.
    """
    mesh = state.mesh
    active = rows.active & (spare > 0)
    writer = dataclasses.replace(rows, done=~active, left=jnp.minimum(rows.left, spare))
    drafts = _drafted(network, policy, length, params, weights, state, writer)
    fed = jnp.concatenate([jnp.where(active, rows.token, EMPTY)[:, None], drafts], axis=1)
    count, params = (fed >= 0).sum(axis=1), read_in_turn(params, state.length)
    x, arrived = run_layers(
        network,
        policy,
        params,
        weights,
        state,
        jnp.maximum(fed, 0),
        layer.verify,
        (state.length, count),
        lambda _: ENTRY,
    )
    logits = network.logits(params, x)

    def judge(carry: tuple[DecodeRows, Array], i: Array) -> Any:
        rows, going = carry
        view, token = dataclasses.replace(rows, done=~going).drawn(logits[:, i], state.length + i + 1)
        ended = going & view.done
        fits = i + 1 < count
        stands = going & fits & (token == fed[:, jnp.minimum(i + 1, fed.shape[1] - 1)])
        rows = dataclasses.replace(view, done=rows.done | ended)
        return (rows, stands & ~ended), (token, going & fits, stands)

    (rows, _), (drawn, judged, accepted) = jax.lax.scan(judge, (rows, active), jnp.arange(fed.shape[1]))
    written = (drawn >= 0).sum(axis=0)
    info = layer_info(network.at(state.context), policy, weights, state)
    layers = tuple(
        layer.on_devices(
            layer.write, info(index), None, (cache, new), mesh, (state.length, written), of_state(cache)
        )
        for index, (cache, new) in enumerate(zip(state.layers, arrived))
    )
    state = dataclasses.replace(state, layers=layers, length=mesh.everywhere(state.length + written))
    tally = Tally(
        rounds=jnp.int32(1),
        drafted=count - active,
        judged=judged.sum(axis=0, dtype=jnp.int32),
        accepted=accepted.sum(axis=0, dtype=jnp.int32),
    )
    return state, rows, drawn.T, tally, logits


def _drafted(
    network: Network,
    policy: Policy,
    length: int,
    params: Params,
    weights: Params,
    state: KVState,
    writer: DecodeRows,
) -> Int[Array, "B length"]:
    """The tokens each row would write next by selective reads, EMPTY behind them.

    A drafted token that ends its row is left out: nothing follows it.
    """
    drafts = jnp.full((state.rows, length), EMPTY, jnp.int32)
    blocks = tuple(layer.empty_block(cache, length) for cache in state.layers)

    def any_active(carry: tuple[Array, DecodeRows, Array, Any]) -> Array:
        i, writer, _, _ = carry  # verification draws a row's last token
        return (i < length) & jnp.any(writer.active & (writer.left > 1))

    def once(carry: tuple[Array, DecodeRows, Array, Any]) -> Any:
        i, writer, drafts, blocks = carry
        here = read_in_turn(params, i)
        at = jnp.full(state.rows, i)
        layers: Any = tuple(zip(state.layers, blocks))
        ahead = dataclasses.replace(state, length=state.length + i, layers=layers)
        x, blocks = run_layers(
            network,
            policy,
            here,
            weights,
            ahead,
            writer.token[:, None],
            layer.draft,
            (state.length, at, writer.active),
            lambda carry: of_state(carry[1]),
        )
        writer, token = writer.drawn(network.logits(here, x[:, 0]), state.length + i + 1)
        drafts = drafts.at[:, i].set(jnp.where(writer.active, token, EMPTY))
        return i + 1, writer, drafts, blocks

    carry = (jnp.asarray(0), writer, drafts, blocks)
    return jax.lax.while_loop(any_active, once, carry)[2]


@dataclasses.dataclass
class Drafter:
    """The host's side: how long the next draft is, and what became of all so far.

    Attributes:
      length: chooses.
      clock: it may go by what pieces take. Several processes may not, since all must choose the same.
      drafted, accepted: tokens, of all rows.
    """

    length: DraftLength
    clock: bool = True
    drafted: int = 0
    accepted: int = 0

    @staticmethod
    def of(policy: Policy, state: KVState) -> Drafter | None:
        """For a policy that drafts; None for another."""
        if policy.selection.drafts is None:
            return None
        return Drafter(DraftLength(policy.selection.most), clock=not state.mesh.across)

    def tokens(self, every: int) -> int:
        """Tokens of the next piece, at most ``every``."""
        return self.length.tokens(every) if self.clock else every

    def write(
        self,
        network: Network,
        policy: Policy,
        every: int,
        params: Params,
        weights: Params,
        state: KVState,
        rows: DecodeRows,
        tokens: int,
    ) -> tuple[KVState, DecodeRows, Any]:
        """A piece of up to ``tokens`` tokens a row, drafted or not as was chosen; the state is donated."""
        k, known, begun = self.length.next, _programs(), time.perf_counter()
        how = (params, weights, state, rows, np.int32(tokens))
        if k:
            state, rows, out, tally = drafted_steps(network, policy, every, k, *how)
        else:
            state, rows, out, tally = plain_steps(network, policy, every, *how)
        counts = jax.device_get(tally)  # waits
        seconds = time.perf_counter() - begun
        self.drafted += int(counts.drafted.sum())
        self.accepted += int(counts.accepted.sum())
        timed = self.clock and _programs() == known
        seen = (int(counts.rounds), int(counts.judged.sum()), int(counts.accepted.sum()))
        self.length.saw(k, *seen, seconds if timed else None)
        return state, rows, out


def _programs() -> int:
    """How many were compiled."""
    return drafted_steps._cache_size() + plain_steps._cache_size()  # type: ignore[attr-defined]
