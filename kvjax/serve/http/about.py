"""``GET /v1/models``, ``/health`` and ``/version``: what is served, and whether it can be asked."""

from __future__ import annotations

from typing import Any

import jax
from fastapi import APIRouter, Request

import kvjax
from kvjax import catalogue
from kvjax.serve.http.errors import ApiError
from kvjax.serve.http.replies import HealthReply, ModelReply, ModelsReply, VersionReply
from kvjax.serve.http.service import Service, of

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> ModelsReply:
    """The one model there is."""
    return ModelsReply(object="list", data=[_model(of(request))])


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> ModelReply:
    """The model, if that is its name."""
    service = of(request)
    service.check_model(name)
    return _model(service)


def _model(service: Service) -> ModelReply:
    return ModelReply(
        id=service.name,
        object="model",
        created=service.started,
        owned_by="kvjax",
        max_model_len=service.engine.context,
        kv_policy=repr(service.policies.default),
    )


@router.get("/v1/policies")
async def policies(request: Request) -> dict[str, Any]:
    """What ``kv_policy`` may say: the default, the allowed structures (null: all), and names for policies."""
    service = of(request)
    return {
        "default": repr(service.policies.default),
        "allowed": service.policies.allowed,
        "presets": dict(catalogue.PRESETS) if service.policies.allowed is None else {},
    }


@router.get("/health")
async def health(request: Request) -> HealthReply:
    """200 where requests are answered; 503 while loading or draining, and with a dead engine."""
    service = of(request)
    state = "draining" if service.draining else service.engine.health
    if state == "ready":
        return HealthReply(status="ok")
    words = {
        "loading": "The server is compiling its first programs. Ask again soon.",
        "draining": "The server is being shut down. Ask another one.",
        "dead": "The engine met a fault and is no more; the process is about to end.",
    }
    raise ApiError(503, words[state], code=f"engine_{state}" if state == "dead" else state)


@router.get("/version")
async def version() -> VersionReply:
    """Of kvjax and of jax."""
    return VersionReply(version=kvjax.__version__, jax=jax.__version__)
