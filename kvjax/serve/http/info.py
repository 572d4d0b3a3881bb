"""``/v1/models``, ``/v1/policies``, ``/health``, ``/version``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import asyncio
from typing import Any

import jax
from fastapi import APIRouter, Request

import kvjax
from kvjax import catalogue
from kvjax.serve.http import generation, replies, schemas
from kvjax.serve.http.errors import ApiError, bad_request
from kvjax.serve.http.fields import check_fields
from kvjax.serve.http.service import JsonRoute, Service, service_of

router = APIRouter(route_class=JsonRoute)

NOT_READY = {
    "loading": "The server is compiling its first programs. Ask again soon.",
    "draining": "The server is shutting down. Ask another one.",
    "dead": "The engine failed; the server is about to end.",
}
"""Message of ``/health`` by state."""


@router.get("/v1/models")
async def models(request: Request) -> replies.ModelsReply:
    """Lists the served model."""
    return replies.ModelsReply(object="list", data=[_model(service_of(request))])


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> replies.ModelReply:
    """The served model, if that is its name."""
    service_of(request).check_model(name)
    return _model(service_of(request))


def _model(service: Service) -> replies.ModelReply:
    return replies.ModelReply(
        id=service.name,
        object="model",
        created=service.started,
        owned_by="kvjax",
        max_model_len=service.engine.context,
        kv_policy=repr(service.policies.default),
        chat_template=service.model.text.template is not None,
    )


@router.get("/v1/policies")
async def policies(request: Request) -> dict[str, Any]:
    """What ``kv_policy`` may say: the default, the allowed structures (null: all), and names for policies.

    ``about`` has a line for each name.
    """
    policies = service_of(request).policies
    return {
        "default": repr(policies.default),
        "allowed": policies.allowed,
        "presets": dict(catalogue.PRESETS) if policies.allowed is None else {},
        "about": catalogue.summaries() if policies.allowed is None else {},
    }


@router.get("/health")
async def health(request: Request) -> replies.HealthReply:
    """200 if requests are answered; 503 while loading or draining, and if the engine is dead."""
    service = service_of(request)
    state = service.health
    if state == "ready":
        return replies.HealthReply(status="ok")
    raise ApiError(503, NOT_READY[state], code="engine_dead" if state == "dead" else state)


@router.get("/readyz")
async def readyz(request: Request) -> replies.HealthReply:
    """As ``/health``: whether to send requests here."""
    return await health(request)


@router.get("/livez")
async def livez(request: Request) -> replies.HealthReply:
    """200 while the process is worth keeping: also while it loads or drains; 503 if the engine is dead."""
    if service_of(request).engine.health == "dead":
        raise ApiError(503, NOT_READY["dead"], code="engine_dead")
    return replies.HealthReply(status="ok")


@router.get("/version")
async def version() -> replies.VersionReply:
    """Versions of kvjax and of jax."""
    return replies.VersionReply(version=kvjax.__version__, jax=jax.__version__)


@router.post("/tokenize")
async def tokenize(request: Request, body: schemas.TokenizeBody) -> replies.TokenizeReply:
    """Token ids of a text or of a conversation, as the model would read them."""
    service = service_of(request)
    service.check_model(body.model)
    check_fields(service, body)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt", "Give either prompt or messages.")
    if body.messages is not None:
        ids = await asyncio.to_thread(generation.encode_chat, service, body.messages)
    else:
        bos = body.add_special_tokens is not False
        ids = await asyncio.to_thread(generation.encode_text, service, body.prompt or "", bos=bos)
    return replies.TokenizeReply(count=len(ids), max_model_len=service.engine.context, tokens=ids)


@router.post("/detokenize")
async def detokenize(request: Request, body: schemas.DetokenizeBody) -> replies.DetokenizeReply:
    """The text of token ids, without special tokens."""
    service = service_of(request)
    service.check_model(body.model)
    check_fields(service, body)
    ids = generation.check_token_ids(service, body.tokens, "tokens")
    return replies.DetokenizeReply(prompt=await asyncio.to_thread(service.model.text.decode, ids))
