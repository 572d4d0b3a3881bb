"""The process of ``python -m kvjax.serve http``: a model, an open socket, and out again in good order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn

from kvjax.cli import InputError, check_alone
from kvjax.engine import Engine, check_mesh
from kvjax.loading import EMBEDDED, LanguageModel
from kvjax.serve.command import loaded, notes
from kvjax.serve.http import app
from kvjax.serve.http.arguments import Options, settled
from kvjax.serve.http.keeping import Keeper
from kvjax.serve.http.keys import VARIABLE, Keys, read_keys
from kvjax.serve.http.log import Log, others, to_stderr
from kvjax.serve.http.middleware import is_local
from kvjax.serve.http.policies import Policies
from kvjax.serve.http.service import Service
from kvjax.serve.http.spelling import Spelling
from kvjax.sharding.mesh import sizes_of

LOOK = 0.1
"""Seconds between two looks at the engine's health."""

MARGIN = 10.0
"""Seconds after the deadline of ``--drain`` at which the process ends whatever it is at."""

WAITERS = 64
"""Requests that may wait for an answer of the engine's thread at a time; more of them wait for those."""

FAREWELL = 1.0
"""Seconds in which a dying server still answers 503, and its last lines are read."""


def run(options: Options) -> int:
    """Serves until somebody ends it; the exit code: 0 after SIGTERM or Ctrl-C, 1 after a fault of the engine.

    Raises:
      InputError, ModelError, PolicyError, RequestError, WeightsError: what cannot be served, before anything
        listens.
    """
    check_where(options)
    keys = read_keys(options.api_key_file, os.environ)
    check_who(options, keys)
    log = to_stderr() if options.log == "json" else Log()
    told = notes(lambda text: log("note", text=text))
    with told, others(log), listening(options.host, options.port) as sock:
        service = opened(options, log)
        try:
            local = not len(keys) and not options.without_key
            application = app.make(service, keys, local_only=local)
            return asyncio.run(serve(service, application, sock, lambda code: _leave_in_time(options, code)))
        finally:
            service.engine.close()
            log.flush(FAREWELL)


def check_where(options: Options) -> None:
    """Refuses several processes, and devices that no engine runs on.

    Raises:
      InputError, MeshError, RequestError: with the way out.
    """
    check_alone("python -m kvjax.serve http", "kvjax.generate and python -m kvjax.serve --prompt")
    if options.mesh is not None:
        check_mesh(f"--mesh {options.mesh}: a server", sizes_of(options.mesh))


def check_who(options: Options, keys: Keys) -> None:
    """Refuses to be open to others without a key, unless told.

    Raises:
      InputError: with the ways out.
    """
    if is_local(options.host) or len(keys) or options.without_key:
        return
    raise InputError(
        f"--host {options.host} lets other machines ask, and there is no key. Give one in {VARIABLE} or in "
        "--api-key-file FILE, listen on 127.0.0.1, or say --without-key."
    )


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens.

    Raises:
      InputError: an address that is not to be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise InputError(
            f"--host {host} --port {port} cannot be listened on ({error.strerror or error}). Take another "
            "port; 0 is any that is free."
        ) from None
    with sock:
        yield sock


def opened(options: Options, log: Log) -> Service:
    """The model loaded, its engine started, the held contexts of the last run back.

    Raises:
      As ``run``.
    """
    model = loaded(options.model, options.dtype, options.mesh)
    policies = Policies(model, options.policy, options.allow_policies, log)
    options = settled(options, policies.default)
    engine = Engine(
        model,
        policy=policies.default,
        weights=options.weights or None,
        kv_memory=options.kv_memory,
        max_rows=options.max_rows,
        max_lanes=options.max_lanes,
        context=options.context,
        queue=options.queue,
        chunk=options.chunk,
        segment=options.segment,
        share=options.share,
        share_pages=options.share_pages,
        on_note=lambda line: log("engine", text=line),
    )
    try:
        keeper = Keeper(engine.contexts, options.save_contexts)
        found = keeper.load(options.weights)
        if found:
            log("contexts", loaded=found)
    except BaseException:
        engine.close()
        raise
    return Service(
        model=model,
        engine=engine,
        options=options,
        policies=policies,
        log=log,
        name=options.name or _name(model),
        spell=Spelling(model.text),
        keeper=keeper,
    )


