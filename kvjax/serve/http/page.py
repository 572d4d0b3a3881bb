"""The page at ``/``: files of the package, as they are."""

from __future__ import annotations

import importlib.resources

from fastapi import APIRouter
from fastapi.responses import Response

router = APIRouter(include_in_schema=False)

_HEADERS = {
    # Nothing from elsewhere, no frame of another site, and nothing of this page elsewhere.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

_SCRIPT = "text/javascript; charset=utf-8"

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", _SCRIPT),
    "/page/ask.js": ("ask.js", _SCRIPT),
    "/page/cache.js": ("cache.js", _SCRIPT),
    "/page/draw.js": ("draw.js", _SCRIPT),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}

PATHS = frozenset(_FILES)
"""What the page is made of."""


def _add(path: str, name: str, kind: str) -> None:
    def file() -> Response:
        content = (importlib.resources.files("kvjax.serve.http") / "page" / name).read_bytes()
        return Response(content, headers=_HEADERS | {"Content-Type": kind})

    router.add_api_route(path, file, name=name)


for _path, (_name, _kind) in _FILES.items():
    _add(_path, _name, _kind)
