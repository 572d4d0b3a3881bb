"""``drafted``: the speed of drafts beside the formula, with acceptance planted.

A round costs the same whatever is accepted, up to what it writes. So the model's choices are replaced: every
draft step draws one token, and verification draws the same one with probability a, else another; the real
logits are computed all the same. d and v are those of rounds in which nothing stands, of two lengths. Then
rounds of the best length run at acceptance a, in turns with plain steps of a full cache, and

  measured  tokens a second over those of plain steps
  formula   (1 - a^(k+1)) / ((1 - a)(k d + v))

Caches are filled with random keys and values (``fill``); weights are random.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.fill import filled
from benchmarks.random_model import SIZES, STORED, write
from kvjax import catalogue, decode
from kvjax.algebra import Policy
from kvjax.cache.state import KVState, fork
from kvjax.decode import DecodeRows, best_length, gain
from kvjax.decode import _draft as rounds
from kvjax.loading import LanguageModel, load
from kvjax.sampling import sampling
from kvjax.types import EMPTY

if TYPE_CHECKING:
    from jaxtyping import Array, Float

MOST = 8
"""Longest draft."""
STANDS, FALLS = 7, 8
"""Token that every draft step draws, and the one that verification draws in its place."""
ROOM, WIDTH = 512, 128
"""Tokens that a filled row may still write, all turns together; and those of one turn, at most."""


@dataclasses.dataclass(frozen=True)
class Planted:
    """A network whose draft steps draw one token, which verification draws with probability ``accepted``."""

    network: Any
    accepted: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def at(self, context: int) -> Planted:
        return Planted(self.network.at(context), self.accepted)

    def logits(self, params: Any, x: Float[Array, "B *T D"]) -> Float[Array, "B *T V"]:
        """The network's, with the planted token above all; verified tokens have an axis T."""
        real = self.network.logits(params, x)
        token = jnp.full(x.shape[:-1], STANDS)
        if x.ndim == 3:
            # By the first row's values: all rows go on together, and none waits for another at the end.
            bits = jax.lax.bitcast_convert_type(x[:1, :, 0].astype(jnp.float32), jnp.uint32)
            share = ((bits * jnp.uint32(2654435761)) >> 8).astype(jnp.float32) / 2**24
            token = jnp.broadcast_to(jnp.where(share < self.accepted, STANDS, FALLS), x.shape[:-1])
        planted = jnp.arange(real.shape[-1]) == token[..., None]
        return jnp.where(planted, jnp.inf, real)


@dataclasses.dataclass
class Side:
    """Rows of one policy that are written on."""

    network: Any
    policy: Policy
    params: Any
    state: KVState

    def piece(self, tokens: int, length: int) -> tuple[float, int, int]:
        """Seconds, tokens written and rounds of up to ``tokens`` tokens a row, drafts of ``length``."""
        count = self.state.rows
        rows = DecodeRows(
            token=jnp.zeros(count, jnp.int32),
            done=jnp.zeros(count, bool),
            left=jnp.full(count, 10**6, jnp.int32),
            stops=jnp.full(1, EMPTY, jnp.int32),
            how=sampling(count),
        )
        how: tuple[Any, ...] = (
            self.network,
            self.policy,
            64,
            self.params,
            {},
            self.state,
            rows,
            np.int32(tokens),
        )
        begun = time.perf_counter()
        if length:
            self.state, _, out, tally = rounds.drafted_steps(*how, np.int32(length))
        else:
            self.state, _, out, tally = rounds.plain_steps(*how)
        out, tally = jax.device_get((out, tally))  # waits
        return time.perf_counter() - begun, int((out >= 0).sum()), int(tally.rounds)


def _side(model: LanguageModel, policy: Policy, accepted: float, context: int, batch: int) -> Side:
    dtype = model.params["embed"].dtype
    row = filled(model.network, policy, {}, context - ROOM, context, dtype, 0, ROOM)
    return Side(Planted(model.network, accepted), policy, model.params, fork(row, 0, batch))


def measured(
    model: LanguageModel,
    draft: str,
    *,
    context: int,
    batch: int,
    accepted: float,
    tokens: int = 48,
    turns: int = 3,
) -> dict[str, Any]:
    """One cell: the gain at this acceptance, measured and by the formula.

    Args:
      model: with random weights.
      draft: the selection.
      context: tokens of a row at the end.
      batch: rows.
      accepted: a.
      tokens: that a row writes in a turn of plain steps; of drafts twice as many, so that the last round,
        which is cut, counts little. At most half of ``WIDTH``.
      turns: of each kind; the first is not counted.
    """
    full = catalogue.policy("full")
    policy = decode.with_draft(full, f"draft({draft}, most={MOST})")
    plain, none = (_side(model, one, 0.0, context, batch) for one in (full, policy))
    long, short = MOST, MOST // 2

    def a_round(side: Side, length: int, count: int) -> float:
        seconds, _, number = side.piece(count, length)
        return seconds / number

    times: dict[str, list[float]] = {"plain": [], "long": [], "short": []}
    for turn in range(turns):
        once = {
            "plain": a_round(plain, 0, tokens),
            "long": a_round(none, long, max(4, tokens // 4)),
            "short": a_round(none, short, max(4, tokens // 4)),
        }
        for name, seconds in once.items() if turn else ():
            times[name].append(seconds)
    step, of_long, of_short = (statistics.median(times[name]) for name in ("plain", "long", "short"))
    one = (of_long - of_short) / (long - short)
    d, v = one / step, (of_long - long * one) / step
    length = best_length(accepted, d, v, MOST) or 1
    side = dataclasses.replace(none, network=Planted(none.network.network, accepted))
    ratios, stood = [], []
    for turn in range(turns):
        per_step = a_round(plain, 0, tokens)
        seconds, written, number = side.piece(2 * tokens, length)
        if turn:
            ratios.append(written * per_step / (seconds * batch))
            stood.append(written / number / batch)
    formula = gain(accepted, length, d, v)
    best = statistics.median(ratios)
    return {
        "draft": draft,
        "context": context,
        "rows": batch,
        "accepted": accepted,
        "length": length,
        "plain_ms": round(1000 * step, 3),
        "d": round(d, 3),
        "v": round(v, 3),
        "written_a_round": round(statistics.mean(stood), 2),
        "formula": round(formula, 3),
        "measured": round(best, 3),
        "off": round(best / formula - 1, 3),
    }


def rows(
    size: str,
    drafts: tuple[str, ...],
    cells: list[tuple[int, int]],
    accepted: tuple[float, ...],
    **turns: int,
) -> Iterator[dict[str, Any]]:
    """A row for each draft, (context, rows) and acceptance of a random model."""
    longest = max(SIZES[size].max_positions, *(context for context, _ in cells))
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), dataclasses.replace(SIZES[size], max_positions=longest), 0, STORED[size])
        model = load(folder)
        for draft in drafts:
            for context, batch in cells:
                for a in accepted:
                    cell = measured(model, draft, context=context, batch=batch, accepted=a, **turns)
                    yield {"model": size} | cell


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    return (
        f"{row['model']:6} {row['draft']:24} {row['context']:6} x {row['rows']:<2} a={row['accepted']:.2f} "
        f"k={row['length']} d={row['d']:.2f} v={row['v']:.2f}  formula {row['formula']:.2f} measured "
        f"{row['measured']:.2f} ({row['off']:+.0%})"
    )
