"""What every command shares: its parser, its usual options, its exit codes, where compiled programs are kept.

``main`` of a command calls ``run``, which turns every outcome into an exit code:
0 done; 2 bad input, one sentence on standard error; 130 stopped by Ctrl-C; 141 the reader went away.
``if __name__ == "__main__": cli.start(main)`` makes a process of it. Nothing global is set before ``start``.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvjax.errors import UserError
from kvjax.models.hf_config import DTYPES

OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {
        "metavar": "DIR|HUB_ID",
        "help": "a folder in Hugging Face's format or a hub id (default: the small model in the package)",
    },
    "--policy": {"metavar": "SPEC", "help": "what the KV cache keeps, in the one-string form"},
    "--mesh": {
        "metavar": "data=2,tensor=4",
        "help": "devices: data cuts rows, tensor KV heads and the model, context the model (default: one)",
    },
    "--dtype": {
        "choices": DTYPES,
        "help": "of weights and cache (default: as stored; the package's model float32)",
    },
    "--out": {"metavar": "DIR", "type": Path, "help": "folder of results"},
    "--json": {"action": "store_true", "help": "as JSON lines"},
    "--progress": {
        "action": argparse.BooleanOptionalAction,
        "help": "the bar on standard error (default: on terminals)",
    },
}
"""Options of more than one command."""


class InputError(UserError):
    """Something asked of a command that cannot be done: the call, the rule, the way out in one sentence."""


# --- the parser ----------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """argparse with our errors: it raises ``InputError``, and nothing is abbreviated.

    ``ending`` makes what --help ends with, when somebody asks for it.
    """

    def __init__(self, *args: Any, ending: Callable[[], str] | None = None, **how: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | how)
        self._ending = ending

    def format_help(self) -> str:
        """What --help prints."""
        self.epilog = self._ending() if self._ending else self.epilog
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raises what argparse found wrong.

        Raises:
          InputError: always.
        """
        # Our own checks already name the option; argparse would name it twice.
        message = re.sub(r"^argument (\S+: )?(?=--)", "", message)
        raise InputError(message if message.endswith(".") else f"{message}. See {self.prog} --help.")


def add(parser: argparse._ActionsContainer, *names: str, **changes: Any) -> None:
    """Adds options of ``OPTIONS``, with what this command says otherwise."""
    for name in names:
        parser.add_argument(name, **OPTIONS[name] | changes)


def number(flag: str, kind: type, legal: Callable[[float], bool], rule: str) -> Callable[[str], Any]:
    """An argparse type that names the option, the rule and the way out."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not legal(value):
            raise argparse.ArgumentTypeError(f"{flag} {text} is out of range. Give {rule}.")
        return value

    return read


def whole(flag: str, least: int = 1, what: str = "a whole number") -> Callable[[str], int]:
    """An argparse type: a whole number from ``least``."""
    return number(flag, int, lambda value: value >= least, f"{what}, {least} or more")


def numbers(flag: str, least: int = 1) -> Callable[[str], list[int]]:
    """An argparse type: whole numbers from ``least``, comma-separated."""
    one = whole(flag, least)
    return lambda text: [one(word) for word in words(text)] or [one("")]


def words(text: str) -> list[str]:
    """An argparse type: comma-separated words."""
    return [word.strip() for word in text.split(",") if word.strip()]


def check_alone(command: str, others: str) -> None:
    """Refuses a command that several processes would all do.

    Args:
      command: as it is called.
      others: what runs in several processes instead.

    Raises:
      InputError: more processes than this one.
    """
    import jax

    if jax.distributed.is_initialized() and jax.process_count() > 1:  # asked alone, it would take the devices
        raise InputError(
            f"{command} runs in one process, and these are {jax.process_count()}. Start it without "
            f"kvjax.launch, on the devices of one machine; {others} run in several."
        )


# --- outcomes ------------------------------------------------------------------------------------


def run(command: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit code.

    Args:
      command: given the words of the command line; gives its exit code, None for 0.
      argv: these words; None reads them from the process.
    """
    try:
        return command(sys.argv[1:] if argv is None else argv) or 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # What is left in the buffer has no reader; without this the interpreter complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except UserError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2


def start(main: Callable[[], int]) -> NoReturn:
    """Makes this process the command: keeps its compiled programs, runs it, leaves with its exit code."""
    gc.freeze()  # what was imported stays: looking through it again and again is a tenth of a short run
    keep_programs()
    code = main()
    if code == 130:
        # The compiler's threads may still be at work, and tearing them down crashes the interpreter.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


# --- compiled programs ---------------------------------------------------------------------------


def programs_folder(environment: Mapping[str, str], system: str = sys.platform) -> Path | None:
    """Where commands keep compiled programs: ``KVJAX_CACHE``, else the user's cache folder of the platform.

    None where nothing is to be kept (``KVJAX_CACHE=off``), or where JAX has been told a folder of its own.
    """
    from pallas_kernels.records import cache_folder

    if environment.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    folder = cache_folder(environment, system)
    return None if folder is None else folder / "programs"


def keep_programs() -> None:
    """Switches JAX's persistent compilation cache on for this process, and for every program however small.

    A folder that cannot be written is told once on standard error; the command works without.
    """
    import jax

    try:
        folder = programs_folder(os.environ)
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        print(
            f"note: compiled programs are not kept ({error}). KVJAX_CACHE=DIR names another folder, "
            "KVJAX_CACHE=off keeps none.",
            file=sys.stderr,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
