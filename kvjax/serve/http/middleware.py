"""What every request passes before it meets a route: an id and a line in the log, the key, its body's size.

Plain ASGI and no ``BaseHTTPMiddleware``, which would put a queue between a stream and its client.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvjax.serve.http import errors, page
from kvjax.serve.http.errors import ApiError
from kvjax.serve.http.keys import Keys
from kvjax.serve.http.log import Log

OPEN = frozenset({"/health", *page.PATHS})
"""What needs no key: whether the server lives, and a page that shows nothing without one."""

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Logged:
    """Gives every request an id (``X-Request-Id``; a sound one of the client's stays), logs how it ended."""

    def __init__(self, app: ASGIApp, log: Log) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        mine = given if _ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        # Routes add what may be said of a request: counts and names, never its text.
        notes: MutableMapping[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=mine, notes=notes)
        begun, status = time.monotonic(), 0

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = mine
            await send(message)

        try:
            await self._app(scope, receive, told)
        except Exception as error:  # a fault of ours in this request: the server goes on
            self._log.fault("fault", error, id=mine)
            if not status:
                await errors.of(error).response()(scope, receive, told)
        finally:
            self._log(
                "request",
                id=mine,
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=round(time.monotonic() - begun, 4),
                **notes,
            )


class Guarded:
    """Asks for the key; where there is none, for a ``Host`` of this machine.

    The second keeps pages of other sites, whose name may be made to mean 127.0.0.1, from using the server
    through somebody's browser.
    """

    def __init__(self, app: ASGIApp, keys: Keys, local_only: bool) -> None:
        self._app, self._keys, self._local_only = app, keys, local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        error = self._refusal(scope) if scope["type"] == "http" else None
        await (error.response() if error else self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._local_only and not is_local(without_port(headers.get("host", ""))):
            return ApiError(
                403,
                "This server was started for this machine alone, and the request names another host. Ask "
                "http://127.0.0.1, or start it with a key.",
                code="host_not_allowed",
            )
        if scope["path"] in OPEN or self._keys.admit(headers.get("authorization", "")):
            return None
        return ApiError(
            401,
            "The request brings no key that this server knows. Send 'Authorization: Bearer KEY' "
            "(OpenAI(api_key=KEY)).",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def without_port(host: str) -> str:
    """Of a ``Host``: ``[::1]:8000`` is ``[::1]``."""
    return re.sub(r":\d+$", "", host) if not host.endswith("]") else host


def is_local(host: str) -> bool:
    """Does the name mean this machine, whatever a name server says?"""
    return host.lower() in ("localhost", "[::1]", "::1") or bool(re.fullmatch(r"127(\.\d{1,3}){3}", host))


class Limited:
    """Refuses bodies of more than so many bytes, said or sent."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        said = Headers(scope=scope).get("content-length", "0")
        if said.isdigit() and int(said) > self._most:
            return await self._error().response()(scope, receive, send)
        came = 0

        async def counted() -> Message:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > self._most:
                raise self._error()
            return message

        return await self._app(scope, counted, send)

    def _error(self) -> ApiError:
        return ApiError(
            413,
            f"The body has more than {self._most} bytes. Send less, or start the server with a larger "
            "--max-body.",
            code="body_too_large",
        )
