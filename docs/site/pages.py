"""Every page of the site: what the repository has already, and what is generated from it.

A page has the path of its source, so links between sources hold as they stand. Nothing is copied by hand: a
page is a source, sections of sources, or made from the catalogue, the docstrings or the results.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any

from docs.site import api, methods
from docs.site.text import (
    ROOT,
    docstring,
    is_outward,
    links,
    moved,
    notebook,
    picture,
    prose,
    read,
    resolved,
    section,
)
from kvjax import catalogue
from kvjax.eval import tasks
from kvjax.eval.report import front
from kvjax.eval.report.table import markdown

SOURCES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "kvjax/DESIGN.md",
    "kvjax/assets/**/README.md",
    "notebooks/README.md",
    "pallas_kernels/**/*.md",
    "results/**/*.md",
)
"""Files that are pages as they stand."""

TRAINED = ("traces", "gates", "duo", "ranker.__main__", "phi.__main__", "retention", "queries")
"""Modules of ``train`` that are commands; their docstrings are the page about training."""

DESIGN = "kvjax/DESIGN.md"


def pages(points: Sequence[front.Point]) -> dict[str, str]:
    """The text of every page by its path.

    Args:
      points: measured policies, for the methods' curves (``methods.measured``).
    """
    texts = {path: moved(read(path), path, path) for path in sources()}
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        texts[f"notebooks/{file.stem}.md"] = notebook(f"notebooks/{file.name}")
    texts |= {
        "guide/concepts.md": _concepts("guide/concepts.md"),
        "guide/evaluate.md": _evaluate("guide/evaluate.md"),
        "guide/train.md": _train(),
        "guide/method.md": _method("guide/method.md"),
    }
    texts |= methods.pages(points) | api.pages()
    texts |= _folders(texts)
    return texts


def sources() -> list[str]:
    """Paths of the files that are pages as they stand."""
    return sorted(file.relative_to(ROOT).as_posix() for form in SOURCES for file in ROOT.glob(form))


def files(texts: dict[str, str]) -> list[str]:
    """Files of the repository that a page links to or shows, and that are not pages."""
    linked = set()
    for page, text in texts.items():
        linked |= {resolved(t, page) for t in links(text) if not is_outward(t)}
        if page.startswith("notebooks/") and page != "notebooks/README.md":
            linked.add(page.removesuffix(".md") + ".ipynb")
    return sorted(path for path in linked - set(texts) if (ROOT / path).is_file())


def broken(texts: dict[str, str]) -> list[str]:
    """Inner links that lead neither to a page nor to a file, as "page: target"."""
    there = set(texts) | set(files(texts))
    return [
        f"{page}: {target}"
        for page, text in texts.items()
        for target in links(text)
        if not is_outward(target) and (path := resolved(target, page)) and path not in there
    ]


def nav(texts: dict[str, str]) -> list[dict[str, Any]]:
    """The menu; every page is in it."""
    guide = ["docs/server.md", "guide/evaluate.md", "guide/train.md", "docs/devices.md", "guide/method.md"]
    menu: dict[str, list[str]] = {
        "Start": ["README.md", "notebooks/quickstart.md", "notebooks/README.md"],
        "Concepts": ["guide/concepts.md"],
        "How to": [*guide, "docs/flax.md"],
        "Methods": ["methods/README.md"],
        "API": ["api/kvjax.md"],
        "Results": ["results/README.md"],
        "Kernels": ["pallas_kernels/README.md"],
        "Decisions": [DESIGN],
        "Project": ["CONTRIBUTING.md", "CHANGELOG.md"],
    }
    tops = {"notebooks": "Start", "docs": "How to", "methods": "Methods", "api": "API"}
    tops |= {"results": "Results", "pallas_kernels": "Kernels", "kvjax": "Project", "configs": "Project"}
    for page in sorted(set(texts) - {page for part in menu.values() for page in part}):
        menu[tops.get(page.partition("/")[0], "Project")].append(page)
    titles = {page: _title(page, text) for page, text in texts.items()}
    often = Counter(titles.values())

    def name(page: str) -> str:
        """Its title; with its folder where others are called so, too."""
        folder = page.rpartition("/")[0].removeprefix("results/")
        return f"{titles[page]} ({folder})" if often[titles[page]] > 1 and folder else titles[page]

    return [{title: [{name(page): page} for page in part]} for title, part in menu.items()]


def _title(page: str, text: str) -> str:
    """Its first heading; a table without one goes by its place."""
    heading = next((line for line in prose(text).splitlines() if line.startswith("# ")), f"# {page}")
    return heading[2:].replace("`", "")


def _concepts(page: str) -> str:
    first = (
        "1. A token has three places and one admission decision",
        "2. A policy is six parts, and its text names them",
    )
    more = (
        "3. Live slots are a prefix of a list; their order means nothing",
        "4. Pools come in size classes",
        "15. A saved state holds live slots, no pools and no tables",
    )
    return "\n\n".join(
        [
            "# Concepts",
            picture("README.md", page),
            section(DESIGN, first[0], page),
            section("README.md", "Policies", page),
            section(DESIGN, first[1], page),
            "## The state",
            "In Python the state is [`kvjax.KVState`](../api/kvjax.md#kvjax.KVState).",
            *("#" + section(DESIGN, title, page) for title in more),
        ]
    )


def _evaluate(page: str) -> str:
    rows = [[f"`{t.name}`", t.group, t.metric, t.fits, ", ".join(t.needs)] for t in tasks.tasks().values()]
    return "\n\n".join(
        [
            "# Evaluate",
            section("README.md", "Serve and evaluate", page),
            "Benchmarks and models that others know, one command a model, with hours and memory said before: "
            "[the leaderboard](../results/leaderboard/README.md).",
            section("README.md", "Which policy", page),
            "## Tasks",
            markdown(["task", "group", "metric", "tokens, at least", "data"], rows),
        ]
    )


def _train() -> str:
    learned = [
        [f"[`{name}`](../methods/{name}.md)", f"`{kind.learns}`", f"`{kind.trained_by}`"]
        for name, kind in catalogue.parts().items()
        if kind.learns
    ]
    blocks = [
        "# Train",
        "Weights that the embedded model ships: "
        "[weights](../kvjax/assets/embedded/weights/README.md); settings: [configs](../configs/README.md).",
        markdown(["part", "weights", "command"], learned),
    ]
    for name in TRAINED:
        module = importlib.import_module(f"train.{name}")
        blocks += [f"## train.{name.removesuffix('.__main__')}", docstring(inspect.getdoc(module) or "")]
    return "\n\n".join(blocks)


def _method(page: str) -> str:
    return "\n\n".join(
        [
            "# Write a method",
            section("README.md", "A method in one file", page),
            section("CONTRIBUTING.md", "Adding a method", page),
        ]
    )


def _folders(texts: dict[str, str]) -> dict[str, str]:
    """A list of the files of every folder that a page links to and that has no README."""
    listed = {}
    for page, text in texts.items():
        for path in (resolved(t, page) for t in links(text) if not is_outward(t)):
            folder = (ROOT / path).parent
            if path.endswith("/README.md") and path not in texts and folder.is_dir():
                inside = sorted(f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file())
                name = folder.relative_to(ROOT).as_posix()
                listed[path] = f"# {name}\n\n" + "\n".join(f"* [{file}]({file})" for file in inside) + "\n"
    return listed
