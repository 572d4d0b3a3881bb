"""What all routes share: the model, the engine, how bodies are read, what clients may take and ask for."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from kvjax import catalogue, decode
from kvjax.algebra import Policy, PolicyError
from kvjax.engine import MOST_BIASES, Contexts, Engine, Ticket
from kvjax.grammar import Grammars
from kvjax.loading import LanguageModel
from kvjax.serve.http.detokenizer import TokenText
from kvjax.serve.http.errors import ApiError, bad_request, too_many
from kvjax.serve.http.log import Log
from kvjax.weights import Source, chosen, is_auto, shipped, sources

if TYPE_CHECKING:
    from kvjax.serve.http.arguments import Options

BYTES_PER_TOKEN = 64  # of a body, where --max-body does not say how large one may be
LEAST_BODY = 2**18  # bytes that are always allowed then
SMALL_BODY = 2**16  # bytes that are parsed at once, and taken beside any number of large bodies
MOST_FIELDS = MOST_BIASES  # of an object in a body
MOST_OBJECTS = 2**14  # and lists in a body: messages, their parts

MOST_WATCHED = 64  # requests whose cache can be shown; a newer one replaces the oldest
MOST_AUTO = 64  # auto(...) specifications whose policy is remembered
MOST_CLIENTS = 4096  # whose shares are remembered; a newer one replaces the longest unseen


@dataclasses.dataclass(eq=False, kw_only=True)
class Service:
    """One server.

    Attributes:
      model, engine, options, log: what it serves, and how.
      policies: what requests may ask for.
      name: of the model, for clients.
      token_text: single tokens as text.
      clients: what each client took.
      saved_contexts: the copy of held contexts on disk.
      started: seconds since 1970.
      draining: nothing new is taken; running requests may end.
      warm: what --warm-up names is compiled, or failed.
      watched: requests that asked for ``kv_watch``, by id.
      noted_fields: fields of bodies that were ignored.
      responses: how many there were, by method, route and status.
    """

    model: LanguageModel
    engine: Engine
    options: Options
    log: Log
    policies: AllowedPolicies
    name: str
    token_text: TokenText
    clients: Clients
    saved_contexts: SavedContexts
    started: int = dataclasses.field(default_factory=lambda: int(time.time()))
    draining: bool = False
    warm: bool = False
    watched: dict[str, list[Ticket]] = dataclasses.field(default_factory=dict)
    noted_fields: set[str] = dataclasses.field(default_factory=set)
    responses: collections.Counter[tuple[str, str, str]] = dataclasses.field(
        default_factory=collections.Counter
    )

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Of answers, for the model's vocabulary."""
        return Grammars(self.model.text, self.model.params["embed"].shape[0])

    @property
    def health(self) -> str:
        """Of the engine, but "draining" and "loading" as the server sees it."""
        if self.draining:
            return "draining"
        loading = self.engine.health == "ready" and self.options.warm_up and not self.warm
        return "loading" if loading else self.engine.health

    @property
    def max_body(self) -> int:
        """Bytes of a body."""
        return self.options.max_body or max(LEAST_BODY, BYTES_PER_TOKEN * self.engine.context)

    @functools.cached_property
    def most_characters(self) -> int:
        """Characters of a text that may fit: a longer one has too many tokens, whatever it says."""
        return self.engine.context * max(map(len, self.model.text.tokenizer.get_vocab()))

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


# --- bodies --------------------------------------------------------------------------------------


