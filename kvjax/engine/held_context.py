"""A prompt that was read once and is kept under a name: on the device, in the host's memory, in a file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from kvjax import metrics, saving
from kvjax.algebra import Policy
from kvjax.engine.pages import StoredState, paged
from kvjax.engine.request import LearnedWeights, WeightCache
from kvjax.engine.settings import EngineSettings
from kvjax.types import Weighted
from kvjax.weights import Source, WeightsError

if TYPE_CHECKING:
    from jaxtyping import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextInfo:
    """A held context.

    Attributes:
      name: of it.
      tokens: how many it has seen.
      policy: it was read under, in one-string form.
      live, allocated: bytes.
    """

    name: str
    tokens: int
    policy: str
    live: int
    allocated: int


@dataclasses.dataclass(eq=False, kw_only=True)
class HeldContext(StoredState):
    """A row that was read, and what it was read under.

    Attributes:
      used: when it was last continued, by ``time.monotonic``.
      file: where it is saved; None while it is nowhere.
      resting: its arrays lie in the host's memory, in NumPy; ``bytes`` of the device are then 0.
    """

    name: str
    owner: str
    policy: Policy  # in the layout of batches
    learned: LearnedWeights
    logits: Array | None  # of the next token, float32 [1, V]
    used: float = dataclasses.field(default_factory=time.monotonic)
    file: Path | None = None
    resting: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.state is not None
        size = metrics.nbytes(self.state).total
        self.info = ContextInfo(
            name=self.name,
            tokens=len(self.tokens),
            policy=repr(self.policy),
            live=size["live"],
            allocated=size["allocated"],
        )
        self.size = self.bytes  # in whichever memory

    def rest(self) -> None:
        """To the host's memory."""
        self.state, self.bytes, self.resting = jax.device_get(self.state), 0, True

    def wake(self) -> None:
        """Back to the device."""
        self.state, self.bytes, self.resting = jax.device_put(self.state), self.size, False

    def save(self, file: Path, model: Weighted) -> None:
        """Writes it (``kvjax.save``); raises OSError where that fails."""
        assert self.state is not None
        saving.save(
            dataclasses.replace(self.state, structure=self.policy.structure),
            file,
            model=model,
            policy=self.policy,
            label=self.learned.label,
            extra={"tokens": np.asarray(self.tokens), "logits": np.asarray(self.logits)},
            notes={
                "name": self.name,
                "owner": self.owner,
                "sources": json.dumps(dict(self.learned.sources)),
            },
        )
        self.file = file


def read_context(
    file: Path, model: Weighted, settings: EngineSettings, weights: WeightCache, sources: Mapping[str, Source]
) -> HeldContext:
    """What ``HeldContext.save`` wrote.

    Args:
      file: of it.
      model, settings, weights: the engine's.
      sources: of learned weights, by part name, where its own are gone.

    Raises:
      StateError: a file that is damaged, newer, or of another model or context, or whose learned weights are
        nowhere.
    """
    saved = saving.open(file, model=model, most_bytes=settings.kv_memory)
    name = saved.notes.get("name")
    if name is None:
        raise saving.StateError(
            f"{file} holds a state, and no context that an engine saved. Put it elsewhere."
        )
    if saved.state.context != settings.context:
        raise saving.StateError(
            f"context {name!r} ({file}) was read in rows of {saved.state.context} tokens, here they "
            f"have {settings.context}. Start the engine with that context, or delete the file."
        )
    learned = _saved_weights(saved, weights, sources)
    if learned is None:
        raise saving.StateError(
            f"context {name!r} ({file}) was read with the learned weights {saved.label}, which are "
            "neither where they were nor among those given. Start the engine with them, or delete "
            "the file."
        )
    return HeldContext(
        name=name,
        owner=saved.notes.get("owner", ""),
        tokens=saved.extra["tokens"],
        policy=paged(saved.policy, settings.context),
        learned=learned,
        state=dataclasses.replace(
            saved.state, chunk=settings.chunk, structure=saved.policy.after_prompt.structure
        ),
        logits=jax.device_put(saved.extra["logits"]),
        file=file,
    )


def _saved_weights(
    saved: saving.Saved, weights: WeightCache, sources: Mapping[str, Source]
) -> LearnedWeights | None:
    """The weights that a saved context was read with; None where they are nowhere."""
    names = {part.name for part in saved.policy.learned}
    named = {name: source for name, source in sources.items() if name in names}
    for these in (json.loads(saved.notes.get("sources", "{}")), named, {}):
        with contextlib.suppress(WeightsError):
            learned = weights.get(saved.policy, these)
            if learned.label == saved.label:
                return learned
    return None
