"""The application: routes, errors, middleware."""

from __future__ import annotations

from fastapi import FastAPI

import kvjax
from kvjax.serve.http import about, chats, completions, contexts, errors, metrics, page, texts, watch
from kvjax.serve.http.keys import Keys
from kvjax.serve.http.middleware import Guarded, Limited, Logged
from kvjax.serve.http.service import Service

SAYS = """OpenAI's protocol before a model whose KV cache follows a policy: `kv_policy` in a request says what
the cache keeps, `usage.kv` in the answer what it held."""


def make(service: Service, keys: Keys, *, local_only: bool) -> FastAPI:
    """The application.

    Args:
      service: what it serves.
      keys: who is let in.
      local_only: is a request's ``Host`` to name this machine?
    """
    app = FastAPI(
        title="kvjax",
        version=kvjax.__version__,
        description=SAYS,
        responses=errors.DOCUMENTED,
        docs_url=None,  # its scripts would come from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    for part in (completions, chats, about, texts, contexts, watch, metrics, page):
        app.include_router(part.router)
    errors.install(app)
    # The last one added is the first one met.
    app.add_middleware(Limited, most=service.options.max_body)
    app.add_middleware(Guarded, keys=keys, local_only=local_only)
    app.add_middleware(Logged, log=service.log)
    return app
