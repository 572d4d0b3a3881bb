"""The process of ``python -m kvjax.serve http``: loads the model, listens, drains and saves at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn

from kvjax.cli import InputError, check_alone
from kvjax.engine import Engine, check_mesh
from kvjax.loading import EMBEDDED
from kvjax.serve.command import load_model, remarks_shown
from kvjax.serve.http import app
from kvjax.serve.http.arguments import Options, settled
from kvjax.serve.http.detokenizer import TokenText
from kvjax.serve.http.log import Log, stderr_log
from kvjax.serve.http.middleware import KEY_VARIABLE, Keys, is_local, read_keys
from kvjax.serve.http.service import AllowedPolicies, Clients, SavedContexts, Service
from kvjax.sharding.mesh import sizes_of

HEALTH_INTERVAL = 0.1  # seconds between two checks of the engine's health
EXIT_MARGIN = 10.0  # seconds after the deadline of --drain at which the process ends, whatever it is doing
NEW_STRUCTURES = 6  # policy structures that a client may have compiled a minute, where others can ask
WORKER_THREADS = 64  # requests that may wait for the engine's thread at a time
LAST_SECONDS = 1.0  # in which a server whose engine is dead still answers 503, and its log may be read
USUAL_ANSWER = 256  # new tokens for which --warm-up has pools made


def run(options: Options, model: Any = None) -> int:
    """Serves until a signal or a fault; the exit code is 0 after SIGTERM or Ctrl-C, 1 after a fault.

    Args:
      options: the command line.
      model: what is served, in memory; None loads what the options name.

    Raises:
      InputError, ModelError, PolicyError, RequestError, WeightsError: what cannot be served, before anything
        listens.
    """
    check_alone("python -m kvjax.serve http", "kvjax.generate and python -m kvjax.serve --prompt")
    if options.mesh is not None:
        check_mesh(f"--mesh {options.mesh}: a server", sizes_of(options.mesh))
    keys = read_keys(options.api_key_file, os.environ)
    check_access(options, keys)
    check_certificate(options)
    log = stderr_log() if options.log == "json" else Log()

    def exit_in_time(code: int) -> None:  # also if a program is being compiled, which may take a minute
        timer = threading.Timer(options.drain + EXIT_MARGIN, os._exit, (code,))
        timer.daemon = True
        timer.start()

    with (
        remarks_shown(lambda text: log("note", text=text)),
        log.library_warnings(),
        listening_socket(options.host, options.port) as sock,
    ):
        service = open_service(options, log, model)
        try:
            application = app.make(service, keys, local_only=not len(keys) and not options.without_key)
            return asyncio.run(serve(service, application, sock, exit_in_time))
        finally:
            service.engine.close()
            log.flush(LAST_SECONDS)


def check_access(options: Options, keys: Keys) -> None:
    """Raises InputError if other machines may ask without a key and the user has not allowed that."""
    if not (is_local(options.host) or len(keys) or options.without_key):
        raise InputError(
            f"--host {options.host} lets other machines in, and there is no key. Give one in {KEY_VARIABLE} "
            "or in --api-key-file FILE, listen on 127.0.0.1, or add --without-key."
        )


def check_certificate(options: Options) -> None:
    """Raises InputError if the files of a certificate cannot be used; a key without one cannot either."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise InputError(
                f"--ssl-keyfile {options.ssl_keyfile} has no certificate. Add --ssl-certfile FILE."
            )
        return
    try:
        # A password would be asked for at the terminal; an empty one fails.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password=lambda: "")
    except (OSError, ValueError) as error:
        raise InputError(
            f"--ssl-certfile {options.ssl_certfile} cannot be used ({error}). Give a certificate in PEM form "
            "and its key without a password there or in --ssl-keyfile."
        ) from None


@contextlib.contextmanager
def listening_socket(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket. Raises InputError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Asyncio turns TCP_NODELAY on only where it reads that the protocol is TCP; without it each answer of a
    # kept connection waits 40 ms for an acknowledgement.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            raise InputError(
                f"--host {host} --port {port} cannot be listened on ({error.strerror or error}). Choose "
                "another port; 0 takes any free one."
            ) from None
        yield sock


def open_service(options: Options, log: Log, model: Any = None) -> Service:
    """Loads the model unless there is one, starts the engine and loads the contexts that the last run saved.

    Raises what ``run`` does.
    """
    if model is None:
        model = load_model(options.model, options.dtype, options.mesh, options.weight_dtype)
    policies = AllowedPolicies(model, options.policy, options.allow_policies, log)
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
        prefill_tokens=options.prefill_tokens,
        share=options.share,
        share_pages=options.share_pages,
        new_structures=client_limit(options, "structures", NEW_STRUCTURES),
        max_contexts=options.max_contexts,
        contexts_share=options.contexts_share,
        contexts_ttl=options.contexts_ttl,
        host_memory=options.host_memory or 0,
        on_note=lambda line: log("engine", text=line),
    )
    try:
        saved_contexts = SavedContexts(engine.contexts, options.save_contexts, log)
        if loaded := saved_contexts.load(options.weights):
            log("contexts", loaded=loaded)
    except BaseException:
        engine.close()
        raise
    is_folder = model.name != EMBEDDED and Path(model.name).is_dir()
    return Service(
        model=model,
        engine=engine,
        options=options,
        policies=policies,
        log=log,
        name=options.name or (Path(model.name).resolve().name if is_folder else model.name),
        token_text=TokenText(model.text),
        clients=clients_of(options),
        saved_contexts=saved_contexts,
    )


