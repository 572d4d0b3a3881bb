"""Where it is written which bodies run on a kind of device: with the package, or in the user's cache folder.

``python -m benchmarks.kernels --device`` in a checkout writes the package's records (``tuned/<device>``),
``python -m kvjax.tune`` the user's. Both are one JSON file an operation. A record of the user's counts only
for the bodies and the version of jax it was made with: later ones have to be checked again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax

PACKAGE = pathlib.Path(__file__).parent
TUNED = PACKAGE / "tuned"


def cache_folder(environment: Mapping[str, str], system: str = sys.platform) -> pathlib.Path | None:
    """What may be made again: ``KVJAX_CACHE``, else the user's cache folder of the platform.

    None where nothing is to be kept (``KVJAX_CACHE=off``).

    Raises:
      RuntimeError: there is no home folder.
    """
    said = environment.get("KVJAX_CACHE", "")
    if said.lower() == "off":
        return None
    if said:
        return pathlib.Path(said).expanduser()
    if system == "win32" and environment.get("LOCALAPPDATA"):
        base = pathlib.Path(environment["LOCALAPPDATA"])
    elif system == "darwin":
        base = pathlib.Path("~/Library/Caches").expanduser()
    else:
        base = pathlib.Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return base / "kvjax"


def own() -> pathlib.Path | None:
    """The folder of the user's records, one folder a device; None where nothing is kept."""
    try:
        folder = cache_folder(os.environ)
    except RuntimeError:
        return None
    return None if folder is None else folder / "kernels"


def slug(kind: str) -> str:
    """A kind of device as the name of its folder."""
    return "-".join(kind.lower().split())


@functools.cache
def sources(folder: str) -> str:
    """A digest of an operation's bodies and of what they share with others; "folder.impl" as "folder"."""
    digest, folder = hashlib.sha256(), folder.partition(".")[0]
    for file in sorted([*PACKAGE.glob("*.py"), *(PACKAGE / folder).glob("*.py")]):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def read(folder: str, kind: str, shipped: pathlib.Path = TUNED) -> Mapping[str, Any]:
    """The record of an operation's folder on a kind of device; empty where there is none.

    The user's comes first. One of other bodies or of another jax says nothing: then the package's counts, or,
    where that has none, {"old": what has changed since}.
    """
    name, old = pathlib.Path(slug(kind)) / f"{folder}.json", ""
    mine = own()
    if mine is not None and (mine / name).is_file():
        found: dict[str, Any] = json.loads((mine / name).read_text())
        old = _changed(found, folder)
        if not old:
            return found
    if (shipped / name).is_file():
        return json.loads((shipped / name).read_text())
    return {"old": old} if old else {}


def _changed(found: Mapping[str, Any], folder: str) -> str:
    if found.get("jax") != jax.__version__:
        return f"was made with jax {found.get('jax')}"
    return "" if found.get("sources") == sources(folder) else "is of other bodies"
