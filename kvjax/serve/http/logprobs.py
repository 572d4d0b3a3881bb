"""Log-probabilities as OpenAI writes them, in both of its ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvjax.serve.http.spelling import Spelling
from kvjax.serve.http.writer import Spelt

LOWEST = -9999.0
"""Instead of minus infinity, which JSON does not have."""


def of_completion(spell: Spelling, tokens: Sequence[Spelt], n: int) -> dict[str, Any]:
    """Lists with an entry a token; the token itself is among its alternatives, wherever it ranks."""
    top: list[dict[str, float] | None] = []
    for spelt in tokens:
        if spelt.logprob is None:
            top.append(None)
            continue
        best = {spell(token): _finite(value) for token, value in reversed(spelt.top)}
        top.append(dict(reversed(best.items())) | {spell(spelt.token): _finite(spelt.logprob)})
    return {
        "tokens": [spell(spelt.token) for spelt in tokens],
        "token_logprobs": [None if s.logprob is None else _finite(s.logprob) for s in tokens],
        "top_logprobs": top if n else None,
        "text_offset": [spelt.offset for spelt in tokens],
    }


def of_chat(spell: Spelling, tokens: Sequence[Spelt]) -> dict[str, Any]:
    """An object a token."""
    content = [
        _token(spell, s.token, s.logprob) | {"top_logprobs": [_token(spell, t, value) for t, value in s.top]}
        for s in tokens
    ]
    return {"content": content, "refusal": None}


def _token(spell: Spelling, token: int, logprob: float | None) -> dict[str, Any]:
    value = LOWEST if logprob is None else _finite(logprob)
    return {"token": spell(token), "logprob": value, "bytes": list(spell.bytes(token))}


def _finite(value: float) -> float:
    return max(value, LOWEST)
