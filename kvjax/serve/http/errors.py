"""Errors over HTTP: always ``{"error": {"message", "type", "param", "code"}}``, whatever went wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvjax import engine
from kvjax.algebra import PolicyError
from kvjax.decode import RequestError
from kvjax.serve.http.replies import ErrorBody
from kvjax.serve.http.schemas import KINDS
from kvjax.weights import WeightsError

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""OpenAI's ``type`` by status; any other is the caller's mistake below 500 and the server's from there."""

CLIENT_LEFT = 499  # status in the log of a request whose client went away; nobody receives it


class ApiError(HTTPException):
    """An error response.

    An ``HTTPException``, because FastAPI reports any other exception raised while it reads a body as a broken
    body.

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
        """The JSON object that is sent."""
        default = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status_code, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body, self.status_code, headers=dict(self.headers or {}))


def bad_request(param: str, message: str, code: str = "invalid_request") -> ApiError:
    """A 400 for a field of the body."""
    return ApiError(400, message, code=code, param=param)


def too_many(message: str, seconds: float, code: str) -> ApiError:
    """A 429 that says in how many seconds to ask again."""
    return ApiError(429, message, code=code, headers={"Retry-After": str(max(1, math.ceil(seconds)))})


def too_late(seconds: float | None, limit: float | None) -> ApiError:
    """For a request whose time was over before anything was written.

    Args:
      seconds: what it had: its own ``max_time``, or the limit.
      limit: of all requests; a 504 says that this one was it, a 408 that the client gave too little.
    """
    own = limit is None or (seconds is not None and seconds < limit)
    what = "max_time" if own else "--request-timeout"
    message = f"The time of the request ({what}) was over before its first token. Give it more, or ask again "
    return ApiError(408 if own else 504, message + "later.", code="deadline_exceeded")


def route_path(scope: Mapping[str, Any]) -> str:
    """The path of a request below ``--root-path``, whether the proxy removed that or not."""
    root, path = scope.get("root_path", ""), scope["path"]
    return str(path[len(root) :] if root and path.startswith(f"{root}/") else path)


def as_api_error(error: BaseException) -> ApiError:
    """The HTTP error for one of our exceptions; 500 for any other."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, engine.QueueFull | engine.TooManyStructures):
        code = "queue_full" if isinstance(error, engine.QueueFull) else "too_many_structures"
        return too_many(str(error), round(error.retry_after), code)
    for unable, code in (
        (engine.Draining, "draining"),
        (engine.EngineDead, "engine_dead"),
        (engine.MemoryFull, "memory_full"),
    ):
        if isinstance(error, unable):
            return ApiError(503, str(error), code=code, headers={"Retry-After": "5"})
    for kind, status, code, param in (
        (engine.ContextNotFound, 404, "context_not_found", "context"),
        (engine.ContextExists, 409, "context_exists", "name"),
        (engine.ContextMismatch, 400, "context_mismatch", "context"),
        (WeightsError, 400, "invalid_weights", "kv_weights"),
        (PolicyError, 400, "invalid_policy", "kv_policy"),
        (RequestError, 400, "invalid_request", None),
    ):
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code, param=param)
    # The message of another exception may quote a prompt or a path; the log has it.
    return ApiError(500, "The server failed to answer this request and logged the fault.", code="fault")


def install(app: FastAPI) -> None:
    """Answers every error of the app in OpenAI's form."""
    for ours in (ApiError, engine.EngineError, RequestError, PolicyError, WeightsError):
        app.add_exception_handler(ours, _answer_ours)
    app.add_exception_handler(RequestValidationError, _answer_invalid_body)
    app.add_exception_handler(HTTPException, _answer_router)


async def _answer_ours(request: Request, error: Exception) -> JSONResponse:
    return as_api_error(error).response()


async def _answer_router(request: Request, error: Exception) -> JSONResponse:
    """Answers the router's 404 and 405."""
    assert isinstance(error, HTTPException)
    path, headers = route_path(request.scope), dict(error.headers or {})
    code, message = {
        404: ("not_found", f"There is no {path} here. GET /openapi.json lists all paths."),
        405: ("method_not_allowed", f"{path} does not take {request.method}. See GET /openapi.json."),
    }.get(error.status_code, ("http_error", str(error.detail)))
    if error.status_code == 405:  # Starlette names the methods of the first route with this path alone
        methods = {
            method.upper()
            for template, operations in request.app.openapi()["paths"].items()
            if re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(template)), path)
            for method in operations
        }
        methods |= {"HEAD"} if "GET" in methods else set()
        headers = {"Allow": ", ".join(sorted(methods)) or headers.get("allow", "")}
    return ApiError(error.status_code, message, code=code, headers=headers).response()


async def _answer_invalid_body(request: Request, error: Exception) -> JSONResponse:
    """422 for a body of another form; names the first mistake."""
    assert isinstance(error, RequestValidationError)
    first, *_ = error.errors()
    path = [str(word) for word in first["loc"][1:] if word not in KINDS]
    param, name = path[0] if path else None, ".".join(path) or "the body"
    return ApiError(422, f"{name}: {first['msg']}.", code=first["type"], param=param).response()


DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": what}
    for status, what in {
        400: "A request that cannot be served",
        401: "No key, or a wrong one",
        403: "A policy or a host that is not allowed",
        404: "No such model, context or request",
        408: "A body that came too slowly, or max_time was over before the first token",
        409: "A context of that name is held already",
        413: "A body that is too large",
        422: "A body of another form",
        429: "The queue is full, or the client's share is taken; Retry-After says when to ask again",
        500: "A fault of the server",
        503: "Loading, draining, out of KV memory, or the engine is dead",
        504: "The server's limit of time was over before the first token",
    }.items()
}
"""For the schema: every route may answer with these."""