def _name(model: LanguageModel) -> str:
    """A hub id as it is, of a folder its name."""
    return (
        model.name
        if model.name == EMBEDDED or not Path(model.name).is_dir()
        else Path(model.name).resolve().name
    )


class _Server(uvicorn.Server):
    """Leaves signals alone: its own way out closes the socket at once, and nobody would hear "draining"."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


def _leave_in_time(options: Options, code: int) -> None:
    """Ends the process after the deadline whatever it is at: a program may be compiling for a minute."""
    end = threading.Timer(options.drain + MARGIN, os._exit, (code,))
    end.daemon = True
    end.start()


async def serve(
    service: Service,
    application: Any,
    sock: socket.socket,
    leaving: Callable[[int], None] | None = None,
) -> int:
    """Serves on a socket until a signal or a fault; the exit code, which ``leaving`` is told first.

    SIGTERM or Ctrl-C: health turns 503, nothing new is taken, what runs may end within ``--drain`` seconds,
    contexts are saved where asked. A second one ends the process at once.
    """
    config = uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
        server_header=False,
    )
    server, leave = _Server(config), asyncio.Event()
    loop = asyncio.get_running_loop()
    # What waits for the engine's thread waits in one of these; Python's own few would soon be taken.
    loop.set_default_executor(ThreadPoolExecutor(WAITERS, thread_name_prefix="kvjax-http"))
    with _signals(lambda: loop.call_soon_threadsafe(leave.set)):
        work = asyncio.create_task(server.serve([sock]))
        _say_hello(service, sock)
        threading.Thread(target=_warm, args=(service,), daemon=True).start()
        code = await _until_end(service, leave, leaving or (lambda code: None))
        server.should_exit = True
        await work
    service.log("end", code=code)
    return code


async def _until_end(service: Service, leave: asyncio.Event, leaving: Callable[[int], None]) -> int:
    while not leave.is_set() and service.engine.health != "dead":
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(leave.wait(), LOOK)
    leaving(0 if leave.is_set() else 1)
    if leave.is_set():
        return await asyncio.to_thread(_drain, service)
    fault = service.engine.fault
    if fault is not None:
        service.log.fault("engine_fault", fault)
    await asyncio.sleep(FAREWELL)
    return 1


def _drain(service: Service) -> int:
    options = service.options
    service.draining = True
    service.log("draining", seconds=options.drain)
    ended = service.engine.drain(options.drain)
    service.log("drained", all_ended=ended)
    try:
        service.keeper.save()
    except OSError as error:
        service.log.fault("contexts_not_saved", error)
        return 1
    return 0


def _warm(service: Service) -> None:
    """Compiles the default policy's lane before anybody waits for it."""
    try:
        seconds = service.engine.warm_up()
        service.log("ready", seconds=round(seconds, 2))
    except Exception as error:  # health says it; requests are told themselves
        service.log.fault("not_warm", error)


def _say_hello(service: Service, sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    service.log("listening", url=url, model=service.name, policy=repr(service.policies.default))
    if sys.stderr.isatty():
        print(f"Serving {service.name} at {url}; Ctrl-C ends it.", file=sys.stderr)


@contextlib.contextmanager
def _signals(leave: Callable[[], Any]) -> Iterator[None]:
    """SIGTERM and Ctrl-C call ``leave``; the second time the process ends as such a signal ends one."""
    asked = 0

    def handle(number: int, frame: Any) -> None:
        nonlocal asked
        del frame
        asked += 1
        if asked > 1:
            os._exit(128 + number)
        leave()

    if threading.current_thread() is not threading.main_thread():  # a test, a notebook
        yield
        return
    before = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
