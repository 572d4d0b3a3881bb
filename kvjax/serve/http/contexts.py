"""``/v1/contexts``: prompts that are read once, and continued as often as one likes."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from kvjax.engine import ContextInfo
from kvjax.serve.http import plan
from kvjax.serve.http.bodies import ContextBody
from kvjax.serve.http.replies import ContextReply, ContextsReply, DeletedReply
from kvjax.serve.http.service import Service, of

router = APIRouter()


@router.post("/v1/contexts", status_code=201)
async def create(request: Request, body: ContextBody) -> ContextReply:
    """Reads a prompt and keeps what its policy keeps of it."""
    service = of(request)
    service.check_open()
    service.check_model(body.model)
    made = await asyncio.to_thread(_create, service, body)
    await asyncio.to_thread(service.keeper.save)
    return _reply(made)


def _create(service: Service, body: ContextBody) -> ContextInfo:
    if (body.prompt is None) == (body.messages is None):
        raise plan.refused("prompt", "Give either prompt or messages")
    if body.messages is not None:
        ids = plan.conversation(service, body.messages)
    elif isinstance(body.prompt, str):
        ids = plan.encoded(service, body.prompt)
    else:
        ids = plan.checked(service, body.prompt or [])
    plan.check_prompt(service, len(ids))
    policy = service.policies.policy(body.kv_policy)
    weights = service.policies.weights(policy, body.kv_weights)
    return service.engine.contexts.create(body.name, ids, policy=policy, weights=weights)


@router.get("/v1/contexts")
async def contexts(request: Request) -> ContextsReply:
    """All that are held."""
    held = await asyncio.to_thread(of(request).engine.contexts.list)
    return ContextsReply(object="list", data=[_reply(info) for info in held])


@router.get("/v1/contexts/{name}")
async def context(request: Request, name: str) -> ContextReply:
    """One of them."""
    return _reply(await asyncio.to_thread(of(request).engine.contexts.get, name))


@router.delete("/v1/contexts/{name}")
async def delete(request: Request, name: str) -> DeletedReply:
    """Forgets it; requests that continue it already are not disturbed."""
    await asyncio.to_thread(of(request).keeper.delete, name)
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
