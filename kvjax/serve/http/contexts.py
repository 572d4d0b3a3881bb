"""``/v1/contexts``: prompts that are read once, kept under a name and continued by any number of requests."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from kvjax.engine import ContextInfo
from kvjax.serve.http import generation
from kvjax.serve.http.errors import bad_request
from kvjax.serve.http.schemas import ContextBody, ContextReply, ContextsReply, DeletedReply
from kvjax.serve.http.service import Service, service_of

router = APIRouter()


@router.post("/v1/contexts", status_code=201)
async def create(request: Request, body: ContextBody) -> ContextReply:
    """Reads a prompt and holds what its policy keeps of it."""
    service = service_of(request)
    service.check_open()
    service.check_model(body.model)
    info = await asyncio.to_thread(_create, service, body)
    await asyncio.to_thread(service.saved_contexts.save)
    return _reply(info)


def _create(service: Service, body: ContextBody) -> ContextInfo:
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
    return service.engine.contexts.create(body.name, ids, policy=policy, weights=weights)


@router.get("/v1/contexts")
async def contexts(request: Request) -> ContextsReply:
    """All held contexts."""
    infos = await asyncio.to_thread(service_of(request).engine.contexts.list)
    return ContextsReply(object="list", data=[_reply(info) for info in infos])


@router.get("/v1/contexts/{name}")
async def context(request: Request, name: str) -> ContextReply:
    """One held context."""
    return _reply(await asyncio.to_thread(service_of(request).engine.contexts.get, name))


@router.delete("/v1/contexts/{name}")
async def delete(request: Request, name: str) -> DeletedReply:
    """Deletes a context; requests that already continue it are not disturbed."""
    await asyncio.to_thread(service_of(request).saved_contexts.delete, name)
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
