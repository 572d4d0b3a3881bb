"""A server in this process, the real engine behind a real socket; and the library's own answers."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="pip install 'kvjax[serve]'")
httpx = pytest.importorskip("httpx", reason="pip install 'kvjax[test]'")

import kvjax  # noqa: E402
import kvjax.engine  # noqa: E402
from kvjax.serve.http import app, command  # noqa: E402
from kvjax.serve.http.arguments import parse  # noqa: E402
from kvjax.serve.http.log import Log  # noqa: E402
from kvjax.serve.http.middleware import Keys  # noqa: E402
from kvjax.serve.http.service import Service  # noqa: E402

FULL = ("full", "window(16) + sinks(4)", "snapkv(8) + uniform(0.5)")


def generated(folder: Path, policy: str, prompt: str, new: int) -> tuple[str, list[int], kvjax.KVState]:
    """Text, tokens and state that ``kvjax.generate`` gives, greedily."""
    model = kvjax.load(folder)
    ids = model.text.encode(prompt)
    generation = kvjax.generate(model, policy, [ids], max_new_tokens=new, stops=model.spec.eos)
    show = model.text.stream(after=ids)
    text = "".join(show.step(t) for t in generation.tokens[0] if t not in model.spec.eos) + show.finish()
    return text, generation.tokens[0], generation.state


class Running:
    """A server that listens.

    Attributes:
      url: where.
      service: its inside, for looking at.
      ask: a client of it.
      thread, code: where it runs, and what it ended with.
    """

    thread: threading.Thread
    code: int | None = None

    def __init__(self, url: str, service: Service, log: io.BytesIO) -> None:
        self.url, self.service, self._log = url, service, log
        self.ask = httpx.Client(base_url=url, timeout=120)

    def lines(self) -> list[dict[str, Any]]:
        """Of the log, so far."""
        assert self.service.log.flush(10)
        return [json.loads(line) for line in self._log.getvalue().splitlines()]

    def complete(self, prompt: Any = "Hello", **fields: Any) -> Any:
        """``POST /v1/completions``, greedy, as JSON."""
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0} | fields
        answer = self.ask.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refusal(self, path: str, body: Any = None, method: str = "POST", **more: Any) -> tuple[int, dict]:
        """Status and error of a request that is refused; its shape is OpenAI's."""
        answer = self.ask.request(method, path, json=body, **more)
        content = answer.json()
        assert set(content) == {"error"}
        assert set(content["error"]) == {"message", "type", "param", "code"}
        return answer.status_code, content["error"]

    def stream(self, path: str, body: Any) -> Iterator[Any]:
        """The events of a stream; it must end with [DONE]."""
        with self.ask.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            last = None
            for line in answer.iter_lines():
                if line:
                    assert line.startswith("data: ")
                    last = line.removeprefix("data: ")
                    if last != "[DONE]":
                        yield json.loads(last)
            assert last == "[DONE]"

    def idle(self) -> bool:
        """Does the engine come to rest within ten seconds?"""
        return until(lambda: (now := self.service.engine.metrics()).running + now.queued + now.reading == 0)


@contextlib.contextmanager
def stopped(engine: kvjax.engine.Engine) -> Iterator[threading.Event]:
    """Inside, the engine's thread does nothing, until the event is set."""
    goes_on = threading.Event()
    engine._inbox.put(lambda: goes_on.wait(60))
    try:
        yield goes_on
    finally:
        goes_on.set()


def until(true: Any, seconds: float = 10.0) -> bool:
    """Does it become true in time?"""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def running(folder: Any, *words: str, keys: tuple[str, ...] = ()) -> Iterator[Running]:
    """A server with these words on its command line, of a folder or of a model in memory."""
    model = None if isinstance(folder, Path) else folder
    place = ["--model", str(folder)] if model is None else []
    options, log = parse([*place, "--name", "tiny", *words]), io.BytesIO()
    with command.listening_socket(options.host, 0) as sock:
        service = command.open_service(options, Log(log.write), model)
        application = app.make(service, Keys(keys), local_only=not keys and not options.without_key)
        server = Running(f"http://127.0.0.1:{sock.getsockname()[1]}", service, log)

        def serve() -> None:
            server.code = asyncio.run(command.serve(service, application, sock))

        server.thread = threading.Thread(target=serve)
        server.thread.start()
        try:
            assert until(lambda: any(x["event"] in ("ready", "not_warm") for x in server.lines()), 300)
            yield server
        finally:
            service.engine.close()
            server.thread.join()
