"""Batches for the embedded model, cut from rows (``train.rows``) by curriculum level.

Batch i is a pure function of (seed, level, i): every row is drawn from a generator seeded with the
three, so a killed run that knows its step continues with the very batches it would have seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import grain.python as grain
import numpy as np

from train import tasks
from train.rows import (
    ANSWER,
    HAYSTACK,
    MAGIC,
    SECRET,
    TAIL,
    Source,
    Wording,
    copy_row,
    needle_row,
    shortened,
    text_row,
)  # fmt: skip
from train.tasks import SHARES, facts, logs, repeats
from train.tasks.pieces import RowFn

__all__ = [
    "ANSWER", "HAYSTACK", "MAGIC", "SECRET", "TAIL", "Batches", "Level", "Mix", "Source", "batches",
    "choose_scored", "training_row",
]  # fmt: skip


def training_row(
    rng: np.random.Generator, source: Source, length: int, level: Level
) -> tuple[np.ndarray, np.ndarray]:
    """A row of one of the level's kinds, by their shares; plain text where nothing else fits."""
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
            asked=int(rng.integers(1, min(keys, 4) + 1)),
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
    """A row of one of ``KINDS``; plain text where none fits, and for "books"."""
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
      rows: share of rows in which any is.
      heads: chance of each KV head in such a row, by layer.
      layer: chance that one whole layer of those whose ``heads`` are not 0 is silent in such a row.
    """

    rows: float
    heads: tuple[float, ...]
    layer: float = 0.0

    def draw(self, rng: np.random.Generator, count: int, streams: int) -> np.ndarray:
        """Which KV heads speak: bool [count, L, streams]."""
        chance = np.asarray(self.heads)[None, :, None]
        silent = rng.random((count, len(self.heads), streams)) < chance
        open_to = np.flatnonzero(self.heads)
        for row in np.flatnonzero(rng.random(count) < self.layer):
            silent[row, open_to[int(rng.integers(len(open_to)))]] = True
        return ~(silent & (rng.random(count) < self.rows)[:, None, None])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """What batches of one curriculum level are made of.

    Attributes:
      lengths: row lengths in use.
      shares: how often each of them is drawn.
      scored: tokens of a batch whose loss is computed; all answers are, the rest is sampled by weight.
      tokens: in a batch, whatever its row length; None is the mixture's number.
      keys: needles of a needle row, one number drawn per row; above four only from 512 tokens.
      needles, tasks, copies: share of rows of these kinds; the rest is plain text.
      magic: share of needle rows in RULER's wording.
      bridge: share of those whose question keeps only some of the words between key and number.
      clash: share of needle rows whose numbers are made of two to four different digits.
      families: how often each of ``train.tasks.TASKS`` is drawn for a task row, among those that fit.
      silent: chance that a query head writes nothing in a row, [L][N]; none is silenced where it is empty.
        What a silenced head did must then be learned by others (DropHead, arXiv 2004.13342).
      kinds: shares of "facts", "sentences", "repeats", "logs", "copies", "tasks" and "books"; where it is
        given, ``needles``, ``tasks`` and ``copies`` say nothing.
      hush: how KV heads are silenced; none where it is None. Not together with ``silent``.
      ahead: answers of a batch whose next tokens are predicted from the question's last one; 0 is none.

    Raises:
      ValueError: ``kinds`` names a kind that does not exist.
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
    """How batches are cut.

    Attributes:
      seed: of every batch.
      tokens: in a batch of a level that does not say.
      levels: the curriculum.
      streams: KV heads of a layer; asked for where a level hushes some.
      parts: into which a batch's rows are cut, one a device (``train.parts``).
    """

    seed: int
    tokens: int
    levels: tuple[Level, ...]
    streams: int = 0
    parts: int = 1


def row_length(rng: np.random.Generator, level: Level) -> int:
    """Tokens of a batch's rows: the first thing drawn for it."""
    shares = np.asarray(level.shares)
    return int(rng.choice(level.lengths, p=shares / shares.sum()))


class Batches:
    """Random-access source of training batches at one curriculum level (a grain source).

    ``self[i]`` is a dict: tokens int32 [B, T]; and, for S scored tokens, at int32 [S] (row-major index
    of the position that predicts), target int32 [S], weight float32 [S], answer bool [S]. A level that
    silences heads adds speak bool, [B, L, N] for query heads (``silent``) or [B, L, K] (``hush``); one that
    looks ahead what ``choose_ahead`` gives. In several parts, every leaf has them as its first axis: B / P
    rows and S / P scored tokens each, ``at`` counted within the part.
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
        cut = [self._part(rng, level, length, count) for _ in range(parts)]
        return cut[0] if parts == 1 else {name: np.stack([part[name] for part in cut]) for name in cut[0]}

    def _part(self, rng: np.random.Generator, level: Level, length: int, count: int) -> dict[str, np.ndarray]:
        parts = self.mix.parts
        rows = [training_row(rng, self.source, length, level) for _ in range(count)]
        tokens, weight = (np.stack(column) for column in zip(*rows))
        batch = {"tokens": tokens, **choose_scored(rng, tokens, weight, level.scored // parts)}
        if level.silent:
            chance = np.asarray(level.silent)
            batch["speak"] = rng.random((count, *chance.shape)) >= chance
        if level.hush is not None:
            batch["speak"] = level.hush.draw(rng, count, self.mix.streams)
        if level.ahead:
            batch |= choose_ahead(tokens, weight, level.ahead // parts)
        return batch


AHEAD = 3
"""Tokens beyond the next one that a question's last token is to foretell."""


def choose_ahead(tokens: np.ndarray, weight: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """Where answers begin, and their 2nd, 3rd, 4th token.

    Args:
      tokens, weight: of a batch, [B, T].
      count: A, answers taken, the first ones; padding has no weight.

    Returns:
      ahead_at int32 [A] (row-major index of the position that predicts the answer's first token),
      ahead_target int32 [A, 3], ahead_real bool [A, 3] (the token exists and belongs to the answer).
    """
    asked = np.pad(weight >= ANSWER, ((0, 0), (0, AHEAD + 1)))[:, : tokens.shape[1] + AHEAD]
    first = asked[:, : tokens.shape[1]] & ~np.pad(asked, ((0, 0), (1, 0)))[:, : tokens.shape[1]]
    row, at = (x[:count] for x in np.nonzero(first))
    pad = (0, count - len(row))
    offsets = at[:, None] + np.arange(1, AHEAD + 1)
    real = np.logical_and.accumulate(asked[row[:, None], offsets], axis=1)
    target = np.where(real, tokens[row[:, None], np.minimum(offsets, tokens.shape[1] - 1)], 0)
    return {
        "ahead_at": np.pad(row * tokens.shape[1] + at - 1, pad).astype(np.int32),
        "ahead_target": np.pad(target, (pad, (0, 0))).astype(np.int32),
        "ahead_real": np.pad(real, (pad, (0, 0))),
    }


def choose_scored(
    rng: np.random.Generator, tokens: np.ndarray, weight: np.ndarray, count: int
) -> dict[str, np.ndarray]:
    """Which tokens the loss is computed on: logits are the widest product, so not on all.

    Every answer token is in with its own weight; the others are drawn with chances proportional to
    their weights and share the weight of all others evenly, so the loss stays unbiased.
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
    """The batches of one level as a grain dataset; element i does not depend on the others."""
    return grain.MapDataset.source(Batches(source, mix, level, count))
