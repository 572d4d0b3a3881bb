"""``POST /v1/completions``: texts that go on where their prompts stop."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvjax.serve.http import logprobs, plan
from kvjax.serve.http.answering import respond
from kvjax.serve.http.bodies import CompletionBody
from kvjax.serve.http.job import Job, Whole
from kvjax.serve.http.replies import STREAM, CompletionReply
from kvjax.serve.http.service import Service, of
from kvjax.serve.http.writer import Piece

router = APIRouter()


@router.post("/v1/completions", response_model=CompletionReply, responses={200: {"content": STREAM}})
async def completions(request: Request, body: CompletionBody) -> Response:
    """Continues prompts."""
    service = of(request)
    return await respond(request, service, body, Completion(service), lambda: plan.completion(service, body))


class Completion:
    """The shape ``text_completion``."""

    kind = "cmpl"

    def __init__(self, service: Service) -> None:
        self._service = service

    def head(self, job: Job) -> dict[str, Any]:
        """Of an answer and of its chunks."""
        name = self._service.name
        return {"id": job.id, "object": "text_completion", "created": job.created, "model": name}

    def opening(self, job: Job) -> list[dict[str, Any]]:
        """A completion begins with its text."""
        del job
        return []

    def delta(self, job: Job, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk's choice looks like an answer's."""
        return self._choice(job, index, piece.text, piece.tokens, piece.finish, piece.stop_reason)

    def complete(self, job: Job, texts: list[Whole]) -> dict[str, Any]:
        """The answer."""
        choices = [
            self._choice(job, i, "".join(x.text), x.tokens, x.finish, x.stop_reason)
            for i, x in enumerate(texts)
        ]
        return self.head(job) | {"choices": choices}

    def _choice(
        self, job: Job, index: int, text: str, tokens: Any, finish: str | None, reason: int | str | None
    ) -> dict[str, Any]:
        n = job.plan.logprobs
        said = None if n is None else logprobs.of_completion(self._service.spell, tokens, n)
        return {
            "index": index,
            "text": text,
            "logprobs": said,
            "finish_reason": finish,
            "stop_reason": reason,
        }
