"""``python -m kvjax.serve http``: OpenAI's protocol in front of one ``kvjax.engine.Engine``.

A request's way through these files and across threads:

    event loop      middleware     id and log line, API key, requests of a client, the whole body
        |           service        ``JsonRoute`` bounds what is in the body
        |           completions    the route; ``schemas`` has checked the body
        |           streaming      ``respond``
        |
    worker thread   generation     tokenizes, checks, makes one engine request a text; ``service`` says which
        |                          policies and weights are allowed
        |           streaming      ``RunningCompletion`` submits them: ``Engine.submit_all`` returns tickets
        |
    engine thread   kvjax.engine   reads prompts, decodes all running texts, puts events into the tickets
        |
    event loop      streaming      takes the events from the tickets (``call_soon_threadsafe`` wakes the loop)
                    detokenizer    tokens to text, stop strings
                    completions    the JSON of an answer (``replies``) or of a chunk
                    streaming      sends it; cancels the tickets if the client leaves

``errors`` turns exceptions into responses on every part of the way. ``app`` puts routes and middleware
together, ``command`` runs the process, ``log`` writes lines in a thread of its own. Other routes:
``contexts`` (prompts held by name), ``info`` (models, health, tokenization), ``metrics`` (Prometheus, the
cache of one request).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from kvjax.cli import InputError

LOADS = ("model", "dtype", "weight_dtype", "mesh")
"""Options that say which model is loaded, and how."""


def check_installed(call: str) -> None:
    """Raises InputError where packages of the server are missing."""
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise InputError(f"{call} needs {', '.join(missing)}. Run: pip install 'kvjax[serve]'")


def serve(model: Any, *words: str) -> int:
    """Serves a model in memory, such as a Flax module of your own, until a signal or a fault.

        kvjax.serve.http.serve(kvjax.load(module, tokenizer="FOLDER"), "--port", "8001", "--policy", "snapkv")

    Args:
      model: with its tokenizer; its devices hold the caches.
      words: what may follow ``python -m kvjax.serve http``, but for what loads a model.

    Returns:
      0 after SIGTERM or Ctrl-C, 1 after a fault.

    Raises:
      InputError: an option that loads a model, or another fault of the words.
      ModelError: a model without a tokenizer.
      PolicyError, RequestError, WeightsError: what cannot be served, before anything listens.
    """
    from kvjax.serve.http.arguments import parse

    options = parse(words)
    for name in LOADS:
        if getattr(options, name) is not None:
            raise InputError(
                f"serve(model, ...): --{name.replace('_', '-')} is for a model that the server loads, and "
                "this one is in memory. Give it to kvjax.load."
            )
    check_installed("kvjax.serve.http.serve(model, ...)")
    from kvjax.serve.http.command import run

    _ = model.text
    return run(options, model)
