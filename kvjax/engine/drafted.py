"""A running batch whose policy drafts: a selection writes a few tokens ahead, one full read verifies them.

Texts are those of any other batch. How many tokens are drafted, or none, follows from what earlier programs
took and how much was accepted, over all rows (``kvjax.decode.DraftLength``); rows accept different counts.

Why: kvjax/DESIGN.md, 38.
"""

from __future__ import annotations

import time
from typing import Any

import jax

from kvjax.cache.state import KVState
from kvjax.decode import DraftLength, Tally, draft_lengths
from kvjax.engine.batch import RunningBatch
from kvjax.engine.compiler import Program
from kvjax.engine.decoding import SampledTokens
from kvjax.engine.programs import SizedPrograms
from kvjax.engine.structure import Structure


class DraftedBatch(RunningBatch):
    """Rows of one policy structure that has a draft."""

    def __init__(self, structure: Structure, rows: int) -> None:
        super().__init__(structure, rows)
        self.length = DraftLength(structure.policy.selection.most)
        self._begun, self._drafts = 0.0, 0  # of the program under way: when, and how long its drafts are
        self._tally: Tally | None = None  # of its drafts, on the device; None of plain steps
        self._seen: Tally | None = None  # of the last program that landed, on the host

    def step(self, steps: int, now: int) -> None:
        """As of any batch, by drafts where they gain something."""
        policies = self._policies()  # which drops what was found for other rows
        fixed = self.model.network, policies, steps
        inputs = self.model.params, self.structure.learned.weights
        if self._steps is None:
            sized, self._steps_shape = self.sized_programs(self.counts), self.shaped
            if not self.shaped:
                unshaped = self._step_programs(sized, self.state, steps, False)
                self._steps_shape = not all(program.ready for program in unshaped)
            like = (*inputs, self.state, self._inputs(now, self._steps_shape))
            found = {k: sized.drafted.find(*fixed, k, *like) for k in draft_lengths(self.length.most)}
            found[0] = sized.steps.find(*fixed, *like)
            self._steps = found.__getitem__
        rows, self._begun, k = self._inputs(now, self._steps_shape), time.monotonic(), self.length.next
        program, self._drafts = self._steps(k), k
        if k:
            self.state, drawn, known, self._tally = program(*fixed, k, *inputs, self.state, rows)
        else:
            self.state, drawn, known = program(*fixed, *inputs, self.state, rows)
            self._tally = None
        self._flight = self._begun, drawn, known

    def land(self) -> tuple[SampledTokens, float]:
        drawn, took = super().land()
        self._seen = None if self._tally is None else jax.device_get(self._tally)
        if self._seen is None:
            rounds, judged, accepted = int((drawn.token >= 0).any(axis=0).sum()), 0, 0
        else:
            counts: tuple[Any, ...] = (self._seen.rounds, self._seen.judged.sum(), self._seen.accepted.sum())
            rounds, judged, accepted = map(int, counts)
        self.length.saw(self._drafts, rounds, judged, accepted, took)
        return drawn, took

    def drafts(self, number: int) -> tuple[int, int]:
        if self._seen is None:
            return 0, 0
        return int(self._seen.drafted[number]), int(self._seen.accepted[number])

    def _step_programs(self, sized: SizedPrograms, state: KVState, steps: int, shaped: bool) -> list[Program]:
        fixed = self.model.network, self._policies(), steps
        like = self.model.params, self.structure.learned.weights, state, self._inputs(steps, shaped)
        drafted = [sized.drafted.program(*fixed, k, *like) for k in draft_lengths(self.length.most)]
        return [sized.steps.program(*fixed, *like), *drafted]
