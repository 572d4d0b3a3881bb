"""What MkDocs asks: the pages, the menu, and whether the finished pages' outward links are well formed."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

CHECKOUT = str(Path(__file__).parents[2])
sys.path.insert(0, CHECKOUT)

from docs.site import methods, pages  # noqa: E402
from docs.site.text import ROOT, malformed  # noqa: E402

log = logging.getLogger("mkdocs.kvjax")  # MkDocs counts the warnings of its own loggers

TEXTS: dict[str, str] = {}


def on_config(config: Any) -> Any:
    """Makes the pages, so that the menu has all of them."""
    if (
        CHECKOUT not in sys.path
    ):  # MkDocs takes the path back once it has read this file, and `train` is in no wheel
        sys.path.insert(0, CHECKOUT)
    TEXTS.clear()
    TEXTS.update(pages.pages(methods.measured()))
    config.nav = pages.nav(TEXTS)
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages and what they link to."""
    for path, text in TEXTS.items():
        files.append(File.generated(config, path, content=text))
    for path in pages.files(TEXTS):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Warns of outward links that no browser could follow."""
    for target in malformed(re.findall(r'href="([a-z]+:[^"]*)"', output)):
        if not target.startswith(("data:", "mailto:")):
            log.warning("%s: the link %s is not well formed.", page.file.src_uri, target)
    return output
