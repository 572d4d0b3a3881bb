"""The three generations of JAX that kvjax promises to run on, one after the other.

python tests/matrix.py                                    makes (or reuses) an environment for each stack
python tests/matrix.py --only S07                         one of them
python tests/matrix.py --env S10=.venv/bin/python         an interpreter that has the stack already

On each stack: the pinned set is there, installing kvjax beside it moves none of it, import, generate, two
training steps, save, load (an orbax checkpoint and an HF folder), the kernels' tests. A table at the end;
exit code 1 when anything failed, 2 for a command line that makes no sense.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".venv" / "matrix"
INSIDE = ("import", "generate", "train", "save", "load")
"""Functions of ``matrix_parts.py``, run by the stack's own interpreter, one process each."""

PARTS = ("pins", "moves none", *INSIDE, "kernels")


@dataclasses.dataclass(frozen=True)
class Stack:
    """A Python and the versions on it.

    Attributes:
      python: major.minor.
      pins: distribution to version.
    """

    python: str
    pins: dict[str, str]

    @property
    def requirements(self) -> list[str]:
        """The pins for pip."""
        return [f"{name}=={version}" for name, version in self.pins.items()]


def _stack(python: str, jax: str, flax: str, orbax: str, **more: str) -> Stack:
    pins = {"jax": jax, "jaxlib": jax, "flax": flax, "orbax-checkpoint": orbax}
    return Stack(python, pins | {"grain": "0.2.18", "optax": "0.2.8"} | more)


STACKS = {
    "S07": _stack("3.13", "0.7.2", "0.11.2", "0.12.4", numpy="2.1.3"),  # Colab as it is
    "S10": _stack("3.11", "0.10.2", "0.12.8", "0.12.8"),
    "S12": _stack("3.12", "0.12.0.1", "0.12.12", "0.12.8"),
}


class StackError(RuntimeError):
    """A part did not work; the message is for the table's foot."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    options = _parser().parse_args(argv)
    environments = dict(options.env)
    if options.only and environments.keys() - set(options.only):
        names = ", ".join(environments)
        return _refuse(f"--env names {names}, --only leaves out one of them. Keep one of the two.")
    if missing := [str(path) for path in environments.values() if not os.access(path, os.X_OK)]:
        return _refuse(f"--env: {missing[0]} is not a program. Name an environment's bin/python.")
    table: dict[str, dict[str, str]] = {}
    for name in options.only or STACKS:
        table[name] = _run(name, STACKS[name], environments.get(name), options.home)
    print(_drawn(table))
    return int(any(not cell.startswith("ok") for row in table.values() for cell in row.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python tests/matrix.py", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=STACKS, metavar="STACK", help=", ".join(STACKS))
    parser.add_argument(
        "--env", action="append", type=_named, default=[], metavar="STACK=PYTHON", help="use this interpreter"
    )
    parser.add_argument("--home", type=Path, default=HOME, help="where environments are made and kept")
    return parser


def _named(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals or name not in STACKS:
        raise argparse.ArgumentTypeError(
            f"{text!r} names no stack. Write one of {', '.join(STACKS)}, '=', and a Python interpreter."
        )
    return name, Path(path).absolute()


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


# --- environments --------------------------------------------------------------------------------


def interpreter(version: str) -> Path:
    """A Python of that version: from the search path, or one of pyenv's.

    Raises:
      StackError: there is none.
    """
    on_path = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    tried = [Path(on_path)] if on_path else []
    tried += sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
    for candidate in tried:
        # A shim of pyenv's is on the path even where it leads nowhere: only an answer counts.
        said = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False)
        if said.returncode == 0 and said.stdout.startswith(f"Python {version}."):
            return candidate
    raise StackError(
        f"there is no Python {version}: not on the search path, nor among pyenv's. Install it (pyenv install "
        f"{version}), or name one that has the stack with --env."
    )


def made(name: str, stack: Stack, home: Path) -> tuple[Path, list[str]]:
    """The environment of a stack, made where it is not yet; what installing kvjax moved in it.

    Raises:
      StackError: no interpreter, or pip failed.
    """
    folder, python = home / name, home / name / "bin" / "python"
    stamp = folder / "made.json"
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        said([interpreter(stack.python), "-m", "venv", folder])
        said([python, "-m", "pip", "install", "-q", *stack.requirements])
        before = _frozen(python)
        said([python, "-m", "pip", "install", "-q", "-e", f"{ROOT}[test]"])
        after = _frozen(python)
        moved = [f"{n} {v} to {after.get(n, 'nothing')}" for n, v in before.items() if after.get(n) != v]
        stamp.write_text(json.dumps(moved), encoding="utf-8")
    return python, json.loads(stamp.read_text(encoding="utf-8"))


def would_move(python: Path) -> list[str]:
    """What installing kvjax into an environment would replace; nothing is installed.

    Raises:
      StackError: pip failed.
    """
    installed = _frozen(python)
    report = said([python, "-m", "pip", "install", "--dry-run", "-q", "--report", "-", ROOT])
    wanted = {
        _plain(item["metadata"]["name"]): item["metadata"]["version"]
        for item in json.loads(report)["install"]
    }
    wanted.pop("kvjax", None)
    return [f"{n} {installed[n]} to {v}" for n, v in wanted.items() if n in installed and installed[n] != v]


def _frozen(python: Path) -> dict[str, str]:
    """Name to version of everything installed, kvjax left out."""
    lines = said([python, "-m", "pip", "freeze"]).splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {_plain(name): version for name, version in pairs if _plain(name) != "kvjax"}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def said(command: Sequence[str | Path], limit: int = 1800, **environment: str) -> str:
    """Run a command in the checkout; its standard output.

    Raises:
      StackError: another exit code than 0, with the last lines it said.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise StackError(f"{' '.join(words)}\n  took more than {limit} s") from None
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-12:]
        raise StackError("\n  ".join([" ".join(words), f"ended with {done.returncode}:", *lines]))
    return done.stdout


