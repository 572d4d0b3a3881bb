"""StreamingLLM: attention sinks and a sliding window.

Xiao et al., Efficient Streaming Language Models with Attention Sinks, https://arxiv.org/abs/2309.17453. Keys
keep the rotation of their true positions (the paper rotates them by their positions inside the cache).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Admission, Observation, Policy, Switch, Whole
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool


@dataclasses.dataclass(frozen=True, repr=False)
class Window(Admission):
    """Exact attention to the newest ``size`` tokens; only the policy's sinks outlive them.

    Attributes:
      size: W, in tokens.
      prefill: the prompt is read through the window, too; False reads it with full attention and applies the
        window to the cache afterwards.
    """

    name = "window"
    arguments = {"size": Whole(1, "window"), "prefill": Switch()}
    sizes = ("size",)
    rejects_all = True
    shared_verdict = True
    size: int = 256
    prefill: bool = True

    @property
    def window(self) -> int:  # type: ignore[override]
        return self.size

    def admit(self, params: Params | None, observed: Observation) -> Bool[Array, "B K T"]:
        return jnp.zeros((observed.pos.shape[0], 1, observed.pos.shape[1]), bool)


PRESETS = {"streaming-llm": "window(256) + sinks(4)"}

EXAMPLES = (Policy(admission=Window(24), sinks=4), Policy(admission=Window(24)))
