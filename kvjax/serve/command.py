"""The job of ``python -m kvjax.serve``: find the prompt, load the model, answer or chat."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvjax.cli import InputError, check_alone
from kvjax.decode import Remark
from kvjax.loading import LanguageModel, load
from kvjax.serve import facts
from kvjax.serve.answer import answer
from kvjax.serve.arguments import Options, settled
from kvjax.serve.chat import chat
from kvjax.weights import find


def run(options: Options) -> None:
    """Does what the options say; text on standard output, everything about it on standard error.

    Raises:
      InputError, ModelError, PolicyError, RequestError: input that cannot be used, before anything is
        printed.
    """
    with notes():
        _run(options)


@contextlib.contextmanager
def notes(tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Inside, what the library remarks is told once: to ``tell``, or in a line on standard error."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", Remark)
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, Remark):
                (tell or note)(str(message))
            else:
                shown(message, category, *where, **more)

        warnings.showwarning = show
        yield


def note(text: str) -> None:
    """A line on standard error."""
    print(f"note: {text}", file=sys.stderr)


def _run(options: Options) -> None:
    given = _prompt(options)
    if given is None and options.json:
        raise InputError(
            "--json without a prompt has nothing to answer. Give --prompt, --prompt-file or a pipe."
        )
    if given is None and options.mesh is not None:
        raise InputError(
            "--mesh answers a prompt, and a chat runs on one device. Give --prompt, or no --mesh."
        )
    if given is None:
        check_alone("a chat", "--prompt and --prompt-file")
    model = loaded(options.model, options.dtype, options.mesh)
    if options.auto:
        options, said = settled(options, model)
        note(said)
    learned = find(options.policy, model, options.weights)
    for remark in learned.remarks:
        note(remark)
    # A terminal that cannot show a character gets a question mark instead of an error.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    if given is None:
        chat(model, options)
        return
    text, source = given
    try:
        ids = model.text.encode(text)
    except ValueError as error:
        raise InputError(f"{source}: {error}") from None
    if not ids:
        raise InputError(f"{source} holds no token. Give some text.")
    write = (lambda piece: None) if options.json else say
    done = answer(model, options, ids, source, write, weights=learned.weights, continues=True)
    if options.json:
        print(facts.to_json(done, model, options), flush=True)
        return
    print(flush=True)
    print(facts.line(done), file=sys.stderr)


def say(piece: str) -> None:
    """Text to standard output, at once."""
    print(piece, end="", flush=True)


def loaded(source: str | None, dtype: str | None, mesh: str | None = None) -> LanguageModel:
    """The model with its tokenizer read.

    Raises:
      InputError: no such model, or one that cannot be read.
    """
    try:
        model = load(source, dtype=dtype, mesh=mesh)
        _ = model.text
        return model
    except OSError as error:
        raise InputError(f"--model {source} cannot be read ({error}). Check path and permissions.") from error
    except ValueError as error:
        raise InputError(str(error)) from error


def _prompt(options: Options) -> tuple[str, str] | None:
    """The prompt and where it came from; None when a person sits there to chat."""
    if options.prompt is not None:
        text, source = options.prompt, "--prompt"
    elif options.prompt_file is not None:
        text, source = _file(options.prompt_file), f"--prompt-file {options.prompt_file}"
    elif sys.stdin is None or sys.stdin.isatty():
        return None
    else:
        text, source = _decoded(sys.stdin.buffer.read(), "standard input"), "standard input"
    if not text:
        raise InputError(f"{source} is empty. Give at least one character, for example --prompt 'Hello'.")
    return text, source


def _file(name: str) -> str:
    try:
        content = Path(name).read_bytes()
    except OSError as error:
        raise InputError(
            f"--prompt-file {name} cannot be read ({error.strerror}). Give a text file, or --prompt."
        ) from error
    return _decoded(content, f"--prompt-file {name}")


def _decoded(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source} is not UTF-8 text (byte {error.start}). Convert it first, for example with iconv."
        ) from error
