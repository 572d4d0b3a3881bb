"""What every request passes before its route: an id and a line in the log, the API key, the body, all of it.

Plain ASGI instead of ``BaseHTTPMiddleware``, which would put a queue between a stream and its client.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvjax.cli import InputError
from kvjax.serve.http.errors import CLIENT_LEFT, ApiError, as_api_error, route_path
from kvjax.serve.http.log import Log
from kvjax.serve.http.service import SMALL_BODY, Clients

KEY_VARIABLE = "KVJAX_API_KEY"  # of the environment: API keys, separated by commas

MOST_BODIES = 32  # of --max-body whose parts are held until they are complete

METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestLog:
    """Gives every request an id (``X-Request-Id``, the client's if it is valid); logs and counts its end."""

    def __init__(self, app: ASGIApp, log: Log, responses: Counter[tuple[str, str, str]]) -> None:
        self._app, self._log, self._responses = app, log, responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(id):
            id = f"req-{uuid.uuid4().hex}"
        log_facts: dict[str, Any] = {}  # routes add counts and names here, never text
        scope.setdefault("state", {}).update(request_id=id, log_facts=log_facts)
        start, status, method = time.monotonic(), 0, scope["method"]

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # a fault in this request alone: the server goes on
            self._log.fault("fault", error, id=id)
            if not status:
                await as_api_error(error).response()(scope, receive, send_with_id)
        finally:
            # Names of clients would make a series each, so only routes have their own.
            route = getattr(scope.get("route"), "path", "other")
            self._responses[method if method in METHODS else "other", route, str(status)] += 1
            self._log(
                "request",
                id=id,
                method=method,
                path=scope["path"],
                status=status,
                seconds=round(time.monotonic() - start, 4),
                **log_facts,
            )


class RootPath:
    """Tells the application the path under which a proxy serves it (uvicorn puts it before every path)."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._path}, receive, send)


class HeadRequests:
    """Has HEAD answered as GET; the server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope["method"] = "GET"  # in place: what the router adds to the scope is read outside
        await self._app(scope, receive, send)


class AccessControl:
    """Asks for the API key; without keys, optionally for a ``Host`` and an ``Origin`` on this machine.

    The latter stops pages of other sites from using the server through a visitor's browser: they can make
    their own host name resolve to 127.0.0.1, or post there without reading the answer, but cannot change the
    two headers.

    Routes find in ``request.state`` the ``owner`` of held contexts (which key; "" without keys) and the
    ``client``, whose share of the server is limited: the owner, or the address.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        clients: Clients,
        local_only: bool,
        open_paths: frozenset[str],
        origins: Sequence[str] = (),
    ) -> None:
        self._app, self._keys, self._clients = app, keys, clients
        self._local_only, self._open_paths, self._origins = local_only, open_paths, frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self._admit(scope)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        return await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._local_only and not is_local(without_port(headers.get("host", ""))):
            message = "This server answers only this machine, and the request names another host. Ask "
            message += "http://127.0.0.1, or start the server with a key."
            raise ApiError(403, message, code="host_not_allowed")
        origin = headers.get("origin")
        if self._local_only and not self._may_ask(origin):
            message = "This server answers only this machine, and a page of another site asks. Ask from this "
            message += "machine, or start the server with a key."
            raise ApiError(403, message, code="origin_not_allowed")
        owner = self._keys.owner(headers.get("authorization", ""))
        if owner is None and route_path(scope) not in self._open_paths:
            message = "The request has no key that this server knows. Send 'Authorization: Bearer KEY' "
            message += "(OpenAI(api_key=KEY))."
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        client = owner or (scope.get("client") or ("",))[0]
        scope.setdefault("state", {}).update(owner=owner or "", client=client)
        if scope["method"] == "POST":
            self._clients.count_request(client)

    def _may_ask(self, origin: str | None) -> bool:
        if origin is None or self._origins & {origin, "*"}:
            return True
        return is_local(without_port(origin.partition("://")[2]))


class BodyReader:
    """Takes a whole body before its route begins: of at most ``max_bytes``, within ``seconds``."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app, self._max_bytes, self._seconds = app, max_bytes, seconds
        self._coming = 0  # bytes of all bodies that are not complete

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            self._check(Headers(scope=scope).get("content-length", "0"))
            async with asyncio.timeout(self._seconds):
                body = await self._read(receive)
        except TimeoutError:
            message = f"The body did not come within {self._seconds:g} seconds. Send it faster, or start the "
            message += "server with a larger --body-timeout."
            error = ApiError(408, message, code="body_too_slow", headers={"Connection": "close"})
            return await error.response()(scope, receive, send)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        if body is None:
            return await Response(status_code=CLIENT_LEFT)(scope, receive, send)
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        return await self._app(scope, lambda: _next(messages, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None if the client leaves first."""
        body = bytearray()
        try:
            while (message := await receive())["type"] == "http.request":
                body += (piece := message.get("body", b""))
                self._coming += len(piece)
                self._check(str(len(body)))
                if len(body) > SMALL_BODY and self._coming > MOST_BODIES * self._max_bytes:
                    text = "Too many large bodies are on their way. Send this one again soon."
                    raise ApiError(503, text, code="too_many_bodies", headers={"Retry-After": "2"})
                if not message.get("more_body", False):
                    return bytes(body)
            return None
        finally:
            self._coming -= len(body)

    def _check(self, length: str) -> None:
        if length.isdigit() and (len(length) > 18 or int(length) > self._max_bytes):
            message = f"The body has more than {self._max_bytes} bytes. Send less, or start the server with "
            raise ApiError(413, message + "a larger --max-body.", code="body_too_large")


async def _next(messages: list[Message], receive: Receive) -> Message:
    return messages.pop() if messages else await receive()


# --- keys and hosts ------------------------------------------------------------------------------


class Keys:
    """The API keys that are accepted; without any, everybody is."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def admit(self, authorization: str) -> bool:
        """The header is ``Bearer KEY`` with one of the keys, or there are none."""
        return self.owner(authorization) is not None

    def owner(self, authorization: str) -> str | None:
        """A name for the key in the header; "" where there are no keys, None for a key that is not known.

        A wrong key takes as long as a right one.
        """
        if not self._digests:
            return ""
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # always all of them
        return digest.hex()[:16] if scheme.lower() == "bearer" and any(matches) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(file: Path | None, environment: Mapping[str, str]) -> Keys:
    """The keys of a file (one a line, ``#`` begins a comment) and of the environment.

    Raises:
      InputError: a file that cannot be read, or that holds no key.
    """
    keys = [key.strip() for key in environment.get(KEY_VARIABLE, "").split(",")]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--api-key-file {file} cannot be read ({error}). Give a text file.") from None
        from_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not from_file:
            raise InputError(f"--api-key-file {file} holds no key. Write one key a line.")
        keys += from_file
    return Keys(key for key in keys if key)


def without_port(host: str) -> str:
    """The name in a ``Host`` header: ``[::1]:8000`` is ``[::1]``."""
    return re.sub(r":\d+$", "", host) if not host.endswith("]") else host


def is_local(host: str) -> bool:
    """The name means this machine, whatever a name server says."""
    return host.lower() in ("localhost", "[::1]", "::1") or bool(re.fullmatch(r"127(\.\d{1,3}){3}", host))
