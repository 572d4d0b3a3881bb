"""``POST /v1/chat/completions``: answers to conversations."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvjax.serve.http import logprobs, plan
from kvjax.serve.http.answering import respond
from kvjax.serve.http.bodies import ChatBody
from kvjax.serve.http.job import Job, Whole
from kvjax.serve.http.replies import STREAM, ChatReply
from kvjax.serve.http.service import Service, of
from kvjax.serve.http.writer import Piece

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatReply, responses={200: {"content": STREAM}})
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """Answers a conversation."""
    service = of(request)
    return await respond(request, service, body, Chat(service), lambda: plan.chat(service, body))


class Chat:
    """The shape ``chat.completion``."""

    kind = "chatcmpl"

    def __init__(self, service: Service) -> None:
        self._service = service

    def head(self, job: Job) -> dict[str, Any]:
        """Of the chunks."""
        name = self._service.name
        return {"id": job.id, "object": "chat.completion.chunk", "created": job.created, "model": name}

    def opening(self, job: Job) -> list[dict[str, Any]]:
        """Who speaks."""
        return [
            self._delta(index, {"role": "assistant", "content": ""}, None, None, None)
            for index in range(len(job.tickets))
        ]

    def delta(self, job: Job, index: int, piece: Piece) -> dict[str, Any]:
        """What is added to a message."""
        said = self._logprobs(job, piece.tokens) if piece.tokens else None
        content = {"content": piece.text} if piece.text or not piece.finish else {}
        return self._delta(index, content, said, piece.finish, piece.stop_reason)

    def complete(self, job: Job, texts: list[Whole]) -> dict[str, Any]:
        """The answer."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(text.text), "refusal": None},
                "logprobs": self._logprobs(job, text.tokens),
                "finish_reason": text.finish,
                "stop_reason": text.stop_reason,
            }
            for index, text in enumerate(texts)
        ]
        return self.head(job) | {"object": "chat.completion", "choices": choices}

    def _logprobs(self, job: Job, tokens: Any) -> dict[str, Any] | None:
        return None if job.plan.logprobs is None else logprobs.of_chat(self._service.spell, tokens)

    @staticmethod
    def _delta(
        index: int, delta: dict[str, Any], said: Any, finish: str | None, reason: int | str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "delta": delta,
            "logprobs": said,
            "finish_reason": finish,
            "stop_reason": reason,
        }
