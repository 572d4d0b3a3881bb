"""Contexts: prompts that were read once and are kept under a name, to be continued as often as one likes."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from kvjax import saving
from kvjax.algebra import Policy
from kvjax.decode import RequestError
from kvjax.engine.errors import ContextExists, ContextMismatch, ContextNotFound, QueueFull
from kvjax.engine.held_context import ContextInfo, HeldContext, read_context
from kvjax.engine.request import LearnedWeights, Request, WeightCache
from kvjax.engine.settings import EngineSettings
from kvjax.engine.ticket import Ticket
from kvjax.types import Weighted
from kvjax.weights import Source

SUFFIX = ".kv"
"""Of the files of contexts."""

MOST_COMING = 4
"""Contexts whose prompts may be read at a time: every text that comes later waits for them."""

RETRY_AFTER = 2.0
"""Seconds after which one of them may be done."""


@dataclasses.dataclass(frozen=True)
class Leaving:
    """Contexts that make room for another: those that go to the host's memory, and those that are dropped."""

    resting: Sequence[HeldContext]
    dropped: Sequence[HeldContext]

    @property
    def bytes(self) -> int:
        """Of the device, that they leave."""
        return sum(context.bytes for context in (*self.resting, *self.dropped))


class Contexts:
    """Contexts by owner and name: ``create``, ``list``, ``get``, ``delete``, ``save``, ``load``. Any thread.

    An owner does not see contexts of others; by default it is "". Their number, their bytes and the time
    for which they stay unused are bounded (``Engine``): a new one takes the place of the longest unused of
    the owner that holds the most. That goes to the host's memory, as long as ``host_memory`` has room, and
    comes back when it is continued.

    Attributes:
      to_host, from_host: how often one has gone there, and come back.
    """

    def __init__(
        self,
        model: Weighted,
        settings: EngineSettings,
        weights: WeightCache,
        submit: Callable[[Sequence[Request], str], Sequence[Ticket]],
    ) -> None:
        self._model, self._settings, self._weights, self._submit = model, settings, weights, submit
        self._lock, self._saving = threading.Lock(), threading.Lock()
        self._held: dict[tuple[str, str], HeldContext] = {}
        self._coming: dict[tuple[str, str], Ticket | None] = {}  # None until it is submitted
        self._dropped: list[Path] = []  # files of those that were dropped
        self.to_host = self.from_host = 0

    def begin(
        self,
        name: str,
        prompt: Sequence[int] | np.ndarray,
        *,
        policy: str | Policy | None = None,
        weights: Mapping[str, Source] | None = None,
        owner: str = "",
        client: str = "",
        deadline: float | None = None,
    ) -> Ticket:
        """Has a prompt read, to be kept; the ticket ends with "length" when it is held.

        Args:
          name: of the context, among those of its owner.
          prompt, policy, weights, client, deadline: as of a ``Request``.
          owner: who may see it and continue it.

        Raises:
          ContextExists: of that name.
          QueueFull: ``MOST_COMING`` are being read, or the engine's queue is full.
          RequestError, PolicyError, WeightsError, Draining, EngineDead: as ``Engine.submit``.
        """
        key = owner, name
        with self._lock:
            self._coming = {k: x for k, x in self._coming.items() if x is None or not x.done}
            if key in self._coming or key in self._held:
                raise ContextExists(
                    f"a context {name!r} is held already. Delete it first, or choose another name."
                )
            if len(self._coming) >= MOST_COMING:
                raise QueueFull(len(self._coming), RETRY_AFTER, "contexts are being read")
            self._coming[key] = None
        request = Request(
            prompt=prompt,
            max_new_tokens=1,
            policy=policy,
            weights=weights,
            owner=owner,
            client=client,
            deadline=deadline,
        )
        try:
            (ticket,) = self._submit([request], name)
        except BaseException:
            with self._lock:
                del self._coming[key]
            raise
        with self._lock:
            self._coming[key] = ticket
        return ticket

    def create(
        self,
        name: str,
        prompt: Sequence[int] | np.ndarray,
        *,
        policy: str | Policy | None = None,
        weights: Mapping[str, Source] | None = None,
        owner: str = "",
        deadline: float | None = None,
    ) -> ContextInfo:
        """``begin``, and blocks until the prompt is read.

        Raises:
          ContextNotFound: it was not read in time.
          MemoryFull: others hold the memory that it takes.
          EngineError, RequestError, PolicyError, WeightsError: as ``begin``.
        """
        ticket = self.begin(name, prompt, policy=policy, weights=weights, owner=owner, deadline=deadline)
        ticket.result()
        return self.get(name, owner)

    def list(self, owner: str = "") -> list[ContextInfo]:
        """All of an owner, by name."""
        return [context.info for context in self._all() if context.owner == owner]

    def get(self, name: str, owner: str = "") -> ContextInfo:
        """One of them.

        Raises:
          ContextNotFound: none of that name.
        """
        return self._get(name, owner).info

    def delete(self, name: str, owner: str = "") -> None:
        """Forgets it; requests that continue it already are not disturbed.

        Raises:
          ContextNotFound: none of that name.
        """
        context = self._get(name, owner)
        with self._lock:
            self._drop(context)

    def expire(self, now: float) -> None:
        """Drops those that nobody used for ``contexts_ttl`` seconds."""
        ttl = self._settings.contexts_ttl
        if ttl is not None and self._held:
            with self._lock:
                for context in [context for context in self._held.values() if now - context.used > ttl]:
                    self._drop(context)

    def save(self, folder: str | Path) -> list[Path]:
        """Writes those that are not in the folder yet, a file each (``kvjax.save``), and removes the files of
        those that were dropped; the files of all.

        Raises:
          OSError: a folder that cannot be written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with self._saving:
            with self._lock:
                dropped, self._dropped = self._dropped, []
                held = sorted(self._held.items())
            for file in dropped:
                file.unlink(missing_ok=True)
            files = []
            for (owner, name), context in held:
                file = folder / f"{urllib.parse.quote(f'{owner}/{name}' if owner else name, safe='')}{SUFFIX}"
                if context.file != file:
                    context.save(file, self._model)
                    with self._lock:
                        if self._held.get((owner, name)) is not context:  # dropped meanwhile
                            self._dropped.append(file)
                files.append(file)
        return files

    def load(
        self,
        folder: str | Path,
        *,
        weights: Mapping[str, Source] | None = None,
        on_skipped: Callable[[Path, Exception], None] | None = None,
    ) -> list[ContextInfo]:
        """Reads all that ``save`` wrote into a folder; those of names that are held already are left out.

        Files that a killed process left unfinished are removed.

        Args:
          folder: where they are; nothing is read where there is none.
          weights: sources of learned weights, by part name, for contexts whose own are gone.
          on_skipped: called with a file that cannot be loaded and the reason; the file stays, and the others
            are loaded. None raises the error of the first.

        Raises:
          StateError: a file that is damaged, newer, or of another model or context, or whose learned weights
            are nowhere.
        """
        for unfinished in Path(folder).glob(f".*{SUFFIX}.*.part"):
            unfinished.unlink(missing_ok=True)
        loaded: list[ContextInfo] = []
        for file in sorted(Path(folder).glob(f"*{SUFFIX}")):
            try:
                context = read_context(file, self._model, self._settings, self._weights, weights or {})
                if self.held(context.name, context.owner) is not None:
                    continue
                if self.leaving(context).dropped:
                    raise saving.StateError(
                        f"context {context.name!r} ({file}) has no place beside those loaded before it. "
                        "Start the engine with more max_contexts, contexts_share or host_memory."
                    )
            except Exception as error:  # of this file alone
                if on_skipped is None:
                    raise
                on_skipped(file, error)
                continue
            self.keep(context)
            loaded.append(context.info)
        return loaded

    # --- the engine's side -----------------------------------------------------------------------

    def held(self, name: str, owner: str = "") -> HeldContext | None:
        """The context of that name."""
        with self._lock:
            return self._held.get((owner, name))

    def leaving(self, new: HeldContext) -> Leaving:
        """Those that make room on the device for one that is new, or rests.

        Raises:
          RequestError: it takes more than all of them together may.
        """
        most = int(self._settings.contexts_share * self._settings.kv_memory)
        if new.size > most:
            raise RequestError(
                f"context {new.name!r} takes {new.size} bytes, and all together may take {most}: "
                f"kv_memory is {self._settings.kv_memory} and contexts_share "
                f"{self._settings.contexts_share}. Raise one of them, or name a policy that keeps less."
            )
        held = [context for context in self._all() if context is not new]
        here, there = ([x for x in held if x.resting == resting] for resting in (False, True))
        resting, dropped = [], []
        while sum(context.bytes for context in here) + new.size > most:
            resting.append(_leaves(here, lambda context: context.size))
        there += resting
        while sum(context.size for context in there) > self._settings.host_memory:
            dropped.append(_leaves(there, lambda context: context.size))
        left = here + there
        while len(left) >= self._settings.max_contexts:
            dropped.append(_leaves(left, lambda context: 1))
        return Leaving([context for context in resting if context not in dropped], dropped)

    def keep(self, context: HeldContext) -> None:
        """Keeps a row that was read, in place of those that make room.

        Raises:
          RequestError: as ``leaving``.
        """
        self._make_room(self.leaving(context))
        with self._lock:
            self._held[context.owner, context.name] = context

    def wake(self, context: HeldContext, room: Callable[[int], bool]) -> None:
        """Brings one that rests back to the device, if there is room for so many bytes more.

        Else it stays, and a row that begins with it is copied from where it is.
        """
        if not context.resting:
            return
        going = self.leaving(context)
        if room(context.size - going.bytes):
            self._make_room(going)
            context.wake()
            self.from_host += 1

    def _make_room(self, going: Leaving) -> None:
        with self._lock:
            for other in going.dropped:
                self._drop(other)
        for other in going.resting:
            other.rest()
            self.to_host += 1

    def _drop(self, context: HeldContext) -> None:
        """Under the lock."""
        if self._held.pop((context.owner, context.name), None) is not None and context.file is not None:
            self._dropped.append(context.file)

    def tokens(self, name: str, owner: str, policy: Policy, learned: LearnedWeights) -> np.ndarray:
        """Of a context that a request under this policy continues.

        Raises:
          ContextNotFound: none of that name.
          ContextMismatch: it was read under another structure, or with other weights.
        """
        context = self._get(name, owner)
        if context.policy.structure != policy.structure or context.learned.label != learned.label:
            raise ContextMismatch(
                f"context {name!r} was read under '{context.policy!r}', and is asked to go on under "
                f"'{policy!r}'. Name a policy that differs from it in hyperparameters alone, and its "
                "weights, or create another context."
            )
        context.used = time.monotonic()
        return context.tokens

    @property
    def allocated(self) -> int:
        """Device bytes of all of them."""
        return sum(context.bytes for context in self._all())

    @property
    def resting(self) -> int:
        """Bytes of those in the host's memory."""
        return sum(context.size for context in self._all() if context.resting)

    def _all(self) -> Sequence[HeldContext]:
        with self._lock:
            return [context for _, context in sorted(self._held.items())]

    def _get(self, name: str, owner: str) -> HeldContext:
        context = self.held(name, owner)
        if context is None:
            raise ContextNotFound(f"no context {name!r} is held. Create it, or list those that are.")
        return context


def _leaves(contexts: list[HeldContext], weight: Callable[[HeldContext], int]) -> HeldContext:
    """Takes out the longest unused one of the owner that has the most."""
    share = collections.Counter[str]()
    for context in contexts:
        share[context.owner] += weight(context)
    owner = max(share, key=share.__getitem__)
    one = min((x for x in contexts if x.owner == owner), key=lambda x: x.used)
    contexts.remove(one)
    return one
