"""Rows that measure the embedded model: sentences to continue, and facts in twenty wordings.

All rows are made of held-out text and words. The wordings, sentences, verbs and relations of the untrained
group were in no training row; the ten trained wordings were, with other words.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from train.embedded.tasks import facts, repeats
from train.embedded.tasks.pieces import Row, RowFn, pick
from train.embedded.tasks.wordings import Wording, written
from train.rows import Source

GROUPS = {"trained": written("trained")[:10], "untrained": written("untrained")}
"""Ten wordings each."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Rows of facts in one of a group's wordings each.

    Attributes:
      group: of ``GROUPS``, or "held" for the grammar's frames that training never drew.
      keys: facts hidden, of which one is asked for.
      paraphrase: whether the question differs from the statement.
      only: index of one wording of the group; None draws.
    """

    group: str
    keys: int = 1
    paraphrase: bool = False
    only: int | None = None

    @property
    def __name__(self) -> str:
        """For error messages."""
        return repr(self)

    def __call__(self, rng: np.random.Generator, source: Source, length: int) -> Row | None:
        """(ids int32 [N], loss weight float32 [N]), or None."""
        wording = None
        if self.group in GROUPS:
            group = GROUPS[self.group]
            wording = pick(rng, group) if self.only is None else group[self.only]
        return facts.row(
            rng, source, length, wording=wording, hidden=self.keys, paraphrase=self.paraphrase, questions=1
        )


CHECKS: dict[str, RowFn] = {
    "sentence": repeats.repeated,
    "trained": Facts("trained"),
    "untrained": Facts("untrained"),
    "paraphrased": Facts("trained", paraphrase=True),
    "four_keys": Facts("trained", keys=4),
    "held_grammar": Facts("held"),
    "held_grammar_paraphrased": Facts("held", paraphrase=True),
}
"""By their names in a config's ``check.asked`` and ``gates``."""


@dataclasses.dataclass(frozen=True)
class Value:
    """Rows of facts "The secret ... for key is value." with values of one length; one is asked for.

    Attributes:
      kind: "word" or "number".
      size: tokens of a word, digits of a number.
      facts: in a row.
    """

    kind: str
    size: int
    facts: int = 1

    @property
    def __name__(self) -> str:
        """For error messages."""
        return repr(self)

    def __call__(self, rng: np.random.Generator, source: Source, length: int) -> Row | None:
        """(ids int32 [N], loss weight float32 [N]), or None."""
        wording = Wording(
            self.kind,
            f"The secret {self.kind} for {{k}} is {{v}}.",
            (f"What is the secret {self.kind} for {{k}}? The secret {self.kind} for {{k}} is",),
        )
        drawn = [self._value(rng, source) for _ in range(self.facts)]
        values = [value for value in drawn if value is not None]
        if len(values) < self.facts:
            return None
        return facts.row(
            rng,
            source,
            length,
            wording=wording,
            hidden=self.facts,
            paraphrase=False,
            questions=1,
            values=values,
        )

    def _value(self, rng: np.random.Generator, source: Source) -> str | None:
        if self.kind == "number":
            return "".join(str(rng.integers(10)) for _ in range(self.size))
        if self.size == 1:
            return pick(rng, source.short) if source.short else None
        value = source.word(rng)
        return value if len(source.encode(f" {value}")) == self.size else None


VALUES: dict[str, RowFn] = {
    "word of one token": Value("word", 1),
    "word of two tokens": Value("word", 2),
    "two digits": Value("number", 2),
    "five digits": Value("number", 5),
}
"""Values of one and of several tokens: policies that follow attention see a value's first token only."""
