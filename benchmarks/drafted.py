"""``drafted``: the speed of drafts beside the formula, with acceptance planted by position.

A round costs the same whatever stands, up to what it writes. So what is drawn is replaced, while the real
logits are computed and searched all the same: draft steps draw one token, and verification draws the same one
with probability a, else another. d and v are those of rounds in which nothing stands, with and without draft
steps; v grows with the length, so each has its own. Then these run in turns with plain steps of a cache
without a draft's summaries, all filled at random (``fill``):

  measured  tokens a second of drafts of the best length, over those of plain steps
  formula   (1 - a^(k+1)) / ((1 - a)(k d + v)), of the acceptance that was reached
  adaptive  ``measured`` of a text whose lengths ``DraftLength`` chooses, its first trials included
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
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
from kvjax.cli import InputError
from kvjax.decode import DecodeRows, gain
from kvjax.decode import _draft as rounds
from kvjax.loading import LanguageModel, load
from kvjax.sampling import sampling
from kvjax.types import EMPTY, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

STANDS, FALLS, JUDGED = 1, 2, 3
"""What draft steps draw, what verification draws in its place, and the mark of a verified token's logits."""

WIDTH = 256
"""Columns of a program's result: the most tokens of a row in one piece."""

TOKENS = 48
"""That a row writes in a turn of plain steps; of drafts twice as many, so that the last round, which is cut,
counts little, and of a text four times as many."""

LOST = 16
"""Rounds, and tokens, of a piece in which nothing stands."""


@dataclasses.dataclass(frozen=True)
class Marked:
    """A network whose logits say, by the highest one, whether a token is drafted or verified."""

    network: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def at(self, context: int) -> Marked:
        return Marked(self.network.at(context))

    def logits(self, params: Any, x: Float[Array, "B *T D"]) -> Float[Array, "B *T V"]:
        """The network's with the mark; tokens that are verified together have an axis T."""
        real = self.network.logits(params, x)
        return jnp.where(jnp.arange(real.shape[-1]) == (JUDGED if x.ndim == 3 else STANDS), jnp.inf, real)


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedRows(DecodeRows):
    """Rows whose drafted tokens stand with probability ``accepted``, all rows at the same positions."""

    accepted: Float[Array, ""]

    def drawn(self, logits: Float[Array, "B V"], position: Array) -> tuple[DecodeRows, Int[Array, " B"]]:
        after, token = super().drawn(logits, position)
        chance = jax.random.uniform(jax.random.fold_in(jax.random.PRNGKey(0), position[0]))
        judged = jnp.where(chance < self.accepted, STANDS, FALLS)
        fed, told = (jnp.where(x == JUDGED, judged, x) for x in (after.token, token))
        return dataclasses.replace(after, token=fed), told


@dataclasses.dataclass
class Side:
    """Rows of one policy, which are written on and on."""

    model: LanguageModel
    policy: Policy
    state: KVState

    @staticmethod
    def of(model: LanguageModel, policy: Policy, context: int, room: int, batch: int) -> Side:
        dtype = model.params["embed"].dtype
        row = filled(model.network, policy, {}, context - room, context, dtype, 0, room)
        return Side(model, policy, fork(row, 0, batch))

    @property
    def _fixed(self) -> tuple[Any, ...]:
        return Marked(self.model.network), self.policy, WIDTH

    def rows(self, accepted: float) -> DecodeRows:
        count = self.state.rows
        return PlantedRows(
            token=jnp.zeros(count, jnp.int32),
            done=jnp.zeros(count, bool),
            left=jnp.full(count, np.iinfo(np.int32).max, jnp.int32),
            stops=jnp.full(1, EMPTY, jnp.int32),
            how=sampling(count),
            accepted=jnp.float32(accepted),
        )

    def piece(self, tokens: int, length: int = 0, accepted: float = 0.0) -> tuple[float, Any]:
        """Seconds of ``tokens`` of each row by drafts of ``length``, 0 for plain steps; and their tally."""
        fixed, rows = self._fixed, self.rows(accepted)
        how: tuple[Any, ...] = (self.model.params, {}, self.state, rows, np.int32(tokens))
        begun = time.perf_counter()
        if length:
            self.state, _, _, tally = rounds.drafted_steps(*fixed, length, *how)
        else:
            self.state, _, _, tally = rounds.plain_steps(*fixed, *how)
        tally = jax.device_get(tally)  # waits
        return time.perf_counter() - begun, tally

    def text(self, tokens: int, accepted: float) -> float:
        """Seconds of the same in the pieces of ``stream``, drafted or not as is found to be faster."""
        drafter = rounds.Drafter(rounds.DraftLength(self.policy.selection.most))
        rows, left, begun = self.rows(accepted), tokens, time.perf_counter()
        while left:
            piece = min(drafter.tokens(decode.MAX_STEPS), left)
            how: tuple[Any, ...] = (self.model.params, {}, self.state, rows, piece)
            self.state, rows, _ = drafter.write(*self._fixed, *how)
            left -= piece
        return time.perf_counter() - begun


