"""A task: how its samples are made and judged, and which policies it can say something about."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kvjax.algebra import Policy
from kvjax.eval.tasks.maker import Maker
from kvjax.eval.tasks.sample import Sample, Samples
from kvjax.eval.tasks.words import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One task.

    Attributes:
      name, group: its name, and the name for it and its relatives.
      fits: tokens from which on its samples fit.
      make: draws a sample for a maker's length; pure in its generator.
      read: gives the samples of a length, for a task that does not make them.
      score: (output, sample) to [0, 1]; None where only the reference's tokens are judged.
      metric: accuracy, ndcg, perplexity or recall (share of scored tokens that are the likeliest).
      asks: whether there is a question that a policy could see or not see.
      newline: whether an output ends at its first line break.
      needs: files of the data pack that have no generated twin.
      compares: whether every distribution is compared with the full cache's on the same tokens.
      long: whether the answer is long and states itself what it needs later. The score is of the scored words
        as the model writes them, each fed back as it was written, between the reference's other words;
        teacher-forced is measured beside it.
      free: whether what is held and read is counted over the text that is written, which may be much longer
        than the reference.
    """

    name: str
    group: str
    fits: int
    make: Callable[[Rng, Maker], Sample] | None = None
    read: Callable[[int], Samples] | None = None
    score: Callable[[str, Sample], float] | None = None
    metric: str = "accuracy"
    asks: bool = True
    newline: bool = True
    needs: tuple[str, ...] = ()
    compares: bool = False
    long: bool = False
    free: bool = False

    def refuse(self, policy: Policy, length: int) -> str | None:
        """Why this policy would change nothing at this length; None when it may run."""
        for slots in (policy.budget.least if policy.budget.limited else None, policy.admission.window):
            if slots is not None and slots >= length:
                return f"it keeps {slots} tokens a head, and rows have {length}: nothing would ever go"
        return None
