"""Answer window: the compressed prompt stays; generated tokens live in a sliding window.

Methods that rank the tokens of a prompt (SnapKV, PyramidKV, Scissorhands) do not rank generated tokens, which
would all stay. With a window for these, such a method runs in fixed memory for answers of any length.
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
    """Prompt tokens may outlive the window if the budget keeps them; generated tokens may not.

    When the answer begins, a KV head holds at most its budget, ring included. It holds ``size`` more slots
    once kept tokens of the prompt's end have left the ring.

    Attributes:
      size: W, in tokens.
    """

    name = "answer_window"
    arguments = {"size": Whole(1, "window")}
    shared_verdict = True
    prefill = False
    size: int = 64

    @property
    def window(self) -> int:  # type: ignore[override]
        return self.size

    def admit(self, params: Params | None, observed: Observation) -> Bool[Array, "B 1 T"]:
        return (observed.pos < observed.total[:, None])[:, None, :]


EXAMPLES = (Policy(admission=AnswerWindow(8), budget=Uniform(24), sinks=2),)
