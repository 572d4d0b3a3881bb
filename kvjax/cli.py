"""What every command shares: how its options are declared, its exit codes, where compiled programs are kept.

A command's options are a dataclass; ``option`` says of a field what argparse needs to know of its flag::

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        rows: int = cli.option(16, "texts that run at once")

``parse(Options, words, prog=...)`` reads the words and gives the dataclass, which checks itself further in
``__post_init__``. Of a command with subcommands each is such a class (``parse_command``).

``main`` of a command calls ``run``, which turns every outcome into an exit code:
0 done; 2 bad input, one sentence on standard error; 130 stopped by Ctrl-C; 141 the reader went away.
``if __name__ == "__main__": cli.start(main)`` makes a process of it. Nothing global is set before ``start``.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import re
import sys
import tempfile
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kvjax.errors import UserError
from kvjax.programs import Folder
from kvjax.types import DTYPES, WEIGHT_DTYPES

PROGRAMS = 2**30
"""Most bytes of compiled programs that commands keep, unless ``KVJAX_CACHE_SIZE`` says otherwise."""

Command = TypeVar("Command")

OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {
        "metavar": "DIR|FILE|HUB_ID",
        "help": "a folder in Hugging Face's format, a GGUF file, package:NAME for the GGUF file in an "
        "installed package, or a hub id (default: the small model in kvjax)",
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
    "--weight-dtype": {
        "choices": WEIGHT_DTYPES,
        "help": "quantise weights to it while they are read; embedding and head keep 8 bits (default: no)",
    },
    "--out": {"metavar": "DIR", "type": Path, "help": "folder of results"},
    "--json": {"action": "store_true", "help": "as JSON lines"},
    "--progress": {
        "action": argparse.BooleanOptionalAction,
        "help": "the progress bar on standard error (default: on terminals)",
    },
}
"""Options of more than one command."""


class InputError(UserError):
    """A request to a command that cannot be fulfilled: the call, the rule, the way out in one sentence."""


# --- options -------------------------------------------------------------------------------------


def option(default: Any = None, help: str | None = None, metavar: str | None = None, **how: Any) -> Any:
    """A field of a command's dataclass, and what its option is; the field's type says how it is read.

    Args:
      default: of the field; the help shows it, unless its text mentions a default.
      help, metavar: as argparse takes them.
      how: more for argparse, stronger than the field's type. Beside that ``flag``, if it is not the field's
        name, without dashes for a positional word; ``group``, the title of the group that begins with this
        option; ``alone``, a word that options share of which only one may be given; ``add``, a function that
        adds the option to a parser.
    """
    declared = {"help": help, "metavar": metavar} | how
    declared = {name: value for name, value in declared.items() if value is not None}
    return dataclasses.field(default=default, metadata={"option": declared})


def shared(name: str, default: Any = None, help: str | None = None, **how: Any) -> Any:
    """``option`` of ``OPTIONS``, with what this command says otherwise."""
    return option(default, **OPTIONS[name] | ({"help": help} if help else {}) | how)


def add(parser: argparse._ActionsContainer, *names: str, **changes: Any) -> None:
    """Adds options of ``OPTIONS`` to a parser, with what this command says otherwise."""
    for name in names:
        parser.add_argument(name, **OPTIONS[name] | changes)


def parse(command: type[Command], words: Sequence[str], **about: Any) -> Command:
    """The options of a command, whose dataclass is ``command``; ``about`` is for ``Parser``.

    Raises:
      InputError: an unknown word, a value that is out of range; or what the dataclass raises.
    """
    parser = Parser(**about)
    _declare(parser, command, {})
    return command(**_values(parser, words))


def parse_command(
    commands: Mapping[str, type[Any]], words: Sequence[str], defaults: Mapping[str, Any] = {}, **about: Any
) -> tuple[str, Any]:
    """The name of one of several commands, and its options.

    Args:
      commands: a dataclass for each name; the first line of its docstring is the help.
      words: the name and its options.
      defaults: by command and field, where they differ from those of the dataclass.
      about: of the ``Parser``.

    Raises:
      InputError: as ``parse``; or no such command.
    """
    parser = Parser(**about)
    several = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in commands.items():
        line = (command.__doc__ or "").splitlines()[0]
        _declare(several.add_parser(name, help=line, description=line), command, defaults.get(name, {}))
    values = _values(parser, words)
    name = values.pop("command")
    return name, commands[name](**values)


def _values(parser: Parser, words: Sequence[str]) -> dict[str, Any]:
    values = vars(parser.parse_args(words))
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _declare(parser: argparse.ArgumentParser, command: type, defaults: Mapping[str, Any]) -> None:
    """Adds the options that the fields of a dataclass declare."""
    into: argparse._ActionsContainer = parser
    alone: dict[str, argparse._ActionsContainer] = {}
    hints = typing.get_type_hints(command)
    for field in dataclasses.fields(command):
        if "option" not in field.metadata:
            continue
        how = _of_type(hints[field.name], field.metadata["option"])
        flag = how.pop("flag", "--" + field.name.replace("_", "-"))
        if title := how.pop("group", None):
            into = parser.add_argument_group(title)
        if word := how.pop("alone", None):
            required = how.pop("required", False)
            alone[word] = alone.get(word) or into.add_mutually_exclusive_group(required=required)
        if "add" in how:
            how["add"](into)
            continue
        default = defaults.get(field.name, field.default)
        if default not in (None, ()) and default is not False and "default" not in how.get("help", ""):
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
            how["help"] = f"{how.get('help', '')} (default: {shown})".strip()
        if flag.startswith("-"):
            how["dest"] = field.name
        # Where an option is left out, the dataclass knows the default.
        how["default"] = defaults.get(field.name, argparse.SUPPRESS)
        alone.get(word, into).add_argument(flag, **how)


def _of_type(hint: Any, declared: dict[str, Any]) -> dict[str, Any]:
    """What was declared of an option, and what follows from its field's type."""
    kind = next(kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None))
    how: dict[str, Any] = {}
    if kind is bool:
        how["action"] = "store_true" if hint is bool else argparse.BooleanOptionalAction
    elif kind is int:
        how |= {"type": whole(), "metavar": "N"}
    elif kind is float:
        how |= {"type": float, "metavar": "X"}
    elif kind is Path:
        how["type"] = Path
    if typing.get_origin(hint) is tuple and not {"action", "type"} & declared.keys():
        how["nargs"] = "+"
    return how | declared


