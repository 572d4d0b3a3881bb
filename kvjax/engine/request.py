"""What is asked of the engine and what comes back; the checks of a request and its learned weights."""

from __future__ import annotations

import dataclasses
import json
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from kvjax import decode
from kvjax.algebra import Policy, Selection
from kvjax.decode import RequestError
from kvjax.sharding.mesh import mesh_of
from kvjax.types import Params, Weighted
from kvjax.weights import VALUES, Source, find, shipped, sources

if TYPE_CHECKING:
    from jaxtyping import UInt

MOST_LOGPROBS = 20
"""Most alternatives of a token whose log-probabilities can be asked for."""

MOST_STOPS = 16
"""Most token ids that end a text."""

MOST_BIASES = 300
"""Most token ids whose logits a request may change, as in OpenAI's protocol."""

STAGES = ("waiting", "compiling", "reading", "writing", "done")
"""Of a request: for a row or pages, for its programs, its prompt, its text, its end."""

FINISHES = ("stop", "length", "cancelled", "deadline")
"""Why a text ended: an end token, ``max_new_tokens``, ``Ticket.cancel``, ``Request.deadline``."""


class Guide(Protocol):
    """Which tokens a text may go on with: a grammar, on its way through one text. One thread."""

    @property
    def done(self) -> bool:
        """May nothing follow?"""

    @property
    def error(self) -> str:
        """What went wrong; "" while nothing did."""

    def allowed(self) -> UInt[np.ndarray, " W"]:
        """Which tokens may come next, a bit each, 32 in a word, the lowest first."""

    def take(self, token: int) -> None:
        """The text goes on with this token, which was allowed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One text to be continued.

    Attributes:
      prompt: token ids as the model reads them (BOS included); at least one, or what follows ``context``.
      max_new_tokens: most new tokens; 0 only with ``echo``.
      temperature, top_k, top_p: as in ``kvjax.sampling``; temperature 0 is greedy.
      min_p, frequency_penalty, presence_penalty, repetition_penalty: as in ``kvjax.sampling``.
      logit_bias: what is added to the logits of at most ``MOST_BIASES`` tokens, by id.
      min_tokens: new tokens before one that ends the text may be drawn.
      seed, draw: name the draws. Equal requests with equal seed and draw give equal texts; the n texts of one
        question have draws 0 … n - 1.
      logprobs: None for none; 0 for each token's own; n for those of the n likeliest tokens too (at most
        ``MOST_LOGPROBS``). Of the model's distribution, before temperature and truncation.
      echo: first an event for each prompt token (``Event.prompt``), with logprobs where they are asked for.
      ignore_eos: the model's own end tokens do not end the text.
      stop_tokens: further token ids that do.
      policy: what the cache keeps, in one-string form or as a value; None is the engine's default.
      draft: a selection that drafts for that policy, as of ``kvjax.generate``; the text stays what it is. A
        row with a ``guide`` is written without.
      weights: sources of learned weights by part name, as of ``kvjax.weights_for``; None: those that
        ``context`` was read with, else those the engine was given, else what the model ships.
      deadline: seconds after ``submit`` at which the request ends wherever it is.
      context: name of a held context that the prompt continues (a fork of it; the context stays).
      owner: whose contexts it may continue, as ``Contexts.create`` was told; those of others are not there,
        nor beginnings of prompts that others had read: how soon an answer comes tells nothing of them.
      inspect: ``Engine.inspect`` still answers once the text has ended, with what the row held then.
      client: who asks, for what clients share fairly: compilations.
      guide: makes what says which tokens of one text may come; None: all. Log-probabilities stay the model's.
    """

    prompt: Sequence[int] | np.ndarray
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    seed: int = 0
    draw: int = 0
    logprobs: int | None = None
    echo: bool = False
    ignore_eos: bool = False
    stop_tokens: tuple[int, ...] = ()
    policy: str | Policy | None = None
    draft: str | Selection | None = None
    weights: Mapping[str, Source] | None = None
    deadline: float | None = None
    context: str | None = None
    owner: str = ""
    inspect: bool = False
    client: str = ""
    guide: Callable[[], Guide] | None = None


