"""A chat in the terminal.

A turn reads what the engine does not hold any more: the new line, where the policy's state after a text is
the same whatever follows; else the conversation from the last place where it is, or from its beginning
(policies that judge a prompt as a whole).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kvjax.cli import InputError
from kvjax.engine import Engine
from kvjax.loading import LanguageModel
from kvjax.serve import facts
from kvjax.serve.answer import STREAMED, reply
from kvjax.serve.arguments import Options

WELCOME = "Model {name}, policy {policy}. /clear forgets the conversation, /exit or Ctrl-D leaves."


def chat(model: LanguageModel, options: Options, ask: Callable[[str], str] | None = None) -> None:
    """Talks until the user leaves. Ctrl-C stops an answer; what was written of it stays in the history.

    Args:
      model: who answers.
      options: as for one prompt.
      ask: shows a prompt and returns a line, EOFError at the end; the terminal by default.
    """
    with Engine(
        model,
        policy=options.policy,
        weights=options.weights,
        max_rows=1,
        chunk=options.chunk,
        segment=STREAMED,
    ) as engine:
        _talk(engine, model, options, ask or _terminal())


def _talk(engine: Engine, model: LanguageModel, options: Options, ask: Callable[[str], str]) -> None:
    history: list[dict[str, Any]] = []
    print(WELCOME.format(name=model.name, policy=options.policy), file=sys.stderr)
    while True:
        try:
            line = ask("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # clears the line, as in a shell
            print()
            continue
        if line == "/exit":
            return
        if line == "/clear":
            history.clear()
        elif line.startswith("/"):
            print(f"{line} is no command. Use /clear or /exit.", file=sys.stderr)
        elif line:
            _turn(engine, model, options, history, line)


def _turn(
    engine: Engine, model: LanguageModel, options: Options, history: list[dict[str, Any]], line: str
) -> None:
    """One question and its answer, both added to the history; a refused question is not."""
    asked = [*history, {"role": "user", "content": line}]
    said: list[str] = []

    def write(piece: str) -> None:
        said.append(piece)
        print(piece, end="", flush=True)

    try:
        done = reply(engine, model, options, _ids(model, asked), "the conversation", write)
    except InputError as error:
        print(f"error: {error} Or forget the conversation with /clear.", file=sys.stderr)
        return
    except KeyboardInterrupt:
        print(" [stopped]", flush=True)
    else:
        print(flush=True)
        print(facts.line(done), file=sys.stderr)
    history[:] = [*asked, {"role": "assistant", "content": "".join(said)}]


def _ids(model: LanguageModel, messages: list[dict[str, Any]]) -> list[int]:
    try:
        return model.text.chat(messages)
    except (ImportError, ValueError) as error:
        raise InputError(str(error)) from error


def _terminal() -> Callable[[str], str]:
    """``input``, with line editing where the platform has it."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    return input
