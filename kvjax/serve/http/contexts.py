"""``/v1/contexts``: prompts that are read once, kept under a name and continued by any number of requests.

A context belongs to the key that created it; others neither see it nor continue it.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from kvjax.engine import ContextInfo, Ticket
from kvjax.serve.http import generation
from kvjax.serve.http.errors import CLIENT_LEFT, ApiError, bad_request, too_late
from kvjax.serve.http.fields import check_fields
from kvjax.serve.http.replies import ContextReply, ContextsReply, DeletedReply
from kvjax.serve.http.schemas import ContextBody
from kvjax.serve.http.service import JsonRoute, Service, service_of
from kvjax.serve.http.streaming import unless_client_leaves

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/contexts", status_code=201, response_model=ContextReply)
async def create(request: Request, body: ContextBody) -> Response:
    """Reads a prompt and holds what its policy keeps of it."""
    service, owner, client = service_of(request), request.state.owner, request.state.client
    service.check_open()
    service.check_model(body.model)
    check_fields(service, body)
    (ticket,) = await asyncio.to_thread(
        service.clients.submit, client, 1, lambda: [_begin(service, body, owner, client)]
    )
    try:
        reason = await unless_client_leaves(request, _end(ticket))
    finally:
        if not ticket.done:
            ticket.cancel()
    service.clients.count_tokens(client, ticket.prompt_tokens + ticket.replayed_tokens)
    if reason is None:
        return Response(status_code=CLIENT_LEFT)
    if reason == "deadline":
        raise too_late(body.max_time, service.options.request_timeout)
    if reason == "cancelled":
        raise ApiError(503, "The server shut down before the prompt was read.", code="cancelled")
    await asyncio.to_thread(service.saved_contexts.save)
    info = service.engine.contexts.get(body.name, owner)
    return JSONResponse(_reply(info).model_dump(), 201)


def _begin(service: Service, body: ContextBody, owner: str, client: str) -> Ticket:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt", "Give either prompt or messages.")
    if body.messages is not None:
        ids = generation.encode_chat(service, body.messages)
    elif isinstance(body.prompt, str):
        ids = generation.encode_text(service, body.prompt)
    else:
        ids = generation.check_token_ids(service, body.prompt or [])
    generation.check_prompt_length(service, len(ids))
    policy = service.policies.policy(body.kv_policy, len(ids))
    weights = service.policies.weights(policy, body.kv_weights)
    deadline = generation.deadline(service, body.max_time)
    return service.engine.contexts.begin(
        body.name, ids, policy=policy, weights=weights, owner=owner, client=client, deadline=deadline
    )


async def _end(ticket: Ticket) -> str | None:
    """Why it ended."""
    async for _ in ticket:
        pass
    return ticket.finish_reason


@router.get("/v1/contexts")
async def contexts(request: Request) -> ContextsReply:
    """The contexts held for this key."""
    infos = service_of(request).engine.contexts.list(request.state.owner)
    return ContextsReply(object="list", data=[_reply(info) for info in infos])


@router.get("/v1/contexts/{name}")
async def context(request: Request, name: str) -> ContextReply:
    """One held context."""
    return _reply(service_of(request).engine.contexts.get(name, request.state.owner))


@router.delete("/v1/contexts/{name}")
async def delete(request: Request, name: str) -> DeletedReply:
    """Deletes a context; requests that already continue it are not disturbed."""
    service = service_of(request)
    service.engine.contexts.delete(name, request.state.owner)
    await asyncio.to_thread(service.saved_contexts.save)
    return DeletedReply(id=name, object="context", deleted=True)


def _reply(info: ContextInfo) -> ContextReply:
    return ContextReply(
        id=info.name,
        object="context",
        tokens=info.tokens,
        kv_policy=info.policy,
        bytes_live=info.live,
        bytes_allocated=info.allocated,
    )
