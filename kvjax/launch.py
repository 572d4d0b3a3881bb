"""One program in several processes that share a mesh: ``python -m kvjax.launch ... -- PROGRAM``.

  python -m kvjax.launch --local 2 --devices 4 -- -m kvjax.serve --mesh data=1,tensor=8 --prompt Hello
  python -m kvjax.launch --coordinator HOST:PORT --num-processes 4 --process-id 0 -- script.py
  python -m kvjax.launch -- script.py                 (SLURM, GKE, Cloud TPU: JAX finds the others itself)

Each process joins JAX's runtime before the program begins; the program is the same in all of them and sees
the devices of all. When one is lost the others end (``kvjax.sharding.lost``). ``--local`` starts them on this
machine, shows what the first one prints, and ends all when one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import inspect
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any, TextIO

from kvjax import cli
from kvjax.sharding import lost
from kvjax.version import __version__

HEARTBEAT, PATIENCE = 10, 100
"""Seconds of silence after which JAX gives up a process and aborts the others, where a loss was not noticed
before. --local waits longer: a busy machine may be silent for long."""

LIBRARIES = ("jax", "jaxlib", "numpy", "ml_dtypes", "tokenizers", "safetensors")
"""Libraries whose versions must be equal in all processes."""

GRACE = 5.0
"""Seconds that a process has to end before it is killed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    local: int | None = cli.option(None, "processes on this machine")
    devices: int | None = cli.option(None, "virtual CPU devices of each of them", "D")
    coordinator: str | None = cli.option(None, "where process 0 is", "HOST:PORT")
    num_processes: int | None = cli.option(None, "of all")
    process_id: int | None = cli.option(None, "which this is", "I", type=cli.whole(0))
    heartbeat: int = cli.option(HEARTBEAT, "seconds of silence after which JAX aborts", "S")
    launched: bool = cli.option(False, argparse.SUPPRESS)
    program: tuple[str, ...] = cli.option(
        (), "-m MODULE or FILE, and its words", "-- PROGRAM", flag="program", nargs="..."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    return cli.run(_run, argv)


def _run(argv: Sequence[str]) -> int:
    about = {"prog": "python -m kvjax.launch", "description": "Run a program in several processes."}
    options = cli.parse(Options, argv, **about)
    program = options.program[options.program[:1] == ("--",) :]
    if program[:1] and os.path.basename(program[0]).startswith("python"):
        program = program[1:]
    if not program or program == ("-m",):
        raise cli.InputError("launch has no program to run. Name one after --, as -- -m kvjax.serve.")
    cluster = (options.coordinator, options.num_processes, options.process_id)
    if options.local is not None:
        if any(word is not None for word in cluster):
            raise cli.InputError("--local starts all processes itself. Leave --coordinator and its ids out.")
        signal.signal(signal.SIGTERM, stop)
        return local(options.local, options.devices, program)
    if options.devices is not None:
        raise cli.InputError("--devices makes virtual devices for processes of this machine. Give --local.")
    if any(word is not None for word in cluster) and None in cluster:
        raise cli.InputError("--coordinator, --num-processes and --process-id go together. Give all three.")
    join(*cluster, heartbeat=options.heartbeat, command=" ".join(program), launched=options.launched)
    return run_here(program)


# --- one process ---------------------------------------------------------------------------------


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    heartbeat: int = HEARTBEAT,
    command: str = "",
    launched: bool = False,
) -> None:
    """Joins the other processes before any device is used; without arguments JAX asks the cluster.

    Args:
      coordinator: HOST:PORT of process 0.
      processes: how many there are.
      process: which this is.
      heartbeat: seconds of silence after which JAX gives up a process and aborts the others.
      command: the program and its words, which must be the same in all.
      launched: a launcher ends the others when one fails; else they watch each other.

    Raises:
      InputError: no cluster that JAX knows.
      MeshError: a process that runs another program, or other versions.
    """
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    known = inspect.signature(jax.distributed.initialize).parameters
    name = "heartbeat_timeout_seconds"
    how: dict[str, Any] = {name: heartbeat} if name in known else {}
    try:
        jax.distributed.initialize(coordinator, processes, process, **how)
    except ValueError as error:
        raise cli.InputError(
            f"launch finds no cluster that JAX knows ({error}). Give --coordinator, --num-processes and "
            "--process-id, or --local."
        ) from error
    _compare({"the command": command, **versions()})
    if not launched and jax.process_count() > 1:
        lost.watch(_host(coordinator))


