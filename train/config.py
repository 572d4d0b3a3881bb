"""What every trainer's config shares: how it is read, how a value is refused, which model it trains on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import yaml

from kvjax.cli import InputError
from kvjax.models.spec import ModelSpec

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel

Read = TypeVar("Read")


class ConfigError(InputError):
    """A config that cannot be trained; the message names the key, the rule and the way out."""


def require(holds: bool, key: str, value: Any, rule: str) -> None:
    """Refuses ``value`` unless the rule holds."""
    if not holds:
        raise ConfigError(f"{key}: {value!r} in the config {rule}")


def number(value: Any, key: str) -> float:
    """A finite number, also where YAML read 1e-3 as text."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    require(math.isfinite(found) and not isinstance(value, bool), key, value, "is no number. Give one.")
    return found


def count(value: Any, key: str, least: int = 1) -> int:
    """A whole number of at least ``least``."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(whole, key, value, f"counts something. Give a whole number, {least} or more.")
    return int(value)


def axes(given: Any) -> tuple[int, int]:
    """The sizes of a config's ``mesh``: data and tensor, 1 where they are not named."""
    require(isinstance(given, dict), "mesh", given, "names no axes. Write {data: 2, tensor: 4}.")
    rule = "has no such axis. Weights and rows are cut over data (once called fsdp), heads over tensor."
    require(not given.keys() - {"data", "tensor"}, "mesh", given, rule)
    return count(given.get("data", 1), "mesh.data"), count(given.get("tensor", 1), "mesh.tensor")


def one_of(value: Any, key: str, known: tuple[str, ...]) -> str:
    """One of the known words."""
    require(value in known, key, value, f"is none of {', '.join(known)}.")
    return str(value)


def read_config(path: Path, parse: Callable[[dict[str, Any]], Read], example: str) -> Read:
    """``parse`` of the YAML at ``path``.

    Args:
      path: the file.
      parse: makes settings of its keys; a missing one may raise KeyError, an unknown one TypeError.
      example: a config to start from.

    Raises:
      ConfigError: no such file, no keys in it, missing or unknown ones, or what ``parse`` raises.
    """
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as reason:
        raise ConfigError(
            f"--config {path} cannot be read: {reason.strerror}. Give a file of {Path(example).parent}."
        ) from reason
    except yaml.YAMLError as reason:
        raise ConfigError(f"--config {path} is no YAML: {str(reason).splitlines()[0]}.") from reason
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {path} holds no keys. Start from a file of {Path(example).parent}.")
    try:
        return parse(tree)
    except KeyError as missing:
        raise ConfigError(f"--config {path} lacks {missing.args[0]}. Add it, as in {example}.") from None
    except TypeError as reason:  # an unknown key of a section is an unexpected argument
        raise ConfigError(
            f"--config {path}: {str(reason).partition('__init__() ')[2] or reason}."
        ) from reason


def published(model: dict[str, Any]) -> ModelSpec | None:
    """The model's sizes where a config's section ``model`` writes them out, or names them."""
    from kvjax.models import published
    from kvjax.models.hf_config import read_config as read

    if "config" not in model:
        return None
    config = model["config"]
    return published.spec(config) if isinstance(config, str) else read(config, {}, "model.config")


def backbone(source: str, dtype: str, spec: ModelSpec | None) -> LanguageModel:
    """The frozen model in a config's dtype, in the host's memory.

    Args:
      source: "embedded", a folder or a hub id.
      dtype: of its weights.
      spec: what the config writes out of it, or None.

    Raises:
      ModelError: no such model.
      ConfigError: the config writes out another model than its source holds.
    """
    from kvjax import loading

    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # one chip may be too small for it
        model = loading.load(None if source == loading.EMBEDDED else source, dtype=dtype)
    if spec is not None:
        written = dataclasses.replace(spec, bos=model.spec.bos, eos=model.spec.eos)
        if written != model.spec:
            raise ConfigError(
                f"model.config in the config describes another model than {source} holds. Correct or "
                "remove it."
            )
    return model
