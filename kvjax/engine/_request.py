"""What is asked of the engine, and what comes back: values, no behaviour."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from kvjax.algebra import Policy
from kvjax.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One text to be continued.

    Attributes:
      prompt: token ids, as they are to be read (BOS included); at least one, or what follows ``context``.
      max_new_tokens: most new tokens; 0 only with ``echo``.
      temperature, top_k, top_p: as in ``kvjax.sampling``; temperature 0 is greedy.
      seed, draw: name the draws. Equal requests with equal seed and draw give equal texts; the n texts of one
        question have draws 0 … n - 1.
      logprobs: None for none; 0 for each token's own; n for those of the n likeliest tokens too (at most
        ``MOST_LOGPROBS``). Of the model's distribution, before temperature and truncation.
      echo: first an event for each prompt token (``Event.prompt``), with logprobs where they are asked for.
      ignore_eos: the model's own end tokens do not end the text.
      stop_tokens: further token ids that do.
      policy: what the cache keeps, in one-string form or as a value; None is the engine's default.
      weights: sources of learned weights by part name, as of ``kvjax.weights_for``; None: those that
        ``context`` was read with, else those the engine was given, else what the model ships.
      deadline: seconds after ``submit`` at which the request ends wherever it is.
      context: name of a held context that the prompt continues (a fork of it; the context stays).
      inspect: ``Engine.inspect`` still answers once the text has ended, with what the row held then.
    """

    prompt: Sequence[int] | np.ndarray
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    draw: int = 0
    logprobs: int | None = None
    echo: bool = False
    ignore_eos: bool = False
    stop_tokens: tuple[int, ...] = ()
    policy: str | Policy | None = None
    weights: Mapping[str, Source] | None = None
    deadline: float | None = None
    context: str | None = None
    inspect: bool = False


MOST_LOGPROBS = 20
"""Most alternatives of a token whose log-probabilities can be asked for."""

FINISHES = ("stop", "length", "cancelled", "deadline")
"""Why a text ended: an end token, ``max_new_tokens``, ``Ticket.cancel``, ``Request.deadline``."""


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
      kept: live slots of a stream, the mean over layers and KV heads.
      live: bytes of all live slots of the row, with scales, metadata and φ.
      full: bytes a cache that keeps everything would hold for ``seen`` tokens, keys and values alone.
      layers: live slots, int [L, K].
    """

    seen: int
    kept: float
    live: int
    full: int
    layers: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What a request took.

    Attributes:
      prompt_tokens: tokens of the prompt, those of a held context included.
      cached_tokens: of these, how many were not read anew (context, shared prefix).
      completion_tokens: new tokens so far.
      preempted: how often its row had to make room for others and was read again.
      first_token: seconds from ``submit`` to the first new token; None before it.
      total: seconds from ``submit`` to the end, or to now.
      kv: None before the prompt is read.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preempted: int
    first_token: float | None
    total: float
    kv: KVUsage | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """What one stream of a row holds: positions of its live slots, ascending.

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
    """The cache of one row as it is, read from the device between two segments.

    Attributes:
      seen: tokens the row was fed; positions run from 0 to seen - 1.
      tokens: their ids.
      streams: ``streams[layer][head]``.
      completed: does a φ summary stand for what a stream of the layer does not hold? One bool a layer.
      live, full: bytes, as in ``KVUsage``.
      allocated: bytes of the row's lane on the device (all its rows share its pools).
    """

    seen: int
    tokens: np.ndarray
    streams: tuple[tuple[Held, ...], ...]
    completed: tuple[bool, ...]
    live: int
    full: int
    allocated: int
