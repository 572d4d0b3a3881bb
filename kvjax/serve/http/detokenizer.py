"""Token ids to text: whole characters as they come, stop strings, how a text ended, single tokens by name."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence

from kvjax.engine import Event
from kvjax.serve.http.errors import ApiError
from kvjax.serve.tools import Call, CallForm, CallReader
from kvjax.text import Text


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
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
class TextDelta:
    """What one event adds to a text, or all of a text.

    Attributes:
      text: characters that later tokens cannot change.
      tokens: those that came with it, if log-probabilities were asked for.
      finish: "stop", "length" or "tool_calls" in the last delta.
      stop_reason: the stop string or token id that ended the text, "deadline", or None.
      calls: of tools, that are complete with this delta.
    """

    text: str
    tokens: tuple[TokenLogprobs, ...] = ()
    finish: str | None = None
    stop_reason: int | str | None = None
    calls: tuple[Call, ...] = ()


class Detokenizer:
    """Turns the events of one text into text deltas.

    Attributes:
      tokens: new tokens so far, up to the one that completed a stop string.
      finish: "stop" or "length" once the text is complete.
    """

    def __init__(
        self,
        text: Text,
        *,
        after: Sequence[int],
        echo: str,
        stops: Sequence[str],
        end_tokens: Sequence[int],
        logprobs: bool,
        least: int = 0,
        marks: Sequence[str] = (),
    ) -> None:
        """
        Args:
          text: the tokenizer.
          after: ids of the prompt that the text continues, if it does.
          echo: what the answer begins with: the prompt's text, or "".
          stops: strings that end the text.
          end_tokens: ids that end the text and are not shown.
          logprobs: deltas carry their tokens.
          least: new tokens behind which stop strings are looked for.
          marks: special tokens that are shown all the same.
        """
        self._text, self._marks = text, {text.tokenizer.token_to_id(mark): mark for mark in marks}
        self._stream, self._prompt_stream = text.stream(after=after), text.stream()
        self._stops, self._end_tokens, self._logprobs = StopStrings(stops), frozenset(end_tokens), logprobs
        self._echo, self._offset, self._prompt_offset = echo, len(echo), 0
        self._eos, self._least = frozenset(text.eos), least
        self.tokens = 0
        self.finish: str | None = None

    @property
    def done(self) -> bool:
        """The text is complete."""
        return self.finish is not None

    def step(self, event: Event) -> TextDelta:
        """The delta of an event.

        Raises:
          ApiError: 503 if the request was cancelled, which only a server that shuts down does.
        """
        if event.finish_reason == "cancelled":
            raise ApiError(503, "The server shut down before the text was complete.", code="cancelled")
        tokens: tuple[TokenLogprobs, ...] = ()
        if event.token is not None and self._logprobs:
            offset = self._prompt_offset if event.prompt else self._offset
            tokens = (TokenLogprobs(event.token, event.logprob, event.top_logprobs, offset),)
            if event.prompt:
                self._prompt_offset += len(self._prompt_stream.step(event.token))
        if event.prompt:
            return self._last("", tokens, event) if event.finish_reason else TextDelta("", tokens)
        characters, text = "", self._take_echo()
        if event.token is not None:
            self.tokens += 1
            if event.finish_reason != "stop" or event.token not in self._end_tokens:
                characters = self._shown(event.token)
        self._offset += len(characters)
        text += characters if self.tokens <= self._least else self._stops.feed(characters)
        ended = self._stops.hit is not None or event.finish_reason
        return self._last(text, tokens, event) if ended else TextDelta(text, tokens)

    def _shown(self, token: int) -> str:
        """The characters that a token makes certain."""
        if token not in self._marks:
            return self._stream.step(token)
        rest, self._stream = self._stream.finish(), self._text.stream()
        return rest + self._marks[token]

    def _take_echo(self) -> str:
        echo, self._echo = self._echo, ""
        return echo

    def _last(self, text: str, tokens: tuple[TokenLogprobs, ...], event: Event) -> TextDelta:
        """The delta that ends the text, with everything that was held back."""
        text += self._take_echo() + self._stops.feed(self._stream.finish())
        stop_reason: int | str | None = self._stops.hit
        self.finish = "stop" if stop_reason is not None or event.finish_reason == "stop" else "length"
        if stop_reason is None:
            text += self._stops.finish()
            if self.finish == "stop" and event.token in self._end_tokens - self._eos:
                stop_reason = event.token
            elif event.finish_reason == "deadline":
                stop_reason = "deadline"
        return TextDelta(text, tokens, self.finish, stop_reason)


class CallsInText:
    """Takes calls of tools out of the deltas of one text."""

    def __init__(self, form: CallForm) -> None:
        self._reader = CallReader(form)

    def step(self, delta: TextDelta) -> TextDelta:
        """The delta without what is part of a call, or may be, and with the calls that are complete."""
        text, calls = self._reader.feed(delta.text)
        if delta.finish is None:
            return dataclasses.replace(delta, text=text, calls=calls)
        rest, last = self._reader.finish()
        finish = "tool_calls" if self._reader.calls and delta.finish == "stop" else delta.finish
        return dataclasses.replace(delta, text=text + rest, calls=calls + last, finish=finish)


class StopStrings:
    """Lets text through up to the first complete stop string.

    The text ends where a stop string is complete first; if several are complete at that character, the
    longest is cut away. So the result depends on the text, not on the pieces it comes in. Characters that
    may begin a stop string are held back until that is known.

    Attributes:
      hit: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._held = ""
        self.hit: str | None = None

    def feed(self, piece: str) -> str:
        """The text that is certain now."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        hits = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            end, negative_length, self.hit = min(hits)
            self._held = ""
            return text[: end + negative_length]
        longest = min(len(text), len(self._stops[0]) - 1)
        tails = (text[-n:] for n in range(longest, 0, -1))
        self._held = next((tail for tail in tails if any(s.startswith(tail) for s in self._stops)), "")
        return text[: len(text) - len(self._held)]

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


class TokenText:
    """Single tokens as text, for log-probabilities and the page; written differently where possible."""

    def __init__(self, text: Text) -> None:
        self._tokenizer = text.tokenizer
        # In a byte-level tokenizer every character of a token stands for one byte.
        self._byte_of = _byte_alphabet() if "ByteLevel" in str(text.tokenizer.decoder) else {}

    @functools.lru_cache(maxsize=65536)  # noqa: B019  (one a server)
    def bytes(self, token: int) -> bytes:
        """What the token adds to a text; for a special token its name."""
        raw = self._tokenizer.id_to_token(token)
        if raw is None:
            return b""
        if self._byte_of:
            known = all(letter in self._byte_of for letter in raw)
            return bytes(self._byte_of[letter] for letter in raw) if known else raw.encode()
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", raw):
            return bytes([int(byte[1], 16)])
        return raw.replace("\u2581", " ").encode()  # SentencePiece's character for a blank

    def __call__(self, token: int) -> str:
        r"""The token's text; a part of a character is written as OpenAI does: ``bytes:\xe2\x82``."""
        content = self.bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones are themselves, the others are numbered from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