def _host(coordinator: str | None) -> str:
    """Where process 0 is; JAX knows the one that the cluster named."""
    if coordinator is None:
        from jax._src import distributed

        coordinator = distributed.global_state.coordinator_address
    return str(coordinator).rpartition(":")[0].strip("[]")


def _compare(facts: dict[str, str]) -> None:
    """Raises MeshError unless all processes have the same ``facts``."""
    import jax

    from kvjax.sharding.consistency import compare

    compare("kvjax.launch", facts, range(jax.process_count()))


def versions() -> dict[str, str]:
    """Versions of everything that numbers and tokens depend on: libraries and Python."""
    libraries = {f"the version of {name}": importlib.metadata.version(name) for name in LIBRARIES}
    return {
        "the version of kvjax": __version__,
        "the version of Python": platform.python_version(),
        **libraries,
    }


def run_here(program: Sequence[str]) -> int:
    """Runs the program in this process, as ``python PROGRAM`` would; the exit code."""
    import jax

    try:
        if program[0] == "-m":
            sys.argv = list(program[1:])
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(program)
            runpy.run_path(program[0], run_name="__main__")
    except jax.errors.JaxRuntimeError:
        lost.settle()
        raise
    return 0


def stop(*_: Any) -> None:
    """Ends the launcher and its processes on a signal; a second signal must not interrupt that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


# --- all of them, on this machine ----------------------------------------------------------------


def local(processes: int, devices: int | None, program: Sequence[str]) -> int:
    """Runs the program in so many processes on this machine; the exit code, 0 if all succeed."""
    with socket.socket() as free_port:
        free_port.bind(("localhost", 0))
        port = free_port.getsockname()[1]
    environment = dict(os.environ)
    if devices is not None:
        flag = f"--xla_force_host_platform_device_count={devices}"
        environment |= {"XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} {flag}", "JAX_PLATFORMS": "cpu"}
    start = [sys.executable, "-m", "kvjax.launch", "--coordinator", f"localhost:{port}"]
    start += ["--num-processes", str(processes), "--heartbeat", str(PATIENCE), "--launched"]
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(1, processes)]
        running = []
        try:
            for index in range(processes):
                to: dict[str, Any] = {"stdout": subprocess.PIPE}
                if index:
                    to = {"stdout": outputs[index - 1], "stderr": subprocess.STDOUT}
                words = [*start, "--process-id", str(index), "--", *program]
                running.append(subprocess.Popen(words, env=environment, **to))
            shown = threading.Thread(target=pass_on, args=(running[0].stdout, sys.stdout), daemon=True)
            shown.start()
            failed = first_to_fail(running)
        finally:
            end(running)
        shown.join(GRACE)
        if failed is None:
            return 0
        if failed:
            outputs[failed - 1].seek(0)
            sys.stderr.write(outputs[failed - 1].read().decode(errors="replace")[-2000:])
        print(f"error: process {failed} {outcome(running[failed])}; the others were ended.", file=sys.stderr)
        return 1


def pass_on(source: Any, to: TextIO) -> None:
    """Copies a process's output to ``to`` as it comes, without the lines of JAX's transport."""
    begins, hidden = True, False
    while piece := source.read1():
        for line in piece.decode(errors="replace").splitlines(keepends=True):
            hidden = line.startswith("[Gloo]") if begins else hidden  # a line may come in several pieces
            if not hidden:
                to.write(line)
            begins = line.endswith("\n")
        to.flush()


def first_to_fail(running: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Waits until all have succeeded (None) or one has failed (its index)."""
    while True:
        codes = [process.poll() for process in running]
        failed = [index for index, code in enumerate(codes) if code]
        if failed:
            # A process that was killed by a signal is the cause of those that then miss it.
            return min(failed, key=lambda index: (codes[index] == -signal.SIGABRT, index))
        if None not in codes:
            return None
        time.sleep(0.05)


def outcome(process: subprocess.Popen[bytes]) -> str:
    """How a process ended."""
    code = process.returncode
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends processes that still run."""
    for process in running:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + GRACE
    for process in running:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
