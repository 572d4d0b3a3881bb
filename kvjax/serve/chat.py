"""A chat in the terminal.

A turn reads only what the engine does not hold any more: the new line, if the policy's state after a text
does not depend on what follows; else the conversation from the last point where that holds, or from its
beginning (policies that judge a prompt as a whole).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from kvjax.cli import InputError
from kvjax.engine import Engine
from kvjax.loading import LanguageModel
from kvjax.serve.answer import TOKENS_PER_PIECE, Answer, answer_with_engine
from kvjax.serve.arguments import Options


def opening(options: Options) -> list[dict[str, Any]]:
    """The messages before the user's first: the system's, if there is one."""
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def chat(model: LanguageModel, options: Options, ask: Callable[[str], str] | None = None) -> None:
    """Talks until the user leaves. Ctrl-C stops an answer; what was written of it stays in the history.

    Args:
      model: that answers.
      options: as for one prompt.
      ask: shows a prompt and returns a line, EOFError at the end; the terminal by default.
    """
    if ask is None:
        with contextlib.suppress(ImportError):  # gives ``input`` line editing, if the platform has it
            import readline  # noqa: F401
        ask = input
    history = opening(options)
    with Engine(
        model,
        policy=options.policy,
        weights=options.weights,
        max_rows=1,
        chunk=options.chunk,
        segment=TOKENS_PER_PIECE,
    ) as engine:
        print(
            f"Model {model.name}, policy {options.policy}. /clear forgets the conversation, /exit or Ctrl-D "
            "leaves.",
            file=sys.stderr,
        )
        while True:
            try:
                line = ask("> ").strip()
                if line == "/exit":
                    return
                if line == "/clear":
                    history = opening(options)
                elif line.startswith("/"):
                    print(f"{line} is not a command. Use /clear or /exit.", file=sys.stderr)
                elif line:
                    _turn(engine, model, options, history, line)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:  # clears the line, as in a shell; or came when the answer was complete
                print()


def _turn(
    engine: Engine, model: LanguageModel, options: Options, history: list[dict[str, Any]], line: str
) -> None:
    """One question and its answer; adds both to the history, unless the question is refused."""
    messages = [*history, {"role": "user", "content": line}]
    written: list[str] = []

    def write(piece: str) -> None:
        written.append(piece)
        print(piece, end="", flush=True)

    answer: Answer | None
    try:
        try:
            ids = model.text.chat(messages)
        except ValueError as error:
            raise InputError(str(error)) from error
        answer = answer_with_engine(engine, model, options, ids, write)
    except InputError as error:
        print(f"error: {error} Or forget the conversation with /clear.", file=sys.stderr)
        return
    except KeyboardInterrupt:
        answer = None
    history[:] = [*messages, {"role": "assistant", "content": "".join(written)}]
    print(" [stopped]" if answer is None else "", flush=True)
    if answer is not None:
        print(answer.summary(), file=sys.stderr)