class JsonRoute(APIRoute):
    """A route whose body's JSON is parsed beside the event loop, and bounded before it is validated."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class _JsonRequest(Request):
    async def json(self) -> Any:
        body, most = await self.body(), max(service_of(self).engine.context, MOST_FIELDS)
        if len(body) <= SMALL_BODY:
            return read_json(body, most)
        return await asyncio.to_thread(read_json, body, most)


def read_json(body: bytes, most: int) -> Any:
    """The values of a body.

    Args:
      body: JSON.
      most: elements that a list may have.

    Raises:
      ApiError: the body is not JSON, has too many lists and objects, or one is too long.
    """
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError:
        message = "The body is not JSON. Send one JSON object."
        raise ApiError(400, message, code="invalid_json") from None
    inside = [content]
    for value in inside:  # which grows
        if isinstance(value, list) and len(value) > most:
            message = (
                f"A list in the body has {len(value)} elements, more than the {most} allowed. Shorten it."
            )
            raise ApiError(400, message, code="context_length_exceeded")
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            message = f"An object in the body has {len(value)} fields, more than {MOST_FIELDS}. Send fewer."
            raise ApiError(400, message, code="too_many_fields")
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        inside += [element for element in inner if isinstance(element, list | dict)]
        if len(inside) > MOST_OBJECTS:
            message = f"The body has more than {MOST_OBJECTS} lists and objects. Join parts and messages."
            raise ApiError(400, message, code="too_many_objects")
    return content


# --- clients -------------------------------------------------------------------------------------


class Clients:
    """What each client may take: so many requests and tokens a minute, texts that wait; 0 is any number.

    Any thread.
    """

    def __init__(self, requests: int = 0, waiting: int = 0, tokens: int = 0) -> None:
        self.most_waiting = waiting
        self._most = {"requests": requests, "tokens": tokens}
        self._lock = threading.Lock()
        self._seen: collections.OrderedDict[str, _Client] = collections.OrderedDict()

    def count_request(self, client: str) -> None:
        """Raises ApiError (429) if the client has no request or no token left."""
        with self._lock:
            meters = self._client(client).meters
            for what, meter in meters.items():
                if seconds := meter.wait():
                    message = (
                        f"A client may take {meter.most} {what} a minute here (--client-{what}), and these "
                    )
                    message += f"are taken. Ask again in {seconds:.0f} s."
                    raise too_many(message, seconds, f"too_many_{what}")
            if "requests" in meters:
                meters["requests"].take(1)

    def submit(self, client: str, texts: int, submit: Callable[[], list[Ticket]]) -> list[Ticket]:
        """What ``submit`` gives, if so many more texts of the client may wait.

        Raises:
          ApiError: 429; or what ``submit`` raises.
        """
        with self._lock:
            own = self._client(client)
            own.tickets = [x for x in own.tickets if not x.done and x.usage.first_token is None]
            waiting = len(own.tickets) + own.coming
            if 0 < self.most_waiting < waiting + texts:
                message = (
                    f"{waiting} texts of this client wait, and {self.most_waiting} may (--client-waiting). "
                )
                raise too_many(message + "Ask again soon.", 1.0, "too_many_waiting")
            own.coming += texts
        tickets: list[Ticket] = []
        try:
            tickets = submit()
        finally:
            with self._lock:
                own.coming -= texts
                own.tickets += tickets
        return tickets

    def count_tokens(self, client: str, tokens: int) -> None:
        """Counts tokens that were read or written for a client."""
        with self._lock:
            meters = self._client(client).meters
            if "tokens" in meters:
                meters["tokens"].take(tokens)

    def _client(self, name: str) -> _Client:
        if name not in self._seen:
            self._seen[name] = _Client({what: _Meter(most) for what, most in self._most.items() if most})
        self._seen.move_to_end(name)
        if len(self._seen) > MOST_CLIENTS:
            self._seen.popitem(last=False)
        return self._seen[name]


@dataclasses.dataclass(eq=False)
class _Client:
    meters: dict[str, _Meter]
    tickets: list[Ticket] = dataclasses.field(default_factory=list)  # that may still wait
    coming: int = 0  # texts that are being submitted


class _Meter:
    """So much a minute: what is taken comes back steadily. What is counted late may leave a debt."""

    def __init__(self, most: int) -> None:
        self.most, self._left, self._counted = most, float(most), time.monotonic()

    def wait(self) -> float:
        """Seconds until one may be taken; 0 if now."""
        self._refill()
        return max(0.0, (1 - self._left) * 60 / self.most)

    def take(self, many: int) -> None:
        self._refill()
        self._left -= many

    def _refill(self) -> None:
        now = time.monotonic()
        self._left = min(self.most, self._left + (now - self._counted) * self.most / 60)
        self._counted = now


# --- policies ------------------------------------------------------------------------------------


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

    def policy(
        self,
        spec: str | Policy | None,
        prompt: int | None = None,
        answer: int = 0,
        draft: str | None = None,
    ) -> Policy:
        """The policy of a request.

        Args:
          spec: what it asks for.
          prompt, answer: its tokens, for ``auto(64MiB)``.
          draft: ``kv_draft``, which is allowed where the policy with this draft is.

        Raises:
          PolicyError: one that cannot be built.
          ApiError: 400 for a draft that is none, 403 for what is not allowed.
        """
        if spec is None and draft is None:
            return self.default
        policy = self.default if spec is None else self._read(spec, prompt, answer)
        asked, field = (spec, "kv_policy") if draft is None else (draft, "kv_draft")
        try:
            policy = decode.with_draft(policy, draft)
        except PolicyError as error:
            raise bad_request(field, str(error), "invalid_policy") from error
        if self._structures is not None and policy.structure not in self._structures:
            message = (
                f"{field} {str(asked)!r} is not among the policies that this server allows, at any budget: "
            )
            message += f"{'; '.join(self.allowed or [])}. Ask for one of them."
            raise ApiError(403, message, code="policy_not_allowed", param=field)
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


# --- contexts on disk ----------------------------------------------------------------------------


class SavedContexts:
    """The copy of the held contexts in a folder, if there is one; they outlive the process. Any thread."""

    def __init__(self, contexts: Contexts, folder: Path | None, log: Log) -> None:
        self._contexts, self._folder, self._log = contexts, folder, log

    def load(self, weights: Mapping[str, Source]) -> int:
        """Loads what an earlier server saved, and logs which files it cannot; the number of contexts.

        Args:
          weights: this server's, for contexts whose own weight files are gone.
        """
        if self._folder is None:
            return 0

        def skipped(file: Path, error: Exception) -> None:
            self._log.fault("context_skipped", error, file=str(file))

        return len(self._contexts.load(self._folder, weights=weights, on_skipped=skipped))

    def save(self) -> None:
        """Writes what is new, and removes what was dropped."""
        if self._folder is not None:
            self._contexts.save(self._folder)
