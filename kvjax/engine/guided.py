"""A running batch whose rows have guides: which token may come next is known when the last one is.

A step gives logits, and a second program draws among the tokens that the guides allow. The host finds these
while the device computes the step. Rows without a guide run in a batch of their own, several steps a program.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvjax.cache.state import KVState
from kvjax.engine.batch import RunningBatch
from kvjax.engine.compiler import Program
from kvjax.engine.decoding import BatchInputs, SampledTokens, Snapshot
from kvjax.engine.programs import SizedPrograms
from kvjax.engine.structure import Structure


def _both(
    step: Callable[..., Any],
    draw: Callable[..., Any],
    inputs: tuple[Any, ...],
    rows: BatchInputs,
    allowed: Callable[[], np.ndarray],
) -> tuple[KVState, SampledTokens, Snapshot]:
    """A step and its draw; what is allowed is found while the device computes the step."""
    state, logits, position, known = step(*inputs)
    drawn = draw(logits, rows.how, rows.ranked, position, rows.active, allowed())
    return state, drawn, known


class GuidedBatch(RunningBatch):
    """Rows of one policy structure that have guides."""

    guided = True

    def __init__(self, structure: Structure, rows: int) -> None:
        super().__init__(structure, rows)
        self._logits: Any = None  # shapes of what a step gives: logits, and positions

    def step(self, steps: int, now: int) -> None:
        """Begins one token of every row, whatever the numbers say; ``land`` waits for them."""
        begun, policies = time.monotonic(), self._policies()  # which drops what was found for other rows
        if self._steps is None:
            sized, self._steps_shape = self.sized_programs(self.counts), self.shaped
            # The last row that shaped its draws has gone: rather its program than a pause for another.
            if not self.shaped:
                unshaped = self._step_programs(sized, self.state, 1, False)
                self._steps_shape = not all(program.ready for program in unshaped)
            step_like, draw_like = self._arguments(self.state, self._steps_shape)
            found = sized.guided_step.find(*step_like), self.structure.guided_draw.find(*draw_like)
            self._steps = functools.partial(_both, *found)
        shaped = self._steps_shape
        rows = self._inputs(1, shaped)
        inputs = (self.model.network, policies, self.model.params, self.structure.learned.weights)
        step = (*inputs, self.state, rows.token, rows.active)
        self.state, drawn, known = self._steps(step, rows, self._allowed)
        self._flight = begun, drawn, known

    def _allowed(self) -> np.ndarray:
        """Bits of the tokens that each row may write, uint32 [B, W]; free rows may write all."""
        words = -(-self.model.params["embed"].shape[0] // 32)
        allowed = np.full((len(self.rows), words), 0xFFFFFFFF, np.uint32)
        for number, row in self.taken.items():
            assert row.request.guide is not None
            allowed[number] = row.request.guide.allowed()
        return allowed

    def _arguments(self, state: KVState, shaped: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Of the step and of the draw, as far as shapes go."""
        rows, own = self._inputs(1, shaped), self.structure
        inputs = (self.model.network, self._policies(), self.model.params, own.learned.weights)
        step = (*inputs, state, rows.token, rows.active)
        if self._logits is None:
            _, *self._logits, _ = self.sized_programs(self.counts).guided_step.shapes(*step)
        logits, position = self._logits
        words = np.zeros((len(self.rows), -(-logits.shape[-1] // 32)), np.uint32)
        return step, (logits, rows.how, rows.ranked, position, rows.active, words)

    def _step_programs(self, sized: SizedPrograms, state: KVState, steps: int, shaped: bool) -> list[Program]:
        step, draw = self._arguments(state, shaped)
        return [sized.guided_step.program(*step), self.structure.guided_draw.program(*draw)]
