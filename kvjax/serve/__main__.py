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


def _serve(words: Sequence[str]) -> int:
    if list(words[:1]) != ["http"]:
        from kvjax.serve.arguments import parse
        from kvjax.serve.command import run

        run(parse(words))
        return 0
    from kvjax.serve.http import check_installed
    from kvjax.serve.http.arguments import parse as parse_http

    options = parse_http(words[1:])
    check_installed("python -m kvjax.serve http")
    from kvjax.serve.http.command import run as serve_http

    return serve_http(options)


if __name__ == "__main__":
    cli.start(main)
