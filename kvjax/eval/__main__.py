"""The commands ``python -m kvjax.eval``."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit code.

    Args:
      argv: the words after ``python -m kvjax.eval``; None reads them from the process.
    """
    return cli.run(_evaluate, argv)


def _evaluate(words: Sequence[str]) -> None:
    from kvjax.eval import commands

    commands.do(words)


if __name__ == "__main__":
    cli.start(main)
