"""The reference: which names are public, and a page for each part of kvjax.

Sources are read, not imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from docs.site.text import ROOT


def modules() -> dict[str, tuple[str, ...]]:
    """Every public module of kvjax with its public names.

    A module is public unless a part of its name begins with an underscore. Its public names are those of
    ``__all__``, or else the functions and classes that it defines without one.
    """
    named = {}
    for file in sorted((ROOT / "kvjax").rglob("*.py")):
        path = file.relative_to(ROOT).with_suffix("")
        parts = path.parts[:-1] if path.name == "__init__" else path.parts
        if not any(part.startswith("_") for part in parts):
            named[".".join(parts)] = tuple(_names(file))
    return named


def _names(file: Path) -> Iterator[str]:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            yield from ast.literal_eval(node.value)
            return
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def pages() -> dict[str, str]:
    """A page for kvjax and one for each module or package in it; mkdocstrings fills them from docstrings."""
    texts: dict[str, list[str]] = {}
    for module, names in modules().items():
        page = ".".join(module.split(".")[:2])
        members = "".join(f"\n        - {name}" for name in names) or " []"
        options = f"    options:\n      heading_level: 2\n      members:{members}"
        texts.setdefault(page, [f"# {page}"]).append(f"::: {module}\n{options}")
    return {f"api/{page}.md": "\n\n".join(blocks) + "\n" for page, blocks in texts.items()}
