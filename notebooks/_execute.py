"""Notebooks from their sources: ``python notebooks/_execute.py [NAME ...]`` writes NAME.ipynb beside each.

A source is a Python file of cells, ``# %%`` for code and ``# %% [markdown]`` for text (jupytext's percent
format), behind a header that may name the runtime. The cells of a notebook run in one namespace from top to
bottom; what a cell prints and the value of its last expression are stored with it, a figure as a picture.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def sources() -> list[Path]:
    """Every notebook source, by name."""
    return sorted(path for path in FOLDER.glob("*.py") if not path.name.startswith("_"))


def metadata(path: Path) -> dict[str, Any]:
    """What the notebook says of itself: ``METADATA``, and of its header the runtime it is meant for."""
    import yaml

    header = path.read_text(encoding="utf-8").split("# ---\n")[1]
    said = yaml.safe_load("\n".join(line.removeprefix("# ") for line in header.splitlines()))["jupyter"]
    return METADATA | {name: said[name] for name in ("accelerator", "colab") if name in said}


def cells(path: Path) -> list[tuple[str, str]]:
    """("markdown" or "code", text) of each cell of a source, without the header before the first."""
    _, *parts = ("\n" + path.read_text(encoding="utf-8")).split("\n# %%")
    found = []
    for part in parts:
        mark, _, body = part.partition("\n")
        if mark.strip() == "[markdown]":
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            found.append(("markdown", "\n".join(lines)))
        else:
            found.append(("code", body.strip()))
    return found


def execute(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs a source.

    Returns:
      The notebook (nbformat 4.5) and the names it defined.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    made, count = [], 0
    for index, (kind, text) in enumerate(cells(path)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{index}", "metadata": {}}
        if kind == "code":
            count += 1
            cell |= {"execution_count": count, "outputs": _outputs(text, names, count)}
        made.append(cell | {"source": text.splitlines(keepends=True)})
    return {"cells": made, "metadata": metadata(path), "nbformat": 4, "nbformat_minor": 5}, names


def _outputs(text: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """What one cell shows."""
    tree = ast.parse(text)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        found.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "savefig"):
            picture = io.BytesIO()
            value.savefig(picture, format="png", dpi=80, metadata={"Software": None})
            data["image/png"] = base64.b64encode(picture.getvalue()).decode()
        found.append(
            {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
        )
    return found


def main() -> None:
    """Writes every notebook, or those that are named, each in its own process: one sets JAX's devices."""
    chosen = [path for path in sources() if not sys.argv[1:] or path.stem in sys.argv[1:]]
    for path in chosen if len(chosen) > 1 else ():
        subprocess.run([sys.executable, __file__, path.stem], check=True)
    if len(chosen) == 1:
        write(chosen[0])


def write(path: Path) -> None:
    """Executes a source, and writes its notebook; says what that took of a processor."""
    file = path.with_suffix(".ipynb")
    notebook = json.dumps(execute(path)[0], ensure_ascii=False, indent=1)
    file.write_text(notebook + "\n", encoding="utf-8")
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = used.ru_utime + used.ru_stime
    print(f"{file}: {seconds:.0f} processor seconds, {used.ru_maxrss / 2**20:.1f} GiB", file=sys.stderr)


if __name__ == "__main__":
    main()
