"""Errors over HTTP: always ``{"error": {"message", "type", "param", "code"}}``, whatever went wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvjax.algebra import PolicyError
from kvjax.decode import RequestError
from kvjax.engine import (
    ContextExists,
    ContextMismatch,
    ContextNotFound,
    Draining,
    EngineDead,
    EngineError,
    QueueFull,
)
from kvjax.serve.http.bodies import ErrorBody
from kvjax.weights import WeightsError

KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""OpenAI's ``type`` by status; else it is the caller's fault below 500, and ours from there."""


class ApiError(HTTPException):
    """A request that is answered with an error.

    A kind of Starlette's own, since FastAPI takes any other that reading a body raises for a broken body.

    Attributes:
      message: the call, the rule, the way out.
      code: a word for programs.
      param: the field of the body that is wrong.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message = message
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """As it is sent."""
        kind = KINDS.get(
            self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body, self.status_code, headers=dict(self.headers or {}))


def of(error: BaseException) -> ApiError:
    """What a caller is told of an error of ours; of any other, that it was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        wait = {"Retry-After": str(max(1, round(error.retry_after)))}
        return ApiError(429, str(error), code="queue_full", headers=wait)
    if isinstance(error, Draining | EngineDead):
        code = "draining" if isinstance(error, Draining) else "engine_dead"
        return ApiError(503, str(error), code=code, headers={"Retry-After": "5"})
    for family, status, code, param in (
        (ContextNotFound, 404, "context_not_found", "context"),
        (ContextExists, 409, "context_exists", "name"),
        (ContextMismatch, 400, "context_mismatch", "context"),
        (WeightsError, 400, "invalid_weights", "kv_weights"),
        (PolicyError, 400, "invalid_policy", "kv_policy"),
        (RequestError, 400, "invalid_request", None),
    ):
        if isinstance(error, family):
            return ApiError(status, str(error), code=code, param=param)
    # What a fault says may quote a prompt or a path; its trace is in the log.
    return ApiError(500, "The request failed by a fault of the server, which has logged it.", code="fault")


def install(app: FastAPI) -> None:
    """Answers every error of the app in OpenAI's shape."""
    for ours in (ApiError, EngineError, RequestError, PolicyError, WeightsError):
        app.add_exception_handler(ours, _of_ours)
    app.add_exception_handler(RequestValidationError, _of_body)
    app.add_exception_handler(HTTPException, _of_route)


async def _of_ours(request: Request, error: Exception) -> JSONResponse:
    del request
    return of(error).response()


async def _of_route(request: Request, error: Exception) -> JSONResponse:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)  # noqa: S101  (registered for these alone)
    words = {
        404: f"There is no {request.url.path} here. GET /openapi.json lists what there is.",
        405: f"{request.url.path} does not take {request.method}. GET /openapi.json lists what it takes.",
    }
    codes = {404: "not_found", 405: "method_not_allowed"}
    message = words.get(error.status_code, str(error.detail))
    code, headers = codes.get(error.status_code, "http_error"), dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = _methods(request) or headers.get("allow", "")
        headers.pop("allow", None)
    return ApiError(error.status_code, message, code=code, headers=headers).response()


def _methods(request: Request) -> str:
    """All methods of a path; the router names those of the first route alone."""
    paths = request.app.openapi()["paths"]
    match = [methods for path, methods in paths.items() if _fits(path, request.url.path)]
    return ", ".join(sorted({method.upper() for methods in match for method in methods}))


def _fits(template: str, path: str) -> bool:
    return bool(re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(template)), path))


async def _of_body(request: Request, error: Exception) -> JSONResponse:
    """400 for a body that is no JSON, 422 for one of another form; the first thing wrong is named."""
    del request
    assert isinstance(error, RequestValidationError)  # noqa: S101
    first, *_ = error.errors()
    where = [str(word) for word in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return ApiError(400, "The body is no JSON. Send one JSON object.", code="invalid_json").response()
    param = where[0] if where else None
    name = ".".join(where) or "the body"
    return ApiError(422, f"{name}: {first['msg']}.", code=first["type"], param=param).response()


DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": what}
    for status, what in {
        400: "A request that cannot be served",
        401: "No key, or a wrong one",
        403: "A policy or a host that is not allowed",
        404: "No such model, context or request",
        409: "A context of that name is held already",
        413: "A body that is too large",
        422: "A body of another form",
        429: "The queue is full; Retry-After says when to ask again",
        500: "A fault",
        503: "Loading, draining, or the engine is dead",
    }.items()
}
"""For the schema: every route may answer with these."""
