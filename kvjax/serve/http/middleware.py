"""What every request passes before its route: an id and a line in the log, the API key, the size of its body.

Plain ASGI instead of ``BaseHTTPMiddleware``, which would put a queue between a stream and its client.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvjax.cli import InputError
from kvjax.serve.http.errors import ApiError, as_api_error
from kvjax.serve.http.log import Log

KEY_VARIABLE = "KVJAX_API_KEY"  # of the environment: API keys, separated by commas

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestLog:
    """Gives every request an id (``X-Request-Id``, the client's if it is valid) and logs how it ended."""

    def __init__(self, app: ASGIApp, log: Log) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(id):
            id = f"req-{uuid.uuid4().hex}"
        log_facts: dict[str, Any] = {}  # routes add counts and names here, never text
        scope.setdefault("state", {}).update(request_id=id, log_facts=log_facts)
        start, status = time.monotonic(), 0

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
            self._log(
                "request",
                id=id,
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=round(time.monotonic() - start, 4),
                **log_facts,
            )


class AccessControl:
    """Asks for the API key; if there is none, optionally for a ``Host`` header that names this machine.

    The latter stops pages of other sites from using the server through a visitor's browser: they can make
    their own host name resolve to 127.0.0.1, but cannot change the header.
    """

    def __init__(self, app: ASGIApp, keys: Keys, local_only: bool, open_paths: frozenset[str]) -> None:
        self._app, self._keys, self._local_only, self._open_paths = app, keys, local_only, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if scope["type"] == "http":  # who asks: the key, or where there is none the address
            authorization = Headers(scope=scope).get("authorization", "")
            address = (scope.get("client") or ("",))[0]
            client = _digest(authorization).hex() if len(self._keys) else address
            scope.setdefault("state", {}).update(client=client)
        await (error.response() if error else self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._local_only and not is_local(without_port(headers.get("host", ""))):
            message = "This server answers only this machine, and the request names another host. Ask "
            message += "http://127.0.0.1, or start the server with a key."
            return ApiError(403, message, code="host_not_allowed")
        if scope["path"] in self._open_paths or self._keys.admit(headers.get("authorization", "")):
            return None
        message = "The request has no key that this server knows. Send 'Authorization: Bearer KEY' "
        message += "(OpenAI(api_key=KEY))."
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class BodyLimit:
    """Refuses bodies of more than ``max_bytes``, by their Content-Length or while they arrive."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdigit() and int(length) > self._max_bytes:
            return await self._error().response()(scope, receive, send)
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._error()
            return message

        return await self._app(scope, receive_limited, send)

    def _error(self) -> ApiError:
        message = f"The body has more than {self._max_bytes} bytes. Send less, or start the server with a "
        return ApiError(413, message + "larger --max-body.", code="body_too_large")


# --- keys and hosts ------------------------------------------------------------------------------


class Keys:
    """The API keys that are accepted; without any, everybody is."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def admit(self, authorization: str) -> bool:
        """The header is ``Bearer KEY`` with one of the keys. A wrong key takes as long as a right one."""
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # always all of them
        return scheme.lower() == "bearer" and any(matches)


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
