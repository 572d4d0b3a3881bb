"""What every trainer's config shares: how YAML becomes a dataclass, how a value is refused, the backbone.

The fields of a dataclass are the keys of a section. Their types and what ``kvjax.cli.option`` declares say
how values are read; ``flag`` is the path of a key that has another name. ``__post_init__`` compares fields.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from kvjax.cli import InputError, Rule, whole

Read = TypeVar("Read")

REQUIRED = dataclasses.MISSING
"""The default of a key that a config must have."""

POSITIVE = Rule(float, lambda x: x > 0, "a number above 0")
NOT_NEGATIVE = Rule(float, lambda x: x >= 0, "a number, 0 or more")
SHARE = Rule(float, lambda x: 0 <= x < 1, "a share from 0 to below 1")
OPEN_SHARE = Rule(float, lambda x: 0 < x < 1, "a number above 0 and below 1")
_FINITE = Rule(float, math.isfinite, "a number")


class ConfigError(InputError):
    """A config that cannot be trained; the message names the key, the rule and the way out."""


def require(holds: bool, key: str, value: Any, rule: str) -> None:
    """Refuses ``value`` unless the rule holds."""
    if not holds:
        raise ConfigError(f"{key}: {value!r} in the config {rule}")


def number(value: Any, key: str, rule: Rule = _FINITE) -> float:
    """A finite number, also where YAML reads 1e-3 as text."""
    try:
        read = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        read = math.nan
    require(math.isfinite(read), key, value, f"is not a number. Give {rule.rule}.")
    require(rule.holds(read), key, value, f"is out of range. Give {rule.rule}.")
    return read


def count(value: Any, key: str, rule: Rule = whole()) -> int:  # noqa: B008  (a constant)
    """A whole number."""
    fits = isinstance(value, int) and not isinstance(value, bool) and rule.holds(value)
    require(fits, key, value, f"is out of range. Give {rule.rule}.")
    return int(value)


def axes(sizes: Any) -> tuple[int, int]:
    """The sizes of a config's ``mesh``: data and tensor, 1 where they are not named."""
    require(isinstance(sizes, dict), "mesh", sizes, "names no axes. Write {data: 2, tensor: 4}.")
    rule = "has no such axis. Weights and rows are cut over data, heads over tensor."
    require(not sizes.keys() - {"data", "tensor"}, "mesh", sizes, rule)
    return count(sizes.get("data", 1), "mesh.data"), count(sizes.get("tensor", 1), "mesh.tensor")


# --- YAML ----------------------------------------------------------------------------------------


def read_config(path: Path, parse: Callable[[dict[str, Any]], Read], example: str) -> Read:
    """``parse`` of the YAML at ``path``.

    Args:
      path: the file.
      parse: makes settings of its keys; a missing one may raise KeyError.
      example: a config to start from.

    Raises:
      ConfigError: no such file, no keys in it, missing ones, or what ``parse`` raises.
    """
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as reason:
        raise ConfigError(
            f"--config {path} cannot be read: {reason.strerror}. Give a file of {Path(example).parent}."
        ) from reason
    except yaml.YAMLError as reason:
        raise ConfigError(f"--config {path} is not YAML: {str(reason).splitlines()[0]}.") from reason
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {path} has no keys. Start from a file of {Path(example).parent}.")
    try:
        return parse(tree)
    except KeyError as missing:
        raise ConfigError(f"--config {path} lacks {missing.args[0]}. Add it, as in {example}.") from None


def section(kind: type[Read], tree: Any, at: str = "", others: tuple[str, ...] = ()) -> Read:
    """A dataclass from a section of a config.

    Args:
      kind: the dataclass.
      tree: the section.
      at: where the section is, as "gate."; "" for the whole config.
      others: keys that somebody else reads.

    Raises:
      ConfigError: an unknown key, a value of another kind or out of range.
      KeyError: a missing key.
    """
    require(isinstance(tree, dict), at.rstrip("."), tree, "has no keys. Give some.")
    hints, values = typing.get_type_hints(kind), {}
    legal: dict[str, list[str]] = {"": list(others)}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        declared = field.metadata.get("option", {})
        path = declared.get("flag", field.name)
        if path.startswith("-"):
            continue  # of the command line
        inside, _, key = path.rpartition(".")
        legal[""].append(inside or key)
        legal.setdefault(inside, []).append(key)
        holder = tree.get(inside, {}) if inside else tree
        require(isinstance(holder, dict), inside, holder, "has no keys. Give some.")
        if key in holder:
            values[field.name] = _value(holder[key], hints[field.name], at + path, declared)
        elif field.default is field.default_factory is REQUIRED:
            raise KeyError(at + path)
    for inside, known in legal.items():
        unknown = sorted((tree.get(inside, {}) if inside else tree).keys() - set(known))
        if unknown:
            key, some = f"{at}{inside}.{unknown[0]}".lstrip("."), ", ".join(dict.fromkeys(known))
            raise ConfigError(f"{key} in the config is not a known key. The keys there are {some}.")
    return kind(**values)


def _value(value: Any, hint: Any, key: str, declared: Any) -> Any:
    """A value of a config as its field's type and declaration say."""
    inner, rule = typing.get_args(hint), declared.get("type")
    if isinstance(hint, types.UnionType):  # X | None
        return None if value is None else _value(value, inner[0], key, declared)
    if rule is not None and not isinstance(rule, Rule):
        return rule(value)
    if typing.get_origin(hint) is tuple:
        require(isinstance(value, list) and bool(value), key, value, "is not a list. Give one value or more.")
        return tuple(_value(each, inner[0], key, declared) for each in value)
    if typing.get_origin(hint) is Literal:
        require(value in inner, key, value, f"is none of {', '.join(inner)}.")
    elif typing.get_origin(hint) is dict:
        require(isinstance(value, dict) and bool(value), key, value, "has no keys. Give some.")
        return {name: _value(each, inner[1], f"{key}.{name}", declared) for name, each in value.items()}
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return section(hint, value, f"{key}.")
    elif hint is bool:
        require(isinstance(value, bool), key, value, "is neither true nor false.")
    elif hint is int:
        return count(value, key, rule or whole(1 if declared else 0))
    elif hint is float:
        return number(value, key, rule or _FINITE)
    elif hint in (str, Path):
        return hint(str(value))
    return value