def clients_of(options: Options) -> Clients:
    """What a client may take of everything but compilations, which the engine counts."""
    return Clients(
        requests=client_limit(options, "requests", 600),
        waiting=client_limit(options, "waiting", max(1, options.queue // 2)),
        tokens=client_limit(options, "tokens", 1_000_000),
    )


def client_limit(options: Options, what: str, usual: int) -> int:
    """The option ``client_...``; 0 is any number, the default on an address that is this machine's alone."""
    chosen: int | None = getattr(options, f"client_{what}")
    if chosen is not None:
        return chosen
    return 0 if is_local(options.host) else usual


# --- while it runs -------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """Leaves signals alone: uvicorn would close the socket at once, and no client would hear "draining"."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Connections:
    """Closes connections that wait for a request, or for the rest of its body.

    Any of them after ``seconds``. While more than ``most`` are open, the oldest of the address that has most;
    never one that came since the last look, whose request may be on its way.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._waiting: dict[Any, tuple[Any, float]] = {}  # the request (uvicorn's cycle), since when

    def sweep(self, connections: Collection[Any]) -> None:
        """Looks at all of uvicorn's connections; to be called often."""
        now, waiting, known = time.monotonic(), {}, self._waiting.keys()
        for connection in connections:
            cycle = connection.cycle
            if cycle is None or cycle.response_complete or cycle.more_body:
                before, since = self._waiting.get(connection, (cycle, now))
                waiting[connection] = (cycle, since if before is cycle else now)
        self._waiting = waiting
        closed = [connection for connection, (_, since) in waiting.items() if now - since > self._seconds]
        addresses: dict[Any, list[Any]] = {}
        for connection in sorted((waiting.keys() & known) - set(closed), key=lambda one: waiting[one][1]):
            addresses.setdefault((connection.client or ("",))[0], []).append(connection)
        for _ in range(len(connections) - len(closed) - self._most):
            most = max(addresses.values(), key=len, default=[])
            if not most:
                break
            closed.append(most.pop(0))
        for connection in closed:
            connection.transport.abort()


def max_connections(options: Options) -> int:
    """Connections that may be open; the other half of a process's files is for everything else."""
    return options.max_connections or min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


async def serve(
    service: Service,
    application: Any,
    sock: socket.socket,
    on_exit: Callable[[int], None] = lambda code: None,
) -> int:
    """Serves on a socket until a signal or a fault; the exit code, which ``on_exit`` gets first.

    At SIGTERM or Ctrl-C health turns 503, no new request is taken, running ones may end within ``--drain``
    seconds, and contexts are saved if asked for. A second signal ends the process at once.
    """
    config = uvicorn.Config(
        application,
        lifespan="off",
        timeout_graceful_shutdown=5,
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=service.options.ssl_certfile,
        ssl_keyfile=service.options.ssl_keyfile,
    )
    server, stop = _Server(config), asyncio.Event()
    # A body that comes too slowly is answered first.
    connections = Connections(max_connections(service.options), service.options.body_timeout + 2)
    loop = asyncio.get_running_loop()
    # Calls that wait for the engine's thread run in these; asyncio's default of a few would soon be used up.
    loop.set_default_executor(ThreadPoolExecutor(WORKER_THREADS, thread_name_prefix="kvjax-http"))
    with _on_signal(lambda: loop.call_soon_threadsafe(stop.set)):
        task = asyncio.create_task(server.serve([sock]))
        _announce(service, sock)
        threading.Thread(target=_warm_up, args=(service,), daemon=True).start()
        while not stop.is_set() and service.engine.health != "dead":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), HEALTH_INTERVAL)
            connections.sweep(server.server_state.connections)
        on_exit(0 if stop.is_set() else 1)
        if stop.is_set():
            code = await asyncio.to_thread(_drain, service)
        else:
            code = 1
            if service.engine.fault is not None:
                service.log.fault("engine_fault", service.engine.fault)
            await asyncio.sleep(LAST_SECONDS)
        server.should_exit = True
        await task
    service.log("end", code=code)
    return code


def _announce(service: Service, sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    scheme = "http" if service.options.ssl_certfile is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    service.log("listening", url=url, model=service.name, policy=repr(service.policies.default))
    if sys.stderr.isatty():
        print(f"Serving {service.name} at {url}; Ctrl-C ends it.", file=sys.stderr)


def _warm_up(service: Service) -> None:
    """Compiles programs before the first request needs them: the default policy's, and those of --warm-up."""
    engine = service.engine
    try:
        begun = time.monotonic()
        for spec in service.options.warm_up:
            policy = service.policies.policy(spec)
            lengths, rows = engine.usual_prompts(), engine.usual_rows()
            engine.warm_up(policy, prompts=lengths, rows=rows, answer=USUAL_ANSWER)
        engine.warm_up()
        service.log("ready", seconds=round(time.monotonic() - begun, 2))
    except Exception as error:  # /health and every request report it
        service.log.fault("not_warm", error)
    finally:
        service.warm = True


def _drain(service: Service) -> int:
    """Lets running requests end and saves contexts; the exit code."""
    service.draining = True
    service.log("draining", seconds=service.options.drain)
    service.log("drained", all_ended=service.engine.drain(service.options.drain))
    try:
        service.saved_contexts.save()
    except OSError as error:
        service.log.fault("contexts_not_saved", error)
        return 1
    return 0


@contextlib.contextmanager
def _on_signal(stop: Callable[[], Any]) -> Iterator[None]:
    """SIGTERM and Ctrl-C call ``stop``; the second one ends the process with the signal's exit code."""
    signals = 0

    def handle(number: int, frame: Any) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            os._exit(128 + number)
        stop()

    if threading.current_thread() is not threading.main_thread():  # a test, a notebook
        yield
        return
    before = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
