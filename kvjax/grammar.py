"""Grammars of answers: JSON, a JSON schema, a regular expression, a choice, or a Lark grammar.

``llguidance`` (``pip install 'kvjax[grammar]'``) says which tokens may come next, by the bytes of the model's
vocabulary. A grammar is compiled once and copied for each text (``kvjax.engine.Guide``).

Why: kvjax/DESIGN.md, 40.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvjax.engine import Guide
from kvjax.text import Text

if TYPE_CHECKING:
    from jaxtyping import UInt
    from llguidance import LLMatcher

Kind = Literal["json", "regex", "choice", "grammar"]

MOST_COMPILED = 64
"""Grammars that are kept."""

LONGEST = 1 << 16
"""Characters of a grammar."""

JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As ``json.dumps`` writes: where spaces are free, a small model may write nothing else for ever."""


class GrammarError(ValueError):
    """A grammar that is malformed, too large, or that nothing here can read."""


class Grammars:
    """Makes guides for one model's vocabulary; any thread."""

    def __init__(self, text: Text, vocab_size: int) -> None:
        """Reads nothing yet.

        Args:
          text: the tokenizer, and the ids that end a text.
          vocab_size: of the model's logits.
        """
        self._text, self._vocab_size = text, vocab_size
        self._compiled = functools.lru_cache(MOST_COMPILED)(self._compile)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise GrammarError(
                "a grammar needs llguidance, which is not installed here. pip install 'kvjax[grammar]'."
            ) from None
        return LLTokenizer(
            self._text.tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=list(self._text.eos) or None
        )

    def guide(self, kind: Kind, value: Any) -> Callable[[], Guide]:
        """What makes guides, each for one text.

        Args:
          kind: of the grammar.
          value: a JSON schema ("json"), a regular expression, a list of texts ("choice"), or a grammar in
            Lark's form.

        Raises:
          GrammarError: with what llguidance says of it.
        """
        source = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        if len(source) > LONGEST:
            raise GrammarError(f"the grammar has {len(source)} characters. Give at most {LONGEST}.")
        matcher = self._compiled(kind, source)
        return lambda: _Matched(matcher.deep_copy(), self._vocab_size)

    def _compile(self, kind: Kind, source: str) -> LLMatcher:
        tokenizer = self._tokenizer
        from llguidance import LLMatcher

        try:
            if kind == "json":
                grammar = LLMatcher.grammar_from_json_schema(source, overrides=JSON_FORM)
            elif kind == "regex":
                grammar = LLMatcher.grammar_from_regex(source)
            elif kind == "choice":
                grammar = LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(source))))
            else:
                grammar = LLMatcher.grammar_from_lark(source)
        except ValueError as error:
            raise GrammarError(f"{kind}: {error}") from error
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"{kind}: {matcher.get_error().splitlines()[0]}")
        return matcher


class _Matched:
    """A guide: what llguidance makes of one text."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._words = matcher, -(-vocab_size // 32)

    @property
    def done(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def error(self) -> str:
        return self._matcher.get_error() if self._matcher.is_error() else ""

    def allowed(self) -> UInt[np.ndarray, " W"]:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        return np.pad(mask, (0, max(0, self._words - len(mask))))[: self._words]

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)
