"""Batches of the embedded model's mixture: rows by curriculum level.

Batch i depends on (seed, level, i) alone, which seed its generator: a run that was stopped continues with the
batches it would have had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import grain.python as grain
import numpy as np

from train.embedded import tasks
from train.embedded.tasks import SHARES, facts, logs, repeats
from train.embedded.tasks.pieces import RowFn
from train.rows import ANSWER, MAGIC, SECRET, Source, Wording, copy_row, needle_row, shortened, text_row


def training_row(
    rng: np.random.Generator, source: Source, length: int, level: Level
) -> tuple[np.ndarray, np.ndarray]:
    """A row of one of the level's kinds, by their shares; plain text if nothing else fits."""
    if level.kinds:
        return _row_of_kinds(rng, source, length, level)
    kind = rng.random()
    if kind < level.needles:
        keys = int(rng.choice([n for n in level.keys if n <= 4 or length >= 512]))
        if length < 192:
            keys = min(keys, 2)
        row = needle_row(
            rng,
            source,
            length,
            keys=keys,
            questions=int(rng.integers(1, min(keys, 4) + 1)),
            snap=rng.random() < 0.6,
            gap=str(rng.choice([" ", " ", "\n", "\n\n"])),
            wording=_wording(rng, level),
            figures=int(rng.integers(2, 5)) if level.clash and rng.random() < level.clash else 10,
        )
        if row is not None:
            return row
    elif kind < level.needles + level.tasks:
        return tasks.draw(rng, source, length, level.families)[1:]
    if kind < 1 - level.copies:
        return text_row(rng, source, length)
    return copy_row(rng, source, length)


KINDS: dict[str, RowFn] = {
    "facts": facts.row,
    "sentences": facts.sentence,
    "repeats": repeats.row,
    "logs": logs.row,
    "copies": copy_row,
}
"""What ``Level.kinds`` names besides "books" (plain text) and "tasks" (``Level.families``)."""


def _row_of_kinds(
    rng: np.random.Generator, source: Source, length: int, level: Level
) -> tuple[np.ndarray, np.ndarray]:
    chances = np.asarray(list(level.kinds.values()))
    kind = list(level.kinds)[int(rng.choice(len(chances), p=chances / chances.sum()))]
    if kind == "tasks":
        return tasks.draw(rng, source, length, level.families)[1:]
    return row_of_kind(rng, source, length, kind)


