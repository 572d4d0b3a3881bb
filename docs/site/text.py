"""Markdown of the repository on a page of the site: links, sections, notebooks."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]

FENCE = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)[ \t]*$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
IMAGES = {"image/png": "png", "image/jpeg": "jpeg"}


def read(source: str) -> str:
    """A file of the repository."""
    return (ROOT / source).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """The text without its blocks of code."""
    return "".join(FENCE.split(text)[::2])


def links(text: str) -> list[str]:
    """Targets of the links and pictures, in order."""
    return LINK.findall(prose(text))


def is_outward(target: str) -> bool:
    """Does the link leave the site?"""
    return bool(urlsplit(target).scheme)


def malformed(targets: Iterable[str]) -> list[str]:
    """Those of the outward links that no browser could follow; nothing is fetched.

    Good is https with a host that has a dot, or http to this computer, and no punctuation at the end. A
    notebook's picture is its own data, and leads nowhere.
    """
    bad = []
    for target in filter(is_outward, targets):
        if target.startswith("data:image/"):
            continue
        url = urlsplit(target)
        local = url.scheme == "http" and url.hostname in ("127.0.0.1", "localhost")
        public = url.scheme == "https" and "." in (url.hostname or "").strip(".")
        if not (local or public) or re.search(r"[\s<>]|[.,;:]$", target):
            bad.append(target)
    return bad


def resolved(target: str, page: str) -> str:
    """The path, from the root, that an inner link of a page leads to; "" for one to the page itself."""
    path = target.partition("#")[0]
    return os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else ""


def moved(text: str, source: str, page: str) -> str:
    """A source's text with links that hold on a page.

    A link to a folder leads to its README, one to a notebook to the notebook's page.
    """

    def link(match: re.Match[str]) -> str:
        target = match[1]
        path = resolved(target, source)
        if is_outward(target) or not path:
            return target
        if (ROOT / path).is_dir():
            path += "/README.md"
        path = re.sub(r"\.ipynb$", ".md", path)
        _, hash_, anchor = target.partition("#")
        return os.path.relpath(path, os.path.dirname(page) or ".") + hash_ + anchor

    pieces = FENCE.split(text)
    pieces[::2] = [LINK.sub(link, piece) for piece in pieces[::2]]
    return "".join(pieces)


def section(source: str, title: str, page: str) -> str:
    """The section of a source under a heading, with the sections below it.

    Raises:
      ValueError: there is no such heading, or several.
    """
    text = read(source)
    # Blocks of code may have lines that look like headings.
    plain = FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    heads = [(m.start(), len(m[1]), m[2]) for m in re.finditer(r"^(#+) (.+)$", plain, re.MULTILINE)]
    matching = [at for at, head in enumerate(heads) if head[2] == title]
    if len(matching) != 1:
        raise ValueError(
            f"section({source!r}, {title!r}): the file has {len(matching)} headings of that name."
        )
    start, level, _ = heads[matching[0]]
    end = next((at for at, deep, _ in heads[matching[0] + 1 :] if deep <= level), len(text))
    return moved(text[start:end].strip(), source, page)


def picture(source: str, page: str) -> str:
    """The first picture of a source."""
    line = next(line for line in read(source).splitlines() if line.startswith("!["))
    return moved(line, source, page)


def notebook(source: str) -> str:
    """An executed notebook: its words, its code, what it printed and drew."""
    page, out = source.removesuffix(".ipynb") + ".md", []
    for cell in json.loads(read(source))["cells"]:
        text = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            out.append(moved(text, source, page))
        elif text:
            out.append(f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            out += list(_shown(output))
    out.append(f'<a href="../{Path(source).name}" download>The notebook</a>')
    return "\n\n".join(out)


def _shown(output: dict) -> Iterable[str]:
    data = output.get("data", {})
    for kind, format_ in IMAGES.items():
        if kind in data:
            yield f"![output](data:image/{format_};base64,{''.join(data[kind]).strip()})"
            return
    printed = "".join(output.get("text", data.get("text/plain", ()))).rstrip()
    if printed:
        yield f"```text\n{printed}\n```"


COLUMN = r" {0,2}([\w.]+(?:, [\w.]+)*) {2,}(?=\S)"
COLUMNS = re.compile(rf"(?:(?<=\n\n)|\A)(?:{COLUMN}.*(?:\n|\Z)){{2,}}(?=\n|\Z)")


def listed(text: str) -> str:
    """A docstring with paragraphs of ``names   what they are`` as lists: Markdown would join their lines."""
    return COLUMNS.sub(lambda block: re.sub(f"^{COLUMN}", r"* `\1`: ", block[0], flags=re.MULTILINE), text)


def docstring(text: str) -> str:
    """A docstring's prose as Markdown: indented paragraphs are formulas or commands, whose lines stay."""
    blocks = []
    for block in filter(None, text.strip("\n").split("\n\n")):
        lines = block.splitlines()
        indented = all(line.startswith("  ") for line in lines)
        commands = all(line.startswith("python ") for line in lines)
        code = indented or commands
        blocks.append(f"```text\n{textwrap.dedent(block)}\n```" if code else block.replace("``", "`"))
    return "\n\n".join(blocks)