@dataclasses.dataclass(frozen=True)
class Event:
    """One token, or the end of a text, or both.

    Attributes:
      token: its id; None for an end that brings no token (cancelled, deadline, ``max_new_tokens=0``).
      logprob: the model's log-probability of the token; None where not asked for, and for the first token of
        a prompt.
      top_logprobs: (token id, log-probability) of the likeliest tokens there, best first.
      finish_reason: one of ``FINISHES`` on the last event, else None. An end token is part of the tokens: the
        event with "stop" carries it.
      prompt: the token is one of the prompt's (``Request.echo``).
    """

    token: int | None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None
    prompt: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVUsage:
    """What a request's row holds, at its end or now.

    Attributes:
      seen: tokens the row was fed.
      kept: live slots of a KV head, the mean over layers and heads.
      live: bytes of all live slots of the row, with scales, metadata and φ.
      full: bytes a cache that keeps everything would hold for ``seen`` tokens, keys and values alone.
      layers: live slots, int [L, K].
    """

    seen: int
    kept: float
    live: int
    full: int
    layers: np.ndarray


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a request is.

    Attributes:
      stage: one of ``STAGES``.
      read: prompt tokens that are read; of a prompt that is read as a whole each layer counts as its share.
    """

    stage: str
    read: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What a request took.

    Attributes:
      prompt_tokens: tokens of the prompt, those of a held context included.
      cached_tokens: of these, how many were not read anew (context, shared prefix).
      completion_tokens: new tokens so far.
      drafted_tokens, accepted_tokens: drafted so far, and of these accepted; 0 without a draft.
      preempted: how often its row had to make room for others and was read again.
      first_token: seconds from ``submit`` to the first new token; None before it.
      total: seconds from ``submit`` to the end, or to now.
      kv: None before the prompt is read.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preempted: int
    first_token: float | None
    total: float
    kv: KVUsage | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldPositions:
    """What one KV head of a row holds: positions of its live slots, ascending.

    Attributes:
      ring: in the window, exact.
      pages: in pages, in the model's own dtype.
      codes: in pages, as INT8 or INT4 codes.
    """

    ring: np.ndarray
    pages: np.ndarray
    codes: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """The cache of one row as it is, read from the device between two programs.

    Attributes:
      seen: tokens the row was fed; positions run from 0 to seen - 1.
      tokens: their ids.
      heads: ``heads[layer][head]``.
      completed: does a φ summary stand for what a head of the layer does not hold? One bool a layer.
      live, full: bytes, as in ``KVUsage``.
      allocated: bytes of the row's batch on the device (all its rows share its pools).
    """

    seen: int
    tokens: np.ndarray
    heads: tuple[tuple[HeldPositions, ...], ...]
    completed: tuple[bool, ...]
    live: int
    full: int
    allocated: int


# --- checks --------------------------------------------------------------------------------------


def check_numbers(request: Request) -> None:
    """Refuses numbers out of range.

    Raises:
      RequestError: naming the field, the rule and the way out.
    """
    least = 0 if request.echo else 1
    rules = (
        ("max_new_tokens", _whole(request.max_new_tokens, least), f"a whole number, {least} or more"),
        ("temperature", _number(request.temperature, 0, math.inf), "a number, 0 (greedy) or more"),
        ("top_k", _whole(request.top_k, 0), "a whole number, 0 (all) or more"),
        ("top_p", _number(request.top_p, 0, 1) and request.top_p > 0, "a number above 0, at most 1"),
        ("min_p", _number(request.min_p, 0, 1), "a number from 0 (all) to 1"),
        ("frequency_penalty", _number(request.frequency_penalty), "a finite number"),
        ("presence_penalty", _number(request.presence_penalty), "a finite number"),
        (
            "repetition_penalty",
            _number(request.repetition_penalty, 0) and request.repetition_penalty > 0,
            "a number above 0 (1 changes nothing)",
        ),
        (
            "logit_bias",
            len(request.logit_bias or {}) <= MOST_BIASES
            and all(_whole(id, 0) and _number(bias) for id, bias in (request.logit_bias or {}).items()),
            f"finite numbers for at most {MOST_BIASES} token ids",
        ),
        (
            "min_tokens",
            _whole(request.min_tokens, 0, request.max_new_tokens),
            "a whole number from 0 to max_new_tokens",
        ),
        ("seed", _whole(request.seed, 0, 2**32 - 1), "a whole number from 0 to 2**32 - 1"),
        ("draw", _whole(request.draw, 0, 2**31 - 1), "a whole number from 0 to 2**31 - 1"),
        (
            "logprobs",
            request.logprobs is None or _whole(request.logprobs, 0, MOST_LOGPROBS),
            f"None, or a whole number from 0 to {MOST_LOGPROBS}",
        ),
        (
            "deadline",
            request.deadline is None or _number(request.deadline, 0, math.inf) and request.deadline > 0,
            "None, or seconds above 0",
        ),
        ("stop_tokens", all(_whole(x, 0) for x in request.stop_tokens), "token ids"),
    )
    for name, good, rule in rules:
        if not good:
            raise RequestError(f"Request({name}={getattr(request, name)!r}) is out of range. Give {rule}.")
    if request.guide is not None and request.min_tokens:
        raise RequestError(
            f"Request(guide=..., min_tokens={request.min_tokens}) may not end where its guide says so. Leave "
            "min_tokens out."
        )


def _whole(value: Any, least: int, most: float = math.inf) -> bool:
    good = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return bool(good and least <= value <= most)


def _number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    good = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return bool(good and math.isfinite(value) and low <= value <= high)


def check_space(request: Request, prompt_tokens: int, context: int) -> None:
    """Refuses an empty prompt, and a text that would be longer than a row of ``context`` tokens.

    Raises:
      RequestError: with the numbers.
    """
    if prompt_tokens < 1:
        raise RequestError("Request(prompt=[]) has nothing to continue. Give at least one token.")
    if prompt_tokens + request.max_new_tokens > context:
        raise RequestError(
            f"Request(max_new_tokens={request.max_new_tokens}) after {prompt_tokens} prompt tokens exceeds "
            f"the {context} positions of a row. Ask for at most {max(context - prompt_tokens, 0)}, or "
            "shorten the prompt."
        )


def read_stops(request: Request, model: Weighted) -> tuple[int, ...]:
    """The ids that end a text, each once: the model's own, and those that the request adds.

    Raises:
      RequestError: too many.
    """
    says = getattr(model, "spec", None) or getattr(model, "tokenizer", None)
    own = () if request.ignore_eos else getattr(says, "eos", ())
    stops = tuple(dict.fromkeys(int(stop) for stop in (*own, *request.stop_tokens)))
    if len(stops) > MOST_STOPS:
        raise RequestError(
            f"Request(stop_tokens=...) ends at {len(stops)} ids. Give at most {MOST_STOPS}, the model's own "
            "included."
        )
    return stops


# --- learned weights -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class LearnedWeights:
    """Learned weights of a policy.

    Attributes:
      weights: as the decode loop takes them.
      label: which files they are of; equal labels are equal weights.
      sources: by part name, what finds them again: the name of shipped weights, or a file.
    """

    weights: Params
    label: str
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def after_prompt(self, policy: Policy) -> LearnedWeights:
        """What of the policy's weights is read after the prompt."""
        own = {part.place: self.weights[part.place] for part in policy.after_prompt.learned}
        if own.keys() == self.weights.keys():
            return self
        return LearnedWeights(own, self.label if own else "", self.sources if own else {})


