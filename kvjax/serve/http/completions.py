"""``POST /v1/completions`` and ``POST /v1/chat/completions``, and the JSON of their answers."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvjax.serve.http import generation
from kvjax.serve.http.detokenizer import TextDelta, TokenLogprobs, TokenText
from kvjax.serve.http.replies import EVENT_STREAM, ChatReply, CompletionReply
from kvjax.serve.http.schemas import ChatBody, CompletionBody
from kvjax.serve.http.service import JsonRoute, service_of
from kvjax.serve.http.streaming import respond
from kvjax.serve.tools import Call

router = APIRouter(route_class=JsonRoute)

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have


@router.post("/v1/completions", response_model=CompletionReply, responses={200: {"content": EVENT_STREAM}})
async def completions(request: Request, body: CompletionBody) -> Response:
    """Continues prompts."""
    service = service_of(request)
    form = CompletionFormat(service.token_text, body.logprobs)
    return await respond(request, service, body, form, generation.of_completion)


@router.post("/v1/chat/completions", response_model=ChatReply, responses={200: {"content": EVENT_STREAM}})
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """Answers a conversation."""
    service = service_of(request)
    form = ChatFormat(service.token_text, bool(body.logprobs))
    return await respond(request, service, body, form, generation.of_chat)


class CompletionFormat:
    """``text_completion``; a chunk looks like an answer."""

    id_prefix = "cmpl"
    object = chunk_object = "text_completion"

    def __init__(self, token_text: TokenText, logprobs: int | None) -> None:
        self._token_text, self._alternatives = token_text, logprobs

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, delta: TextDelta) -> dict[str, Any]:
        return self.choice(index, delta)

    def choice(self, index: int, text: TextDelta) -> dict[str, Any]:
        return {
            "index": index,
            "text": text.text,
            "logprobs": None if self._alternatives is None else self._logprobs(text.tokens),
            "finish_reason": text.finish,
            "stop_reason": text.stop_reason,
        }

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Lists with one entry a token."""
        return {
            "tokens": [self._token_text(x.token) for x in tokens],
            "token_logprobs": [None if x.logprob is None else _finite(x.logprob) for x in tokens],
            "top_logprobs": [self._top(x) for x in tokens] if self._alternatives else None,
            "text_offset": [x.offset for x in tokens],
        }

    def _top(self, token: TokenLogprobs) -> dict[str, float] | None:
        """The likeliest tokens, and the token itself wherever it ranks."""
        if token.logprob is None:
            return None
        # If two tokens have the same text, the likelier one counts, at the other's place in the order.
        top = {self._token_text(id): _finite(value) for id, value in reversed(token.top)}
        return dict(reversed(top.items())) | {self._token_text(token.token): _finite(token.logprob)}


class ChatFormat:
    """``chat.completion``, and ``chat.completion.chunk`` in streams."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, token_text: TokenText, logprobs: bool) -> None:
        self._token_text, self._wants_logprobs = token_text, logprobs
        self._called: collections.Counter[int] = collections.Counter()  # calls so far, by text

    def opening(self, index: int) -> dict[str, Any]:
        return self._choice(index, TextDelta(""), "delta", {"role": "assistant", "content": ""}, None)

    def delta(self, index: int, delta: TextDelta) -> dict[str, Any]:
        content: dict[str, Any] = {"content": delta.text} if delta.text or not delta.finish else {}
        if delta.calls:
            first = self._called[index]
            self._called[index] += len(delta.calls)
            calls = [{"index": at} | _call(call) for at, call in enumerate(delta.calls, first)]
            content = ({"content": delta.text} if delta.text else {}) | {"tool_calls": calls}
        logprobs = self._logprobs(delta.tokens) if delta.tokens else None
        return self._choice(index, delta, "delta", content, logprobs)

    def choice(self, index: int, text: TextDelta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text.text, "refusal": None}
        if text.calls:
            calls = [_call(call) for call in text.calls]
            message |= {"content": text.text.strip() and text.text or None, "tool_calls": calls}
        return self._choice(index, text, "message", message, self._logprobs(text.tokens))

    @staticmethod
    def _choice(
        index: int, text: TextDelta, key: str, message: dict[str, Any], logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            key: message,
            "logprobs": logprobs,
            "finish_reason": text.finish,
            "stop_reason": text.stop_reason,
        }

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """One object a token."""
        if not self._wants_logprobs:
            return None
        content = [
            self._token(x.token, x.logprob) | {"top_logprobs": [self._token(*top) for top in x.top]}
            for x in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        value = LOWEST_LOGPROB if logprob is None else _finite(logprob)
        return {
            "token": self._token_text(token),
            "logprob": value,
            "bytes": list(self._token_text.bytes(token)),
        }


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _finite(value: float) -> float:
    return max(value, LOWEST_LOGPROB)
