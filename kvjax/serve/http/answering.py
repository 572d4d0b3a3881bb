"""From a plan to a response: at once or as a stream, ended where the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvjax.serve.http import errors
from kvjax.serve.http.bodies import StreamOptions, TextOptions
from kvjax.serve.http.job import Job, Whole, whole
from kvjax.serve.http.plan import Plan
from kvjax.serve.http.service import Service
from kvjax.serve.http.writer import Piece

LEFT = 499
"""Status in the log of a request whose client went away; nobody receives it."""


class Shape(Protocol):
    """How a kind of answer is written down."""

    kind: str
    """What ids begin with."""

    def opening(self, job: Job) -> list[dict[str, Any]]:
        """Choices of the chunks before any text."""
        ...

    def delta(self, job: Job, index: int, piece: Piece) -> dict[str, Any]:
        """The choice of a chunk."""
        ...

    def head(self, job: Job) -> dict[str, Any]:
        """What every chunk says of the answer."""
        ...

    def complete(self, job: Job, texts: list[Whole]) -> dict[str, Any]:
        """The whole answer, without usage."""
        ...


async def respond(
    request: Request, service: Service, body: TextOptions, shape: Shape, plan: Callable[[], Plan]
) -> Response:
    """Answers a request.

    Args:
      request: whose client may go away.
      service: who answers.
      body: says whether to stream.
      shape: of the answer.
      plan: makes the plan; reads a tokenizer, so it runs beside the event loop.

    Raises:
      What ``plan`` and ``Engine.submit`` do, before anything is sent.
    """
    service.check_open()
    job = await asyncio.to_thread(lambda: Job(service, plan(), shape.kind))
    if body.kv_watch:
        service.watch(job.id, job.tickets)
    notes = request.state.notes
    if body.stream:
        chunks = _stream(service, shape, job, body.stream_options or StreamOptions())
        return EventStream(chunks, lambda: _end(job, notes))
    try:
        texts = await _unless_gone(request, job)
        if texts is None:
            return Response(status_code=LEFT)
        return JSONResponse(shape.complete(job, texts) | {"usage": job.usage()})
    finally:
        _end(job, notes)


def _end(job: Job, notes: dict[str, Any]) -> None:
    """Whatever happened: no row goes on for nobody."""
    job.cancel()
    notes.update(job.notes())


async def _unless_gone(request: Request, job: Job) -> list[Whole] | None:
    """The texts; None where the client went away first."""
    work = asyncio.create_task(whole(job))
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await work if work.done() else None
    finally:
        work.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events; ``end`` is called however the response ends, also before it began."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(chunks, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def _stream(service: Service, shape: Shape, job: Job, how: StreamOptions) -> AsyncIterator[bytes]:
    """The chunks of an answer; an error in the middle is one of them."""
    head = shape.head(job)
    if how.include_usage or how.continuous_usage_stats:
        head = head | {"usage": None}

    def event(choices: list[dict[str, Any]], usage: bool) -> bytes:
        return sse(head | {"choices": choices} | ({"usage": job.usage()} if usage else {}))

    every = bool(how.continuous_usage_stats)
    try:
        for choice in shape.opening(job):
            yield event([choice], every)
        async for index, piece in job.pieces():
            if piece.text or piece.tokens or piece.finish:
                yield event([shape.delta(job, index, piece)], every)
        if how.include_usage:
            yield event([], True)
    except Exception as error:
        told = errors.of(error)
        if not isinstance(error, errors.ApiError):
            service.log.fault("fault", error, request=job.id)
        yield sse(told.body)
    yield b"data: [DONE]\n\n"


def sse(content: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
