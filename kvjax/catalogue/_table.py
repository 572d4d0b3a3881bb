"""README's table of methods, made by discovery: ``python -m kvjax.catalogue``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from kvjax import cli
from kvjax.algebra import PLACES, Part
from kvjax.catalogue import _discovery as discovery
from kvjax.catalogue._parse import PRESETS, policy

BEGIN, END = "<!-- methods: python -m kvjax.catalogue --write README.md -->", "<!-- end of methods -->"


def table() -> str:
    """One row per part, by place, and one for keeping everything; in Markdown."""
    rows = ["| word | method | place | presets |", "|---|---|---|---|"]
    order = lambda kind: (list(PLACES).index(kind.place), kind.wraps, kind.name)  # noqa: E731
    parts = sorted(discovery.parts().values(), key=order)
    full = next(method for method in discovery.methods() if method.name == "full")
    rows.append(f"| `full` | {full.summary} | – | `full` |")
    for kind in parts:
        summary, source = discovery.described(importlib.import_module(kind.__module__))
        method = f"{summary} [Paper]({source})" if source else summary
        place = "wrapper" if kind.wraps else kind.place
        rows.append(f"| `{kind.name}` | {method} | {place} | {', '.join(presets(kind))} |")
    return "\n".join(rows)


def presets(kind: type[Part]) -> list[str]:
    """Names of the presets that use a part."""
    return [f"`{name}`" for name in PRESETS if any(isinstance(part, kind) for part in policy(name).chain)]


def placed(readme: str) -> str:
    """The text with a new table between its markers.

    Raises:
      InputError: the markers are missing.
    """
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise cli.InputError(f"The file has no place for the table. Add the lines {BEGIN} and {END}.")
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table or writes it between the markers of a file; returns the exit code."""
    return cli.run(_show, argv)


def _show(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m kvjax.catalogue", description=__doc__)
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="write the table between the markers of this file"
    )
    file = parser.parse_args(words).write
    if file is None:
        print(table())
        return
    try:
        file.write_text(placed(file.read_text(encoding="utf-8")), encoding="utf-8")
    except OSError as error:
        raise cli.InputError(
            f"--write: cannot read and write {file} ({error.strerror}). Give a file with the markers."
        ) from None