class Parser(argparse.ArgumentParser):
    """argparse with our errors: it raises ``InputError``, and nothing is abbreviated.

    ``examples`` are what --help ends with, as text or as a function that makes it.
    """

    def __init__(self, *args: Any, examples: str | Callable[[], str] = "", **how: Any) -> None:
        if examples:
            how["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, **{"allow_abbrev": False} | how)
        self._examples = examples

    def format_help(self) -> str:
        """What --help prints."""
        if self._examples:
            self.epilog = self._examples if isinstance(self._examples, str) else self._examples()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raises what argparse found wrong.

        Raises:
          InputError: always.
        """
        if message.endswith("."):  # a sentence of ours begins with the value, which follows its option
            raise InputError(re.sub(r"^argument (\S+): ", r"\1 ", message))
        raise InputError(f"{message}. See {self.prog} --help.")


# --- values --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value must be; an argparse type, whose errors the parser puts behind the option.

    Attributes:
      read: makes the value of a word, or raises ValueError.
      holds: is the value legal?
      rule: what it must be, in words.
    """

    read: Callable[[str], Any]
    holds: Callable[[Any], bool]
    rule: str

    def __call__(self, text: str) -> Any:
        """The value.

        Raises:
          ArgumentTypeError: none, or not a legal one.
        """
        try:
            value = self.read(text)
            if self.holds(value):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text} is out of range. Give {self.rule}.")


def whole(least: int = 1, what: str = "a whole number") -> Rule:
    """A whole number from ``least``."""
    return Rule(int, lambda value: value >= least, f"{what}, {least} or more")


def numbers(least: int = 1) -> Callable[[str], list[int]]:
    """Whole numbers from ``least``, comma-separated."""
    one = whole(least)
    return lambda text: [one(word) for word in words(text)] or [one("")]


def words(text: str) -> list[str]:
    """Comma-separated words."""
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

    None where nothing is to be kept (``KVJAX_CACHE=off``), or where JAX has a cache folder already.
    """
    from pallas_kernels.records import cache_folder

    if environment.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    folder = cache_folder(environment, system)
    return None if folder is None else folder / "programs"


def programs_size(environment: Mapping[str, str]) -> int:
    """Most bytes of that folder: ``KVJAX_CACHE_SIZE``, as 512MiB, else ``PROGRAMS``.

    Raises:
      InputError: a size that cannot be read.
    """
    text = environment.get("KVJAX_CACHE_SIZE", "")
    match = re.fullmatch(r"(\d+)\s*(KiB|MiB|GiB)", text.strip())
    if text and match is None:
        raise InputError(f"KVJAX_CACHE_SIZE={text} is not a size. Write it as 512MiB or 2GiB.")
    return PROGRAMS if match is None else int(match[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[match[2][0]]


def keep_programs() -> None:
    """Switches JAX's persistent compilation cache on for this process, and for every program however small.

    Its size is bounded (``kvjax.programs.Folder``). If the folder cannot be written, one line on standard
    error says so and the command works without.
    """
    import jax

    try:
        folder = programs_folder(os.environ)
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        bounded = Folder(folder, programs_size(os.environ))
        bounded.bound()
    except (OSError, RuntimeError, InputError) as error:  # RuntimeError: no home folder
        print(
            f"note: compiled programs are not kept ({error}). KVJAX_CACHE=DIR names another folder, "
            "KVJAX_CACHE=off keeps none.",
            file=sys.stderr,
        )
        return
    jax.monitoring.register_event_listener(bounded.on_event)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
