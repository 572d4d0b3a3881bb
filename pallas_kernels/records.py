"""Records of the bodies that run on a kind of device: the package's, and the user's in a cache folder.

``python -m benchmarks kernels --device`` in a checkout writes the package's records (``tuned/<device>``),
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
    """Folder for what can be made again: ``KVJAX_CACHE``, else the user's cache folder of the platform.

    None where nothing is to be kept (``KVJAX_CACHE=off``).

    Raises:
      RuntimeError: there is no home folder.
    """
    folder = environment.get("KVJAX_CACHE", "")
    if folder.lower() == "off":
        return None
    if folder:
        return pathlib.Path(folder).expanduser()
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

    The user's comes first, unless it was made with other bodies or another jax: then the package's counts, or
    {"old": what has changed since} if there is none.
    """
    name, old = pathlib.Path(slug(kind)) / f"{folder}.json", ""
    home = own()
    if home is not None and (home / name).is_file():
        record: dict[str, Any] = json.loads((home / name).read_text())
        if record.get("jax") != jax.__version__:
            old = f"was made with jax {record.get('jax')}"
        elif record.get("sources") != sources(folder):
            old = "is of other bodies"
        else:
            return record
    if (shipped / name).is_file():
        return json.loads((shipped / name).read_text())
    return {"old": old} if old else {}