def prices(plain: Side, drafts: Side, turns: int) -> tuple[float, float, float, dict[int, float]]:
    """Seconds of a plain step; of one with a draft's summaries over those; d; and v by length of drafts."""
    lengths = decode.draft_lengths(drafts.policy.selection.most)
    times = []
    for _ in range(turns):
        pieces = [plain.piece(TOKENS), drafts.piece(TOKENS)]
        pieces += [drafts.piece(LOST, length) for length in lengths]
        alone = [drafts.piece(1, lengths[0])[0] for _ in range(LOST)]  # rounds without a draft step
        times.append([*(seconds / tally.rounds for seconds, tally in pieces), statistics.mean(alone)])
    step, own, *whole, alone = map(statistics.median, zip(*times))
    # In which nothing stands, and the last ones draft no more tokens than can follow.
    drafted = [statistics.mean(min(k, left - 1) for left in range(1, LOST + 1)) for k in lengths]
    d = (whole[0] - alone) / drafted[0] / step
    verify = {k: one / step - count * d for k, one, count in zip(lengths, whole, drafted)}
    return step, own / step, d, verify


def measured(
    model: LanguageModel, draft: str, context: int, batch: int, accepted: float, most: int, turns: int
) -> dict[str, Any]:
    """One cell: the gain at this acceptance, measured and by the formula.

    Raises:
      InputError: a context without room for all turns.
    """
    if context <= (room := (turns + 1) * 8 * TOKENS):
        raise InputError(f"--context {context} has no room for the {room} tokens of all turns. Give more.")
    full = catalogue.policy("full")
    drafting = decode.with_draft(full, f"draft({draft}, most={most})")
    plain, drafts = (Side.of(model, policy, context, room, batch) for policy in (full, drafting))
    for one, length in ((plain, 0), *((drafts, k) for k in (0, *decode.draft_lengths(most)))):
        one.piece(2, length)  # compiles
    step, own, d, verify = prices(plain, drafts, turns)
    length = max(verify, key=lambda k: gain(accepted, k, d, verify[k]))
    v = verify[length]
    best = length if gain(accepted, length, d, v) > 1 else 0
    gains, texts, stood, judged = [], [], 0, 0
    for _ in range(turns):
        before, _ = plain.piece(TOKENS)
        seconds, tally = drafts.piece(2 * TOKENS, length, accepted)
        gains.append(2 * before / seconds)
        stood, judged = stood + int(tally.accepted.sum()), judged + int(tally.judged.sum())
        before, _ = plain.piece(TOKENS)
        texts.append(4 * before / drafts.text(4 * TOKENS, accepted))
    speed, formula = statistics.median(gains), gain(stood / judged, length, d, v)
    where = {"draft": draft, "context": context, "rows": batch, "most": most, "planted": accepted}
    numbers = {"plain_ms": 1000 * step, "own": own, "d": d, "v": v, "reached": stood / judged}
    numbers |= {"formula": formula, "measured": speed, "share": speed / formula}
    numbers |= {"adaptive": statistics.median(texts)}
    return where | {"best": best, "length": length} | {name: round(x, 3) for name, x in numbers.items()}


def rows(
    size: str, drafts: Sequence[str], cells: Sequence[tuple[int, int]], accepted: Sequence[float], **how: int
) -> Iterator[dict[str, Any]]:
    """A row for each draft, (context, rows) and acceptance of a random model."""
    longest = max(SIZES[size].max_positions, *(context for context, _ in cells))
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), dataclasses.replace(SIZES[size], max_positions=longest), 0, STORED[size])
        model = load(folder)
        for (context, batch), draft, a in itertools.product(cells, drafts, accepted):
            yield {"model": size} | measured(model, draft, context, batch, a, **how)


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    none = "" if row["best"] else " (none by the formula)"
    return (
        f"{row['model']:6} {row['draft']:24} {row['context']:6} x {row['rows']:<2} d={row['d']:.2f} "
        f"v={row['v']:.2f}  a={row['reached']:.2f} k={row['length']}{none}: formula {row['formula']:.2f}, "
        f"measured {row['measured']:.2f} ({row['share']:.0%}), adaptive {row['adaptive']:.2f}"
    )
