"""``python -m kvjax.serve``: finds the prompt, loads the model, answers or chats."""

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
from kvjax.serve.answer import DEFAULT_TOKENS, answer
from kvjax.serve.arguments import Options, settled
from kvjax.serve.chat import chat, opening
from kvjax.weights import find


def run(options: Options) -> None:
    """Does what the options say; text on standard output, everything about it on standard error.

    Raises:
      InputError, ModelError, PolicyError, RequestError: input that cannot be used, before anything is
        printed.
    """
    with remarks_shown():
        prompt = _find_prompt(options)
        if prompt is None:
            _check_chat(options)
        model = load_model(options.model, options.dtype, options.mesh, options.weight_dtype)
        turn = model.text.template is not None and not options.raw
        if options.system is not None and model.text.template is None:
            raise InputError(
                f"--system needs a chat template, and the model ({model.name}) has none. Put the text into "
                "the prompt, or choose another --model."
            )
        text, source = prompt or ("", "")
        ids = _encoded(model, options, text, source, turn) if prompt else []
        if options.auto:
            new = options.max_new_tokens or DEFAULT_TOKENS
            options, reason = settled(options, model, prompt=len(ids) if prompt else None, answer=new)
            _print_note(reason)
        learned = find(options.policy, model, options.weights)
        for remark in learned.remarks:
            _print_note(remark)
        if hasattr(sys.stdout, "reconfigure"):  # "?" for characters that the terminal cannot show, no error
            sys.stdout.reconfigure(errors="replace")
        if prompt is None:
            chat(model, options)
            return
        if turn:
            _print_note(
                f"{source} is a user's turn in the model's chat template; --raw sends the bare words."
            )

        def write(piece: str) -> None:
            if not options.json:
                print(piece, end="", flush=True)

        done = answer(model, options, ids, source, write, turn=turn, weights=learned.weights)
        if options.json:
            print(done.to_json(model, options), flush=True)
        else:
            print(flush=True)
            print(done.summary(), file=sys.stderr)


def _encoded(model: LanguageModel, options: Options, text: str, source: str, turn: bool) -> list[int]:
    """Token ids of a prompt, as a user's turn or bare; ``source`` says where it is from."""
    try:
        if turn:
            ids = model.text.chat([*opening(options), {"role": "user", "content": text}])
        else:
            ids = model.text.encode(text)
    except ValueError as error:
        raise InputError(f"{source}: {error}") from None
    if not ids:
        raise InputError(f"{source} has no token. Give some text.")
    return ids


@contextlib.contextmanager
def remarks_shown(show: Callable[[str], None] | None = None) -> Iterator[None]:
    """Inside, each remark of the library goes once to ``show``; by default to a line on standard error."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", Remark)
        show_warning = warnings.showwarning

        def show_remark(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
            if issubclass(category, Remark):
                (show or _print_note)(str(message))
            else:
                show_warning(message, category, *args, **kwargs)

        warnings.showwarning = show_remark
        yield


def _print_note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def load_model(
    source: str | None, dtype: str | None, mesh: str | None = None, weight_dtype: str | None = None
) -> LanguageModel:
    """The model; its tokenizer is read too, so that a bad one is refused here.

    Raises:
      InputError: no such model, or one that cannot be read.
    """
    try:
        model = load(source, dtype=dtype, mesh=mesh, weight_dtype=weight_dtype)
        _ = model.text
        return model
    except OSError as error:
        raise InputError(f"--model {source} cannot be read ({error}). Check path and permissions.") from error
    except ValueError as error:
        raise InputError(str(error)) from error


def _check_chat(options: Options) -> None:
    if options.json:
        raise InputError(
            "--json without a prompt has nothing to answer. Give --prompt, --prompt-file or a pipe."
        )
    if options.draft is not None:
        raise InputError("--draft needs a prompt; a chat decodes plainly. Give --prompt, or no --draft.")
    if options.raw:
        raise InputError("--raw is for a prompt, not for a chat. Give --prompt, or leave --raw out.")
    if options.mesh is not None:
        raise InputError("--mesh needs a prompt; a chat runs on one device. Give --prompt, or no --mesh.")
    check_alone("a chat", "--prompt and --prompt-file")


def _find_prompt(options: Options) -> tuple[str, str] | None:
    """The prompt and where it came from; None if a user sits at a terminal and may chat."""
    if options.prompt is not None:
        text, source = options.prompt, "--prompt"
    elif options.prompt_file is not None or not (sys.stdin is None or sys.stdin.isatty()):
        text, source = _read_prompt(options.prompt_file)
    else:
        return None
    if not text:
        raise InputError(f"{source} is empty. Give at least one character, for example --prompt 'Hello'.")
    return text, source


def _read_prompt(file: str | None) -> tuple[str, str]:
    """Text of a file or of standard input, and its source."""
    source = "standard input" if file is None else f"--prompt-file {file}"
    try:
        content = sys.stdin.buffer.read() if file is None else Path(file).read_bytes()
        return content.decode("utf-8"), source
    except OSError as error:
        raise InputError(
            f"{source} cannot be read ({error.strerror}). Give a text file, or --prompt."
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source} is not UTF-8 text (byte {error.start}). Convert it first, for example with iconv."
        ) from error
