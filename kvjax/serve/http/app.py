"""The application: routes, errors, middleware, and the page at ``/``."""

from __future__ import annotations

import importlib.resources

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware

import kvjax
from kvjax.serve.http import completions, contexts, errors, info, metrics
from kvjax.serve.http.middleware import AccessControl, BodyReader, HeadRequests, Keys, RequestLog, RootPath
from kvjax.serve.http.service import Service

DESCRIPTION = """OpenAI's protocol for a model whose KV cache follows a policy: `kv_policy` in a request says
what the cache keeps, `usage.kv` in the answer what it held."""

PAGE_HEADERS = {
    # Nothing from other sites, no frame on another site, and no link back to this page.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

_SCRIPT = "text/javascript; charset=utf-8"

PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", _SCRIPT),
    "/page/answer.js": ("answer.js", _SCRIPT),
    "/page/ask.js": ("ask.js", _SCRIPT),
    "/page/cache.js": ("cache.js", _SCRIPT),
    "/page/draw.js": ("draw.js", _SCRIPT),
    "/page/link.js": ("link.js", _SCRIPT),
    "/page/menu.js": ("menu.js", _SCRIPT),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", *PAGE_FILES})
"""What needs no key: whether the server lives, and the page, which shows nothing without a key."""


def make(service: Service, keys: Keys, *, local_only: bool) -> FastAPI:
    """The application.

    Args:
      service: what it serves.
      keys: who may use it.
      local_only: a request's ``Host`` must name this machine.
    """
    app = FastAPI(
        title="kvjax",
        version=kvjax.__version__,
        description=DESCRIPTION,
        responses=errors.DOCUMENTED,
        docs_url=None,  # its scripts would come from other sites
        redoc_url=None,
    )
    app.state.service = service
    for routes in (completions, info, contexts, metrics):
        app.include_router(routes.router)
    for path, (name, media_type) in PAGE_FILES.items():
        _add_page_file(app, path, name, media_type)
    errors.install(app)
    # The middleware added last sees a request first.
    app.add_middleware(BodyReader, max_bytes=service.max_body, seconds=service.options.body_timeout)
    origins = service.options.cors
    app.add_middleware(
        AccessControl,
        keys=keys,
        clients=service.clients,
        local_only=local_only,
        open_paths=OPEN_PATHS,
        origins=origins,
    )
    if origins:  # before the key: a browser asks whether it may send one without it
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(HeadRequests)
    app.add_middleware(RequestLog, log=service.log, responses=service.responses)
    app.add_middleware(RootPath, path=service.options.root_path)
    return app


def _add_page_file(app: FastAPI, path: str, name: str, media_type: str) -> None:
    def read() -> Response:
        content = (importlib.resources.files("kvjax.serve.http") / "page" / name).read_bytes()
        return Response(content, headers=PAGE_HEADERS | {"Content-Type": media_type})

    app.add_api_route(path, read, name=name, include_in_schema=False)
