"""Finds parts, methods and presets in modules.

These are the modules of ``policies``, ``budgets`` and ``storage``, and those of other packages that are entry
points of the group ``kvjax.methods``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import kvjax.budgets
import kvjax.policies
import kvjax.storage
from kvjax.algebra import Part, PolicyError

PACKAGES = (kvjax.policies, kvjax.budgets, kvjax.storage)

GROUP = "kvjax.methods"
"""Group of the entry points of other packages; each is a module with a method, like ours."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A discovered method.

    Attributes:
      name: of its module.
      summary: first line of the module's docstring.
      source: the link in the docstring, or "".
      examples: policies that show it, at least one; ``catalogue.methods`` has read the strings among them.
    """

    name: str
    summary: str
    source: str
    examples: tuple[Any, ...]


@functools.cache
def _modules() -> tuple[ModuleType, ...]:
    """Our own modules, then those of other packages, sorted by the name of their entry point.

    Raises:
      PolicyError: an entry point is not a module, or cannot be imported.
    """
    modules = []
    for package in PACKAGES:
        for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            modules.append(importlib.import_module(info.name))
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            module = point.load()
        except (ImportError, AttributeError) as error:
            raise PolicyError(
                f"the entry point {point.name} = {point.value} of {GROUP!r} cannot be imported ({error}). "
                "Repair or uninstall its package."
            ) from error
        if not isinstance(module, ModuleType):
            raise PolicyError(
                f"the entry point {point.name} = {point.value} of {GROUP!r} is not a module. Name the module "
                "of a method, as in 'my_package.my_method'."
            )
        if module not in modules:
            modules.append(module)
    return tuple(modules)


@functools.cache
def parts() -> dict[str, type[Part]]:
    """Every part by its name in the one-string form; the second of two that share a name by "name.place".

    One name may stand for parts of two places, which then share their arguments (``gvote``).

    Raises:
      PolicyError: two parts of one place have the same name.
    """
    named: dict[str, type[Part]] = {}
    for module in _modules():
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ != module.__name__ or not issubclass(kind, Part) or not hasattr(kind, "name"):
                continue
            key = kind.name
            if key in named and named[key].place != kind.place:
                key = f"{kind.name}.{kind.place}"
            if key in named:
                raise PolicyError(f"{kind.__module__} and {named[key].__module__} both define '{kind.name}'.")
            named[key] = kind
    return named


@functools.cache
def methods() -> tuple[Method, ...]:
    """Every module that has EXAMPLES: policies, or their one-string form where a method needs another's file.

    Raises:
      PolicyError: a module of ``kvjax.policies`` has none.
    """
    listed = []
    for module in _modules():
        examples = getattr(module, "EXAMPLES", ())
        if not examples and module.__name__.startswith(kvjax.policies.__name__):
            raise PolicyError(f"{module.__name__} has no EXAMPLES. Give at least one policy.")
        if examples:
            listed.append(Method(module.__name__.rpartition(".")[2], *described(module), tuple(examples)))
    return tuple(sorted(listed, key=lambda method: method.name))


@functools.cache
def presets() -> dict[str, str]:
    """The ``PRESETS`` of all modules: name to one-string form.

    Raises:
      PolicyError: two modules define the same name.
    """
    named: dict[str, str] = {}
    for module in _modules():
        for name, spec in getattr(module, "PRESETS", {}).items():
            if name in named:
                raise PolicyError(f"{module.__name__} defines the preset '{name}' a second time.")
            named[name] = spec
    return dict(sorted(named.items(), key=lambda preset: (preset[0] != "full", preset[0])))


@functools.cache
def summaries() -> dict[str, str]:
    """A line about each preset, by its name: the first of its module's docstring."""
    return {name: described(module)[0] for module in _modules() for name in getattr(module, "PRESETS", {})}


def described(module: ModuleType) -> tuple[str, str]:
    """First line of a module's docstring, and the first link in it or ""."""
    text = inspect.getdoc(module) or ""
    links = [word.rstrip(".,;)") for word in text.split() if word.startswith("https://")]
    return text.partition("\n")[0], links[0] if links else ""
