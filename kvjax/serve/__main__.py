"""The command ``python -m kvjax.serve``."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code.

    Args:
      argv: the words after ``python -m kvjax.serve``; None reads them from the process.
    """
    return cli.run(_serve, argv)


def _serve(words: Sequence[str]) -> None:
    from kvjax.serve.arguments import parse
    from kvjax.serve.command import run

    run(parse(words))


if __name__ == "__main__":
    cli.start(main)
