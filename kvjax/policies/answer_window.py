"""Answer window: what a prompt's compression kept stays, what is written later leaves with a window.

Methods that rank the tokens of a prompt (SnapKV, PyramidKV, Scissorhands) say nothing about generated ones,
which would all stay. Here those live in a window, so that such a method runs in fixed memory however long the
answer becomes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvjax.algebra import Admission, Observation, Policy, Whole
from kvjax.budgets.uniform import Uniform
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool


@dataclasses.dataclass(frozen=True, repr=False)
class AnswerWindow(Admission):
    """Prompt tokens may outlive the window, if the budget keeps them; later ones may not.

    A stream holds at most its budget, ring included, when the answer begins, and ``size`` more slots once
    chosen tokens of the prompt's end have left the ring.

    Attributes:
      size: W, in tokens.

    Raises:
      PolicyError: size < 1.
    """

    name = "answer_window"
    arguments = {"size": Whole(1, "window")}
    shared_verdict = True
    prefill = False
    size: int = 64

    @property
    def window(self) -> int:  # type: ignore[override]
        """W."""
        return self.size

    def admit(self, params: Params | None, observed: Observation) -> Bool[Array, "B 1 T"]:
        """Was the token given?"""
        return (observed.pos < observed.total[:, None])[:, None, :]


EXAMPLES = (Policy(admission=AnswerWindow(8), budget=Uniform(24), sinks=2),)