def row_of_kind(
    rng: np.random.Generator, source: Source, length: int, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """A row of one of ``KINDS``; plain text if none fits, and for "books"."""
    for _ in range(4 if kind in KINDS else 0):
        if (row := KINDS[kind](rng, source, length)) is not None:
            return row
    return text_row(rng, source, length)


def _wording(rng: np.random.Generator, level: Level) -> Wording:
    if not (level.magic and rng.random() < level.magic):
        return SECRET
    return shortened(rng) if level.bridge and rng.random() < level.bridge else MAGIC


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hush:
    """How KV heads (with all their query heads) are silenced in training.

    Attributes:
      rows: share of rows in which heads are silenced.
      heads: chance of each KV head in such a row, by layer.
      layer: chance that one whole layer of those whose ``heads`` are not 0 is silent in such a row.
    """

    rows: float
    heads: tuple[float, ...]
    layer: float = 0.0

    def draw(self, rng: np.random.Generator, count: int, kv_heads: int) -> np.ndarray:
        """Which KV heads speak: bool [count, L, K]."""
        chance = np.asarray(self.heads)[None, :, None]
        silent = rng.random((count, len(self.heads), kv_heads)) < chance
        open_to = np.flatnonzero(self.heads)
        for row in np.flatnonzero(rng.random(count) < self.layer):
            silent[row, open_to[int(rng.integers(len(open_to)))]] = True
        return ~(silent & (rng.random(count) < self.rows)[:, None, None])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """The mixture of one curriculum level.

    Attributes:
      lengths: of rows.
      shares: how often each length is drawn.
      scored: tokens of a batch whose loss is computed: all answers, the rest sampled by weight.
      tokens: in a batch, at any row length; None is the mixture's number.
      keys: numbers of needles, of which each needle row draws one; above four only from 512 tokens.
      needles, tasks, copies: shares of rows of these kinds; the rest is plain text.
      magic: share of needle rows in RULER's wording.
      bridge: share of those whose question keeps only some of the words between key and number.
      clash: share of needle rows whose numbers are made of two to four different digits.
      families: how often each of ``tasks.TASKS`` is drawn for a task row, among those that fit.
      silent: chance that a query head is silenced in a row, [L][N], so that others learn what it does
        (DropHead, arXiv 2004.13342); empty silences none.
      kinds: shares of "facts", "sentences", "repeats", "logs", "copies", "tasks" and "books"; replaces
        ``needles``, ``tasks`` and ``copies``.
      hush: how KV heads are silenced, or None. Not together with ``silent``.
      ahead: answers of a batch that the look-ahead loss is computed for; 0 is none.

    Raises:
      ValueError: ``kinds`` names an unknown kind.
    """

    lengths: tuple[int, ...]
    shares: tuple[float, ...]
    scored: int
    tokens: int | None = None
    keys: tuple[int, ...] = (1, 1, 2, 4, 6, 8)
    needles: float = 0.62
    tasks: float = 0.0
    copies: float = 0.15
    magic: float = 0.0
    bridge: float = 0.0
    clash: float = 0.0
    families: Mapping[str, float] = dataclasses.field(default_factory=lambda: SHARES)
    silent: tuple[tuple[float, ...], ...] = ()
    kinds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    hush: Hush | None = None
    ahead: int = 0

    def __post_init__(self) -> None:
        if unknown := set(self.kinds) - {*KINDS, "books", "tasks"}:
            raise ValueError(
                f"Level(kinds={dict(self.kinds)}) names no kind of row: {', '.join(sorted(unknown))}. "
                f"Kinds are {', '.join(KINDS)}, books, tasks."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mix:
    """The curriculum and the size of its batches.

    Attributes:
      seed: of every batch.
      tokens: in a batch, unless a level says otherwise.
      levels: the curriculum.
      kv_heads: of a layer; needed by levels with ``hush``.
      parts: of a batch, one a device (``train.embedded.data_parallel``).
    """

    seed: int
    tokens: int
    levels: tuple[Level, ...]
    kv_heads: int = 0
    parts: int = 1


def row_length(rng: np.random.Generator, level: Level) -> int:
    """Tokens of a batch's rows: the first draw of its generator."""
    shares = np.asarray(level.shares)
    return int(rng.choice(level.lengths, p=shares / shares.sum()))


class Batches:
    """Random-access source of training batches at one curriculum level (a grain source).

    ``self[i]`` is a dict: tokens int32 [B, T]; and, for S scored tokens, at int32 [S] (row-major index
    of the position that predicts), target int32 [S], weight float32 [S], answer bool [S]. A level that
    silences heads adds speak bool, [B, L, N] for query heads (``silent``) or [B, L, K] (``hush``); one with a
    look-ahead loss adds the arrays of ``choose_ahead``. With P parts, every leaf has them as its first axis:
    B / P rows and S / P scored tokens each, ``at`` counted within the part.
    """

    def __init__(self, source: Source, mix: Mix, level: int, count: int):
        self.source, self.mix, self.level, self.count = source, mix, level, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        level = self.mix.levels[self.level]
        rng = np.random.default_rng((self.mix.seed, self.level, int(index)))
        length = row_length(rng, level)
        parts = self.mix.parts
        count = max(1, (level.tokens or self.mix.tokens) // length // parts)
        pieces = [self._part(rng, level, length, count) for _ in range(parts)]
        return (
            pieces[0]
            if parts == 1
            else {name: np.stack([part[name] for part in pieces]) for name in pieces[0]}
        )

    def _part(self, rng: np.random.Generator, level: Level, length: int, count: int) -> dict[str, np.ndarray]:
        parts = self.mix.parts
        rows = [training_row(rng, self.source, length, level) for _ in range(count)]
        tokens, weight = (np.stack(column) for column in zip(*rows))
        batch = {"tokens": tokens, **choose_scored(rng, tokens, weight, level.scored // parts)}
        if level.silent:
            chance = np.asarray(level.silent)
            batch["speak"] = rng.random((count, *chance.shape)) >= chance
        if level.hush is not None:
            batch["speak"] = level.hush.draw(rng, count, self.mix.kv_heads)
        if level.ahead:
            batch |= choose_ahead(tokens, weight, level.ahead // parts)
        return batch


AHEAD = 3
"""Tokens beyond the next one that a question's last token must predict."""


def choose_ahead(tokens: np.ndarray, weight: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """Where answers begin, and their 2nd, 3rd and 4th tokens.

    Args:
      tokens, weight: of a batch, [B, T].
      count: A, the first answers are taken; fewer are padded.

    Returns:
      ahead_at int32 [A] (row-major index of the position that predicts the answer's first token),
      ahead_target int32 [A, 3], ahead_real bool [A, 3] (the token exists and belongs to the answer).
    """
    is_answer = np.pad(weight >= ANSWER, ((0, 0), (0, AHEAD + 1)))[:, : tokens.shape[1] + AHEAD]
    first = is_answer[:, : tokens.shape[1]] & ~np.pad(is_answer, ((0, 0), (1, 0)))[:, : tokens.shape[1]]
    rows, at = (x[:count] for x in np.nonzero(first))
    pad = (0, count - len(rows))
    offsets = at[:, None] + np.arange(1, AHEAD + 1)
    real = np.logical_and.accumulate(is_answer[rows[:, None], offsets], axis=1)
    target = np.where(real, tokens[rows[:, None], np.minimum(offsets, tokens.shape[1] - 1)], 0)
    return {
        "ahead_at": np.pad(rows * tokens.shape[1] + at - 1, pad).astype(np.int32),
        "ahead_target": np.pad(target, (pad, (0, 0))).astype(np.int32),
        "ahead_real": np.pad(real, (pad, (0, 0))),
    }


def choose_scored(
    rng: np.random.Generator, tokens: np.ndarray, weight: np.ndarray, count: int
) -> dict[str, np.ndarray]:
    """The tokens that the loss is computed on; not all, because logits are the widest product.

    Every answer token is taken with its own weight. The others are drawn with chances proportional to their
    weights and share the weight of all others evenly, so the loss is unbiased.
    """
    target = np.arange(tokens.size).reshape(tokens.shape)[:, 1:].ravel()
    weight = weight.ravel()[target]
    answer = np.flatnonzero(weight >= ANSWER)[:count]
    rest = np.where(weight >= ANSWER, 0.0, weight)
    slots = min(count - len(answer), int(np.count_nonzero(rest)))
    drawn = (
        rng.choice(len(rest), slots, replace=False, p=rest / rest.sum()) if slots else np.zeros(0, np.int64)
    )
    pad = count - len(answer) - slots
    chosen = np.concatenate([answer, drawn, np.zeros(pad, np.int64)]).astype(np.int64)
    even = rest.sum() / max(slots, 1)
    share = np.concatenate([weight[answer], np.full(slots, even), np.zeros(pad)])
    return {
        "at": (target[chosen] - 1).astype(np.int32),
        "target": tokens.ravel()[target[chosen]].astype(np.int32),
        "weight": share.astype(np.float32),
        "answer": np.arange(count) < len(answer),
    }


def batches(source: Source, mix: Mix, level: int, count: int) -> grain.MapDataset:
    """The batches of one level as a grain dataset."""
    return grain.MapDataset.source(Batches(source, mix, level, count))
