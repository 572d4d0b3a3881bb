"""What all routes share: the model, the engine, the limits, the policies that requests may ask for."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import Request

from kvjax import catalogue
from kvjax.algebra import Policy
from kvjax.cli import InputError
from kvjax.engine import Contexts, Engine, Ticket
from kvjax.loading import LanguageModel
from kvjax.saving import StateError
from kvjax.serve.http.detokenizer import TokenText
from kvjax.serve.http.errors import ApiError, bad_request
from kvjax.serve.http.log import Log
from kvjax.weights import Source, chosen, is_auto, shipped, sources

if TYPE_CHECKING:
    from kvjax.serve.http.arguments import Options

MOST_WATCHED = 64  # requests whose cache can be shown; a newer one replaces the oldest
MOST_AUTO = 64  # auto(...) specifications whose policy is remembered


@dataclasses.dataclass(eq=False, kw_only=True)
class Service:
    """One server.

    Attributes:
      model, engine, options, log: what it serves, and how.
      policies: what requests may ask for.
      name: of the model, for clients.
      token_text: single tokens as text.
      saved_contexts: the copy of held contexts on disk.
      started: seconds since 1970.
      draining: nothing new is taken; running requests may end.
      watched: requests that asked for ``kv_watch``, by id.
    """

    model: LanguageModel
    engine: Engine
    options: Options
    log: Log
    policies: AllowedPolicies
    name: str
    token_text: TokenText
    saved_contexts: SavedContexts
    started: int = dataclasses.field(default_factory=lambda: int(time.time()))
    draining: bool = False
    watched: dict[str, list[Ticket]] = dataclasses.field(default_factory=dict)

    def watch(self, id: str, tickets: list[Ticket]) -> None:
        """Lets ``GET /v1/kv/{id}`` show the caches of a request."""
        self.watched[id] = tickets
        if len(self.watched) > MOST_WATCHED:
            del self.watched[next(iter(self.watched))]

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) unless ``name`` is the served model or None."""
        if name not in (None, self.name):
            message = f"There is no model {name!r} here. Ask for {self.name!r}."
            raise ApiError(404, message, code="model_not_found", param="model")

    def check_open(self) -> None:
        """Raises ApiError (503) while the server shuts down."""
        if self.draining:
            message = "The server is shutting down and takes no new requests. Ask another one."
            headers = {"Retry-After": "5", "Connection": "close"}
            raise ApiError(503, message, code="draining", headers=headers)


def service_of(request: Request) -> Service:
    """The service that the app was made for."""
    service: Service = request.app.state.service
    return service


class AllowedPolicies:
    """Reads ``kv_policy`` and ``kv_weights`` of requests.

    An allowed policy stands for its structure: another budget or threshold compiles nothing and shares its
    running batch. The default's structure is always allowed.

    Attributes:
      default: for requests that name no policy.
      allowed: in one-string form, for messages and the page; None allows all.
    """

    def __init__(
        self, model: LanguageModel, default: str | Policy, allowed: Sequence[str | Policy] | None, log: Log
    ) -> None:
        """Raises PolicyError if ``auto(...)`` has nothing to choose by."""
        self._model, self._log = model, log
        self._choose = functools.lru_cache(MOST_AUTO)(self._choose_and_log)
        self.default = self._read(default)
        policies = [self.default, *(self._read(spec) for spec in allowed or ())]
        self.allowed = None if allowed is None else list(dict.fromkeys(map(repr, policies)))
        self._structures = None if allowed is None else {policy.structure for policy in policies}

    def policy(self, spec: str | None, prompt: int | None = None, answer: int = 0) -> Policy:
        """The policy of a request.

        Args:
          spec: what it asks for.
          prompt, answer: its tokens, for ``auto(64MiB)``.

        Raises:
          PolicyError: one that cannot be built.
          ApiError: 403 for one that is not allowed.
        """
        if spec is None:
            return self.default
        policy = self._read(spec, prompt, answer)
        if self._structures is not None and policy.structure not in self._structures:
            message = f"kv_policy {spec!r} is not among the policies that this server allows, at any budget: "
            message += f"{'; '.join(self.allowed or [])}. Ask for one of them."
            raise ApiError(403, message, code="policy_not_allowed", param="kv_policy")
        return policy

    def _read(self, spec: str | Policy, prompt: int | None = None, answer: int = 0) -> Policy:
        auto = isinstance(spec, str) and is_auto(spec)
        return self._choose(spec, prompt, answer) if auto else catalogue.policy(spec)

    def _choose_and_log(self, spec: str, prompt: int | None, answer: int) -> Policy:
        policy, reason = chosen(spec, self._model, prompt=prompt, answer=answer)
        self._log("note", text=reason)
        return policy

    def weights(self, policy: Policy, names: Mapping[str, str] | None) -> dict[str, str] | None:
        """The learned weights of a request: names of what the model ships; only the operator may name files.

        Raises:
          ApiError: 400 for a name that the model does not ship.
          WeightsError: for a part that the policy does not have, or that learns nothing.
        """
        if names is None:
            return None
        sources(policy, names)
        for part in policy.learned:
            known, name = shipped(self._model, part), names.get(part.name)
            if name is not None and name not in known:
                message = f"kv_weights: the model ships no {name!r} for {part.name}. "
                message += f"Name one of: {', '.join(known) or '(it ships none)'}."
                raise bad_request("kv_weights", message, "invalid_weights")
        return {part.name: names[part.name] for part in policy.learned if part.name in names} or None


class SavedContexts:
    """The copy of the held contexts in a folder, if there is one; they outlive the process. Any thread."""

    def __init__(self, contexts: Contexts, folder: Path | None) -> None:
        self._contexts, self._folder = contexts, folder
        self._lock = threading.Lock()

    def load(self, weights: Mapping[str, Source]) -> int:
        """Loads what an earlier server saved; the number of contexts.

        Args:
          weights: this server's, for contexts whose own weight files are gone.

        Raises:
          InputError: files that are damaged or of another model.
        """
        if self._folder is None or not self._folder.is_dir():
            return 0
        try:
            return len(self._contexts.load(self._folder, weights=weights))
        except (OSError, StateError) as error:
            raise InputError(f"--save-contexts {self._folder}: {error}") from error

    def save(self) -> None:
        if self._folder is not None:
            with self._lock:
                self._contexts.save(self._folder)

    def delete(self, name: str) -> None:
        """Deletes a context and its file. Raises ContextNotFound; OSError if it cannot write the folder."""
        if self._folder is None:
            self._contexts.delete(name)
            return
        with self._lock:
            before: set[Path] = set(self._contexts.save(self._folder))
            self._contexts.delete(name)
            for file in before - set(self._contexts.save(self._folder)):
                file.unlink(missing_ok=True)