class WeightCache:
    """Learned weights, each read once while anybody uses them; any thread."""

    def __init__(self, model: Weighted) -> None:
        self._model = model
        self._read: weakref.WeakValueDictionary[str, LearnedWeights] = weakref.WeakValueDictionary()

    @property
    def allocated(self) -> int:
        """Device bytes of all that are in use."""
        arrays = {
            id(x): x.nbytes for read in list(self._read.values()) for x in jax.tree.leaves(read.weights)
        }
        return sum(arrays.values())

    def get(self, policy: Policy, named: Mapping[str, Source] | None) -> LearnedWeights:
        """The weights that a policy needs, of these sources or those that the model ships.

        Raises:
          WeightsError: as ``kvjax.weights_for``.
        """
        if not policy.learned and not named:
            return LearnedWeights({}, "")
        names = {name: str(source) for name, source in (named or {}).items()}
        # Parts of one structure read the same files, whatever their hyperparameters.
        key = json.dumps([policy.structure, names], sort_keys=True)
        learned = self._read.get(key)
        if learned is None:
            read = find(policy, self._model, named)
            weights = decode.on_mesh(self._model, policy, read.weights, mesh_of(self._model.params))[1]
            chosen = sources(policy, named)
            again = {
                part.name: str(chosen[part.name])
                if chosen[part.name] in shipped(self._model, part)
                else str(read.files[part.name].resolve())
                for part in policy.learned
            } | {name: str(source) for name, source in chosen.items() if name == VALUES}
            self._read[key] = learned = LearnedWeights(weights, read.label, again)
        return learned
