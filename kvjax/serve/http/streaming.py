"""From what a request asks for to its response: whole or as a stream, and cancelled if the client leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvjax.engine import Event, Ticket
from kvjax.serve.http.detokenizer import CallsInText, Detokenizer, TextDelta
from kvjax.serve.http.errors import CLIENT_LEFT, ApiError, as_api_error, too_late
from kvjax.serve.http.fields import check_fields
from kvjax.serve.http.generation import Generation
from kvjax.serve.http.schemas import StreamOptions, TextOptions
from kvjax.serve.http.service import Service

T = TypeVar("T")

KEEP_ALIVE = 10.0  # seconds of a stream without an event after which a comment keeps its connection open
Options = TypeVar("Options", bound=TextOptions)


class ReplyFormat(Protocol):
    """The JSON of one kind of answer."""

    id_prefix: str
    object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a chunk before any text, if there is one."""

    def delta(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """The choice of a chunk."""

    def choice(self, index: int, text: TextDelta) -> dict[str, Any]:
        """The choice of a whole answer."""


async def respond(
    request: Request,
    service: Service,
    body: Options,
    form: ReplyFormat,
    prepare: Callable[[Service, Options, str], Generation],
) -> Response:
    """Answers a request, whole or as a stream as its body says.

    Args:
      request, service, body: the request.
      form: of the answer.
      prepare: makes the engine's requests from the body, for an owner of contexts; uses the tokenizer, so it
        runs in a worker thread.

    Raises:
      What ``prepare`` and ``Engine.submit`` raise, before anything is sent.
    """
    service.check_open()
    owner, client = request.state.owner, request.state.client

    def begin() -> RunningCompletion:
        ignored = check_fields(service, body)
        return RunningCompletion(service, prepare(service, body, owner), client, form.id_prefix, ignored)

    completion = await asyncio.to_thread(begin)
    if body.kv_watch:
        service.watch(completion.id, completion.tickets)

    def end() -> None:
        completion.cancel()  # always: no sequence may run on without a client
        service.clients.count_tokens(client, completion.usage()["completion_tokens"])
        request.state.log_facts.update(completion.log_facts())

    if body.stream:
        options = body.stream_options or StreamOptions()
        return EventStream(_events(service, form, completion, options, bool(body.kv_watch)), end)
    try:
        texts = await unless_client_leaves(request, completion.texts())
        if texts is None:
            return Response(status_code=CLIENT_LEFT)
        choices = [form.choice(index, text) for index, text in enumerate(texts)]
        head = _head(service, completion, form.object)
        return JSONResponse(head | {"choices": choices, "usage": completion.usage()})
    finally:
        end()


async def unless_client_leaves(request: Request, answer: Coroutine[Any, Any, T]) -> T | None:
    """What an answer gives; None if the client leaves first."""

    async def client_leaves() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, left = asyncio.create_task(answer), asyncio.create_task(client_leaves())
    try:
        await asyncio.wait({answering, left}, return_when=asyncio.FIRST_COMPLETED)
        return await answering if answering.done() else None
    finally:
        answering.cancel()
        left.cancel()


async def with_pauses(elements: AsyncGenerator[T, None], seconds: float) -> AsyncIterator[T | None]:
    """The elements, and None whenever there was none for so many seconds."""
    coming: asyncio.Task[T] | None = None
    try:
        while True:
            coming = coming or asyncio.create_task(anext(elements))  # type: ignore[arg-type]
            await asyncio.wait({coming}, timeout=seconds)
            if not coming.done():
                yield None
                continue
            task, coming = coming, None
            try:
                element = task.result()
            except StopAsyncIteration:
                return
            yield element
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.wait({coming})
        await elements.aclose()


class EventStream(StreamingResponse):
    """Server-sent events; calls ``end`` however the response ends, even before it began."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def _events(
    service: Service,
    form: ReplyFormat,
    completion: RunningCompletion,
    options: StreamOptions,
    watched: bool,
) -> AsyncIterator[bytes]:
    """The events of a streamed answer; an error in the middle is one of them."""
    head = _head(service, completion, form.chunk_object)
    usage_always = bool(options.continuous_usage_stats)
    if options.include_usage or usage_always:
        head["usage"] = None

    def chunk(choices: list[dict[str, Any]], usage: bool) -> bytes:
        return _event(head | {"choices": choices} | ({"usage": completion.usage()} if usage else {}))

    try:
        if watched:
            yield chunk([], False)  # its id, long before its first token
        for index in range(len(completion.tickets)):
            if opening := form.opening(index):
                yield chunk([opening], usage_always)
        async for event in with_pauses(completion.deltas(), KEEP_ALIVE):
            if event is None:
                yield b": still at work\n\n"
                continue
            index, delta = event
            if delta.text or delta.tokens or delta.calls or delta.finish:
                yield chunk([form.delta(index, delta)], usage_always)
        if options.include_usage:
            yield chunk([], True)
    except Exception as error:
        if not isinstance(error, ApiError):
            service.log.fault("fault", error, request=completion.id)
        yield _event(as_api_error(error).body)
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _head(service: Service, completion: RunningCompletion, object: str) -> dict[str, Any]:
    return {"id": completion.id, "object": object, "created": completion.created, "model": service.name}


class RunningCompletion:
    """The texts of one HTTP request, while the engine writes them.

    Attributes:
      id: for the client.
      created: seconds since 1970.
      tickets: the engine's, one a text.
    """

    def __init__(
        self,
        service: Service,
        generation: Generation,
        client: str,
        id_prefix: str,
        ignored: Sequence[str] = (),
    ) -> None:
        """Submits all texts, or none; ``ignored`` are fields of the body, for the answer."""
        self.id, self.created = f"{id_prefix}-{uuid.uuid4().hex}", int(time.time())
        self._ignored = ignored
        self._generation, self._log, self._begun = generation, service.log, False
        self._most_seconds = service.options.request_timeout
        requests = [dataclasses.replace(request, client=client) for request in generation.requests]
        self.tickets = service.clients.submit(
            client, len(requests), lambda: service.engine.submit_all(requests)
        )
        text, form = service.model.text, generation.calls
        self._detokenizers = [
            Detokenizer(
                text,
                after=list(request.prompt) if generation.continues else (),
                echo=echo,
                stops=generation.stops,
                end_tokens=(*(() if request.ignore_eos else text.eos), *request.stop_tokens),
                logprobs=request.logprobs is not None,
                least=request.min_tokens,
                marks=() if form is None else form.marks,
            )
            for request, echo in zip(requests, generation.echoes)
        ]
        self._calls = [None if form is None else CallsInText(form) for _ in requests]
        again = sum(ticket.replayed_tokens for ticket in self.tickets)
        service.clients.count_tokens(client, self.usage()["prompt_tokens"] + again)

    def cancel(self) -> None:
        """Ends texts that are not complete; their batch rows are free after the engine's next decode."""
        for ticket in self.tickets:
            if not ticket.done:
                ticket.cancel()

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """(index of a text, what was added to it), until all are complete. Raises ApiError if one fails."""
        events: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()

        async def forward(index: int, ticket: Ticket) -> None:
            try:
                async for event in ticket:
                    events.put_nowait((index, event))
            except Exception as error:  # raised below, where somebody waits
                events.put_nowait((index, error))

        tasks = [asyncio.create_task(forward(*numbered)) for numbered in enumerate(self.tickets)]
        try:
            while not all(detokenizer.done for detokenizer in self._detokenizers):
                index, event = await events.get()
                if isinstance(event, Exception):
                    error = as_api_error(event)
                    if error.status_code == 500:
                        self._log.fault("fault", event, request=self.id)
                    raise error
                self._begun = self._begun or event.token is not None
                if event.finish_reason == "deadline" and not self._begun:
                    raise too_late(self._generation.requests[index].deadline, self._most_seconds)
                detokenizer = self._detokenizers[index]
                if detokenizer.done:
                    continue  # the engine was still writing after a stop string
                delta = detokenizer.step(event)
                if detokenizer.done and event.finish_reason is None:
                    self.tickets[index].cancel()
                calls = self._calls[index]
                yield index, delta if calls is None else calls.step(delta)
        finally:
            for task in tasks:
                task.cancel()
            self.cancel()

    async def texts(self) -> list[TextDelta]:
        """All texts, complete. Raises ApiError if one fails."""
        deltas: list[list[TextDelta]] = [[] for _ in self.tickets]
        async for index, delta in self.deltas():
            deltas[index].append(delta)
        return [
            TextDelta(
                text="".join(delta.text for delta in parts),
                tokens=tuple(token for delta in parts for token in delta.tokens),
                finish=parts[-1].finish,
                stop_reason=parts[-1].stop_reason,
                calls=tuple(call for delta in parts for call in delta.calls),
            )
            for parts in deltas
        ]

    def usage(self) -> dict[str, Any]:
        """OpenAI's ``usage``, with our ``kv``; a prompt counts once for all its texts."""
        usages = [ticket.usage for ticket in self.tickets]
        firsts = [usage for usage, x in zip(usages, self._generation.requests) if x.draw == 0]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        written = sum(detokenizer.tokens for detokenizer in self._detokenizers)
        kv: dict[str, Any] | None = None
        if rows := [usage.kv for usage in usages if usage.kv is not None]:
            kv = {
                "policy": repr(self._generation.requests[0].policy),
                "tokens_seen": sum(row.seen for row in rows),
                "tokens_kept": round(sum(row.kept for row in rows), 2),
                "bytes_live": sum(row.live for row in rows),
                "bytes_full": sum(row.full for row in rows),
            }
            if any(usage.drafted_tokens for usage in usages):
                kv["drafted_tokens"] = sum(usage.drafted_tokens for usage in usages)
                kv["accepted_tokens"] = sum(usage.accepted_tokens for usage in usages)
            if self._generation.layers:
                kv["layers"] = np.sum([row.layers for row in rows], axis=0).astype(int).tolist()
            if self._ignored:
                kv["ignored_fields"] = list(self._ignored)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts)},
            "kv": kv,
        }

    def log_facts(self) -> dict[str, Any]:
        """Counts and names for the log."""
        usage = self.usage()
        first_tokens = [t for ticket in self.tickets if (t := ticket.usage.first_token) is not None]
        return {
            "completion": self.id,
            "policy": repr(self._generation.requests[0].policy),
            "texts": len(self.tickets),
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "first_token": round(min(first_tokens), 4) if first_tokens else None,
            "ends": sorted({detokenizer.finish or "left" for detokenizer in self._detokenizers}),
        }
