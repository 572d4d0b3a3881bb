"""Tokens to text, one text of one request: characters, stop strings, log-probabilities, how it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvjax.engine import Event
from kvjax.serve.http.errors import ApiError
from kvjax.serve.http.stops import Stops
from kvjax.text import Text


@dataclasses.dataclass(frozen=True)
class Spelt:
    """A token with its log-probabilities.

    Attributes:
      token: its id.
      logprob: None for the first token of a prompt.
      top: (token id, log-probability) of the likeliest, best first.
      offset: characters of the text before it.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one event adds to a text.

    Attributes:
      text: characters that are certain now.
      tokens: those that came with it, where log-probabilities are asked for.
      finish: "stop" or "length" on the last piece.
      stop_reason: the stop string or token id that ended it, "deadline", or None.
    """

    text: str
    tokens: tuple[Spelt, ...] = ()
    finish: str | None = None
    stop_reason: int | str | None = None


class Writer:
    """Makes pieces of events.

    Attributes:
      tokens: new tokens so far, up to the one that completed a stop string.
      finish: of the last piece; None before it.
    """

    def __init__(
        self,
        text: Text,
        *,
        after: Sequence[int],
        echo: str,
        stops: Sequence[str],
        ends: Sequence[int],
        logprobs: bool,
    ) -> None:
        """
        Args:
          text: the tokenizer.
          after: the prompt's ids, where the text goes on from them.
          echo: the prompt's text, where it begins the answer.
          stops: strings that end the text.
          ends: ids that end texts and are not shown.
          logprobs: are pieces to bring their tokens?
        """
        self._show, self._prompt = text.stream(after=after), text.stream()
        self._stops, self._ends, self._logprobs = Stops(stops), frozenset(ends), logprobs
        self._echo, self._offset, self._prompt_offset = echo, len(echo), 0
        self._model_ends = frozenset(text.eos)
        self.tokens = 0
        self.finish: str | None = None

    @property
    def done(self) -> bool:
        """Was the last piece made?"""
        return self.finish is not None

    def step(self, event: Event) -> Piece:
        """The piece an event makes.

        Raises:
          ApiError: 503 where the request was cancelled, which only a server on its way out does.
        """
        if event.finish_reason == "cancelled":
            raise ApiError(503, "The server was shut down before the text was complete.", code="cancelled")
        spelt = self._spelt(event) if event.token is not None and self._logprobs else ()
        if event.prompt:
            return self._last("", spelt, event) if event.finish_reason else Piece("", spelt)
        shown, text = "", self._begin()
        if event.token is not None:
            self.tokens += 1
            ended = event.finish_reason == "stop" and event.token in self._ends
            shown = "" if ended else self._show.step(event.token)
        self._offset += len(shown)
        text += self._stops.feed(shown)
        if self._stops.hit is not None:
            return self._ended(text, spelt, "stop", self._stops.hit)
        return self._last(text, spelt, event) if event.finish_reason else Piece(text, spelt)

    def _begin(self) -> str:
        """The echo, once."""
        echo, self._echo = self._echo, ""
        return echo

    def _last(self, text: str, spelt: tuple[Spelt, ...], event: Event) -> Piece:
        """The piece of the event that ends the text, with all that was held back."""
        text += self._begin() + self._stops.feed(self._show.finish())
        if self._stops.hit is not None:
            return self._ended(text, spelt, "stop", self._stops.hit)
        text += self._stops.finish()
        if event.finish_reason == "stop":
            return self._ended(text, spelt, "stop", None if event.token in self._model_ends else event.token)
        return self._ended(text, spelt, "length", "deadline" if event.finish_reason == "deadline" else None)

    def _ended(self, text: str, spelt: tuple[Spelt, ...], finish: str, reason: int | str | None) -> Piece:
        self.finish = finish
        return Piece(text, spelt, finish, reason)

    def _spelt(self, event: Event) -> tuple[Spelt, ...]:
        assert event.token is not None  # noqa: S101
        offset = self._prompt_offset if event.prompt else self._offset
        if event.prompt:
            self._prompt_offset += len(self._prompt.step(event.token))
        return (Spelt(event.token, event.logprob, event.top_logprobs, offset),)
