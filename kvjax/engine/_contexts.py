"""Contexts: prompts that were read once and are kept under a name, to be continued as often as one likes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from kvjax import metrics, saving
from kvjax.algebra import Policy
from kvjax.engine._check import Learned, Shelf
from kvjax.engine._errors import ContextExists, ContextMismatch, ContextNotFound
from kvjax.engine._layout import paged
from kvjax.engine._request import Request
from kvjax.engine._settings import Settings
from kvjax.engine._store import Kept, Store
from kvjax.engine._ticket import Ticket
from kvjax.types import Weighted
from kvjax.weights import Source, WeightsError

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


class Contexts:
    """Contexts by name: ``create``, ``list``, ``get``, ``delete``, ``save``, ``load``. Any thread."""

    def __init__(
        self,
        model: Weighted,
        settings: Settings,
        shelf: Shelf,
        read: Callable[[Request, str], Ticket],
        store: Store,
    ) -> None:
        self._model, self._settings, self._shelf = model, settings, shelf
        self._read, self._store = read, store
        self._lock = threading.Lock()
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
            if name in self._coming or self._store.get(name) is not None:
                raise ContextExists(
                    f"a context {name!r} is held already. Delete it first, or choose another name."
                )
            self._coming.add(name)
        try:
            self._read(
                Request(prompt=prompt, max_new_tokens=1, policy=policy, weights=weights), name
            ).result()
        finally:
            with self._lock:
                self._coming.discard(name)
        return self.get(name)

    def list(self) -> list[ContextInfo]:
        """All of them, by name."""
        kept = {name: self._store.get(name) for name in self._store.names()}
        return [_info(name, one) for name, one in kept.items() if one is not None]

    def get(self, name: str) -> ContextInfo:
        """One of them.

        Raises:
          ContextNotFound: none of that name.
        """
        return _info(name, self._of(name))

    def delete(self, name: str) -> None:
        """Forgets it; requests that continue it already are not disturbed.

        Raises:
          ContextNotFound: none of that name.
        """
        if not self._store.drop(name):
            raise self._missing(name)

    def save(self, folder: str | Path) -> list[Path]:
        """Writes all of them into a folder, a file each (``kvjax.save``); the files.

        Raises:
          OSError: a folder that cannot be written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        for name in self._store.names():
            kept = self._store.get(name)
            if kept is None:
                continue
            file = folder / f"{urllib.parse.quote(name, safe='')}{SUFFIX}"
            extra = {"tokens": np.asarray(kept.tokens), "logits": np.asarray(kept.logits)}
            label = kept.learned.label
            notes = {"name": name, "sources": json.dumps(dict(kept.learned.sources))}
            saving.save(
                kept.state, file, model=self._model, policy=kept.policy, label=label, extra=extra, notes=notes
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
        found = []
        for file in sorted(Path(folder).glob(f"*{SUFFIX}")):
            saved = saving.open(file, model=self._model)
            policy, name = saved.policy, saved.notes.get("name")
            if name is None:
                raise saving.StateError(
                    f"{file} holds a state, and no context that an engine saved. Put it elsewhere."
                )
            if saved.state.context != self._settings.context:
                raise saving.StateError(
                    f"context {name!r} ({file}) was read in rows of {saved.state.context} tokens, here they "
                    f"have {self._settings.context}. Start the engine with that context, or delete the file."
                )
            learned = self._learned(saved, weights or {})
            if learned is None:
                raise saving.StateError(
                    f"context {name!r} ({file}) was read with the learned weights {saved.label}, which are "
                    "neither where they were nor among those given. Start the engine with them, or delete "
                    "the file."
                )
            if self._store.get(name) is not None:
                continue
            state = dataclasses.replace(saved.state, chunk=self._settings.chunk)
            logits, tokens = jax.device_put(saved.extra["logits"]), saved.extra["tokens"]
            self._store.put(name, tokens, paged(policy, self._settings.context), learned, state, logits)
            found.append(self.get(name))
        return found

    def _learned(self, saved: saving.Saved, weights: Mapping[str, Source]) -> Learned | None:
        """The weights that a saved context was read with; None where they are nowhere."""
        names = {part.name for part in saved.policy.learned}
        given = {name: source for name, source in weights.items() if name in names}
        for ways in (json.loads(saved.notes.get("sources", "{}")), given, {}):
            with contextlib.suppress(WeightsError):
                found = self._shelf.get(saved.policy, ways)
                if found.label == saved.label:
                    return found
        return None

    def learned(self, name: str, policy: Policy) -> Learned | None:
        """The weights a context was read with, where they serve this policy; else None."""
        kept = self._store.get(name)
        return kept.learned if kept is not None and kept.policy.structure == policy.structure else None

    def tokens(self, name: str, policy: Policy, learned: Learned) -> np.ndarray:
        """Of a context that a request under this policy continues.

        Raises:
          ContextNotFound: none of that name.
          ContextMismatch: it was read under another structure, or with other weights.
        """
        kept = self._of(name)
        if kept.policy.structure != policy.structure or kept.learned.label != learned.label:
            raise ContextMismatch(
                f"context {name!r} was read under '{kept.policy!r}', and is asked to go on under "
                f"'{policy!r}'. Name a policy that differs from it in dials alone, and its weights, or "
                "create another context."
            )
        return kept.tokens

    def _of(self, name: str) -> Kept:
        found = self._store.get(name)
        if found is None:
            raise self._missing(name)
        return found

    def _missing(self, name: str) -> ContextNotFound:
        names = self._store.names()
        there = f"There are {', '.join(names)}." if names else "There are none; create one."
        return ContextNotFound(f"no context {name!r} is held. {there}")


def _info(name: str, kept: Kept) -> ContextInfo:
    held = metrics.nbytes(kept.state).total
    return ContextInfo(
        name=name,
        tokens=len(kept.tokens),
        policy=repr(kept.policy),
        live=held["live"],
        allocated=held["allocated"],
    )
