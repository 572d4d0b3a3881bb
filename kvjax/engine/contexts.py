"""Contexts: prompts that were read once and are kept under a name, to be continued as often as one likes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from kvjax import metrics, saving
from kvjax.algebra import Policy
from kvjax.engine.errors import ContextExists, ContextMismatch, ContextNotFound
from kvjax.engine.pages import StoredState, paged
from kvjax.engine.request import LearnedWeights, Request, WeightCache
from kvjax.engine.settings import EngineSettings
from kvjax.engine.ticket import Ticket
from kvjax.types import Weighted
from kvjax.weights import Source, WeightsError

if TYPE_CHECKING:
    from jaxtyping import Array

SUFFIX = ".kv"
"""Of the files of contexts."""


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
    """A row that was read, and what it was read under."""

    policy: Policy  # in the layout of batches
    learned: LearnedWeights
    logits: Array | None  # of the next token, float32 [1, V]


class Contexts:
    """Contexts by name: ``create``, ``list``, ``get``, ``delete``, ``save``, ``load``. Any thread."""

    def __init__(
        self,
        model: Weighted,
        settings: EngineSettings,
        weights: WeightCache,
        submit: Callable[[Request, str], Ticket],
    ) -> None:
        self._model, self._settings, self._weights, self._submit = model, settings, weights, submit
        self._lock = threading.Lock()
        self._held: dict[str, HeldContext] = {}
        self._coming: set[str] = set()

    def create(
        self,
        name: str,
        prompt: Sequence[int] | np.ndarray,
        *,
        policy: str | Policy | None = None,
        weights: Mapping[str, Source] | None = None,
    ) -> ContextInfo:
        """Reads a prompt and keeps it; blocks until it is read.

        Raises:
          ContextExists: of that name.
          RequestError, PolicyError, WeightsError, QueueFull, Draining, EngineDead: as ``Engine.submit``.
        """
        with self._lock:
            if name in self._coming or name in self._held:
                raise ContextExists(
                    f"a context {name!r} is held already. Delete it first, or choose another name."
                )
            self._coming.add(name)
        try:
            request = Request(prompt=prompt, max_new_tokens=1, policy=policy, weights=weights)
            self._submit(request, name).result()
        finally:
            with self._lock:
                self._coming.discard(name)
        return self.get(name)

    def list(self) -> list[ContextInfo]:
        """All of them, by name."""
        return [_info(name, context) for name, context in self._all()]

    def get(self, name: str) -> ContextInfo:
        """One of them.

        Raises:
          ContextNotFound: none of that name.
        """
        return _info(name, self._get(name))

    def delete(self, name: str) -> None:
        """Forgets it; requests that continue it already are not disturbed.

        Raises:
          ContextNotFound: none of that name.
        """
        with self._lock:
            context = self._held.pop(name, None)
        if context is None:
            raise self._missing(name)

    def save(self, folder: str | Path) -> list[Path]:
        """Writes all of them into a folder, a file each (``kvjax.save``); the files.

        Raises:
          OSError: a folder that cannot be written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        for name, context in self._all():
            file = folder / f"{urllib.parse.quote(name, safe='')}{SUFFIX}"
            saving.save(
                context.state,
                file,
                model=self._model,
                policy=context.policy,
                label=context.learned.label,
                extra={"tokens": np.asarray(context.tokens), "logits": np.asarray(context.logits)},
                notes={"name": name, "sources": json.dumps(dict(context.learned.sources))},
            )
            files.append(file)
        return files

    def load(self, folder: str | Path, *, weights: Mapping[str, Source] | None = None) -> list[ContextInfo]:
        """Reads all that ``save`` wrote into a folder; those of names that are held already are left out.

        Args:
          folder: where they are; nothing is read where there is none.
          weights: sources of learned weights, by part name, for contexts whose own are gone.

        Raises:
          StateError: a file that is damaged, newer, or of another model or context, or whose learned weights
            are nowhere.
        """
        loaded = []
        for file in sorted(Path(folder).glob(f"*{SUFFIX}")):
            saved = saving.open(file, model=self._model, most_bytes=self._settings.kv_memory)
            name = saved.notes.get("name")
            if name is None:
                raise saving.StateError(
                    f"{file} holds a state, and no context that an engine saved. Put it elsewhere."
                )
            if saved.state.context != self._settings.context:
                raise saving.StateError(
                    f"context {name!r} ({file}) was read in rows of {saved.state.context} tokens, here they "
                    f"have {self._settings.context}. Start the engine with that context, or delete the file."
                )
            learned = self._saved_weights(saved, weights or {})
            if learned is None:
                raise saving.StateError(
                    f"context {name!r} ({file}) was read with the learned weights {saved.label}, which are "
                    "neither where they were nor among those given. Start the engine with them, or delete "
                    "the file."
                )
            if self.held(name) is not None:
                continue
            context = HeldContext(
                tokens=saved.extra["tokens"],
                policy=paged(saved.policy, self._settings.context),
                learned=learned,
                state=dataclasses.replace(saved.state, chunk=self._settings.chunk),
                logits=jax.device_put(saved.extra["logits"]),
            )
            self.keep(name, context)
            loaded.append(self.get(name))
        return loaded

    def _saved_weights(self, saved: saving.Saved, weights: Mapping[str, Source]) -> LearnedWeights | None:
        """The weights that a saved context was read with; None where they are nowhere."""
        names = {part.name for part in saved.policy.learned}
        named = {name: source for name, source in weights.items() if name in names}
        for sources in (json.loads(saved.notes.get("sources", "{}")), named, {}):
            with contextlib.suppress(WeightsError):
                learned = self._weights.get(saved.policy, sources)
                if learned.label == saved.label:
                    return learned
        return None

    # --- the engine's side -----------------------------------------------------------------------

    def held(self, name: str) -> HeldContext | None:
        """The context of that name."""
        with self._lock:
            return self._held.get(name)

    def keep(self, name: str, context: HeldContext) -> None:
        """Keeps a row that was read."""
        with self._lock:
            self._held[name] = context

    def tokens(self, name: str, policy: Policy, learned: LearnedWeights) -> np.ndarray:
        """Of a context that a request under this policy continues.

        Raises:
          ContextNotFound: none of that name.
          ContextMismatch: it was read under another structure, or with other weights.
        """
        context = self._get(name)
        if context.policy.structure != policy.structure or context.learned.label != learned.label:
            raise ContextMismatch(
                f"context {name!r} was read under '{context.policy!r}', and is asked to go on under "
                f"'{policy!r}'. Name a policy that differs from it in hyperparameters alone, and its "
                "weights, or create another context."
            )
        return context.tokens

    @property
    def allocated(self) -> int:
        """Device bytes of all of them."""
        return sum(context.bytes for _, context in self._all())

    def _all(self) -> Sequence[tuple[str, HeldContext]]:
        with self._lock:
            return sorted(self._held.items(), key=lambda item: item[0])

    def _get(self, name: str) -> HeldContext:
        context = self.held(name)
        if context is None:
            raise self._missing(name)
        return context

    def _missing(self, name: str) -> ContextNotFound:
        names = ", ".join(name for name, _ in self._all())
        there = f"There are {names}." if names else "There are none; create one."
        return ContextNotFound(f"no context {name!r} is held. {there}")


def _info(name: str, context: HeldContext) -> ContextInfo:
    size = metrics.nbytes(context.state).total
    return ContextInfo(
        name=name,
        tokens=len(context.tokens),
        policy=repr(context.policy),
        live=size["live"],
        allocated=size["allocated"],
    )