# --- one stack -----------------------------------------------------------------------------------


def _run(name: str, stack: Stack, environment: Path | None, home: Path) -> dict[str, str]:
    """Part to "ok 3 s", "FAILED" or "-"; messages go to standard error as they come."""
    row = dict.fromkeys(PARTS, "-")
    print(f"\n== {name}: Python {stack.python}, {', '.join(stack.requirements)}", file=sys.stderr, flush=True)
    try:
        python, moved = (environment, would_move(environment)) if environment else made(name, stack, home)
    except StackError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return row | {"pins": "FAILED"}
    with tempfile.TemporaryDirectory() as work:

        def inside(part: str) -> None:
            command: list[str | Path] = [python, Path(__file__).with_name("matrix_parts.py"), part, work]
            # Without the texts: the generated stand-in, the same on every machine.
            said(command, JAX_PLATFORMS="cpu", KVJAX_DATA="/nowhere", PYTHONPATH=str(ROOT))

        steps: dict[str, Callable[[], None]] = {part: lambda part=part: inside(part) for part in INSIDE}  # type: ignore[misc]
        steps["pins"] = lambda: _check_pins(python, stack)
        steps["moves none"] = lambda: _check_moved(moved)
        steps["kernels"] = lambda: _check_kernels(python)
        for part in PARTS:
            row[part] = _timed(name, part, steps[part])
    return row


def _timed(name: str, part: str, step: Callable[[], None]) -> str:
    begun = time.monotonic()
    try:
        step()
    except StackError as error:
        print(f"{name}, {part}: {error}", file=sys.stderr, flush=True)
        return "FAILED"
    print(f"{name}, {part}: ok", file=sys.stderr, flush=True)
    return f"ok {time.monotonic() - begun:.0f} s"


def _check_pins(python: Path, stack: Stack) -> None:
    installed = _frozen(python)
    wrong = [
        f"{n} is {installed.get(n, 'absent')}, not {v}"
        for n, v in stack.pins.items()
        if installed.get(n) != v
    ]
    version = said([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
    wrong += [f"Python is {version}, not {stack.python}"] if version != stack.python else []
    if wrong:
        raise StackError("; ".join(wrong))


def _check_moved(moved: Sequence[str]) -> None:
    if moved:
        raise StackError(f"installing kvjax replaces what the stack ships: {', '.join(moved)}")


def _check_kernels(python: Path) -> None:
    # Without the options of pyproject.toml: a stack need not have pytest's plugins.
    options = [
        "-q",
        "-x",
        "-o",
        "addopts=",
        "-m",
        "not slow and not aot and not device",
        "-p",
        "no:cacheprovider",
    ]
    said([python, "-m", "pytest", *options, "tests/kernels"], JAX_PLATFORMS="cpu")


def _drawn(table: dict[str, dict[str, str]]) -> str:
    rows = [["stack", *PARTS], *([name, *row.values()] for name, row in table.items())]
    wide = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, wide)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
