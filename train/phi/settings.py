"""What configs/phi/*.yaml may say, checked before anything is read or compiled.

The sections name, seed, folder, model, traces, optimizer, devices and plan are those of configs/ranker, so
that ``train.traces`` reads the same file.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from kvjax import catalogue
from kvjax.algebra import Policy, PolicyError
from train.config import ConfigError, count, number, read_config, require
from train.ranker import settings as ranker

EXAMPLE = "configs/phi/embedded.yaml"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maps:
    """The maps.

    Attributes:
      features: d_φ.
      width, hidden: of the stem and of the block behind it; None for the head dimension and half of it.
      symmetric: one map for queries and keys.
      spread: of the random directions they begin with.
    """

    features: int = 64
    width: int | None = None
    hidden: int | None = None
    symmetric: bool = False
    spread: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """The objective, with the paper's weights; the temperature is not in it and chosen here.

    Attributes:
      temperature: tau.
      kl: lambda_KL.
      top, far, mass: lambda_top, lambda_fp, lambda_Z.
      band: Delta, how far below the best score the top band reaches.
      delta: where the Huber penalty turns linear.
    """

    temperature: float = 2.0
    kl: float = 0.99
    top: float = 1.0
    far: float = 2.0
    mass: float = 4.0
    band: float = 8.0
    delta: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What the maps stand for, and who asks.

    Attributes:
      prompts: lengths for which there is a set of maps each; ``--prompt`` says which.
      sinks, tail: ends of the prompt that are always exact; the middle between them is what a summary holds.
      policy: None, or a policy: then a summary holds what it drops of the prompt.
      weights: learned weights of that policy, by part.
      queries: drawn of each trace.
      reach: tokens behind the prompt among which they lie.
      rows: traces of a batch.
      retrieved: share of the prompt that checks visit beside the maps.
    """

    prompts: tuple[int, ...]
    sinks: int = 4
    tail: int = 16
    policy: str | None = None
    weights: dict[str, str] = dataclasses.field(default_factory=dict)
    queries: int = 64
    reach: int = 128
    rows: int = 1
    retrieved: float = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Silence:
    """In which query heads φ counts for nothing after the training: those whose output it does not better.

    Attributes:
      sequences: on which that is seen; held out, and none of those that traces hold.
      retrieved: shares of the prompt that are read beside the maps; φ must help a head at each.
    """

    sequences: int = 16
    retrieved: tuple[float, ...] = (0.02,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A config as read, for one of its prompt lengths.

    Attributes:
      base: what it shares with configs of rankers; its folder is that of this length.
      maps, loss, target: see there.
      prompt: N.
      silence: None leaves every head its φ.
    """

    base: ranker.Settings
    maps: Maps
    loss: Loss
    target: Target
    prompt: int
    silence: Silence | None = None

    @property
    def tokens(self) -> int:
        """Of a trace that are looked at."""
        return self.prompt + self.target.reach

    @property
    def policy(self) -> Policy | None:
        """Whose dropped tokens are learned; None for the middle."""
        return None if self.target.policy is None else catalogue.policy(self.target.policy)


def read(path: Path, prompt: int | None = None) -> Settings:
    """The config at ``path``, for prompts of that many tokens; where it names one length alone, for those.

    Raises:
      ConfigError: no such file, missing or unknown keys, numbers out of range, a length it does not name.
      ModelError: a written-out model config kvjax does not read.
    """
    return read_config(path, lambda tree: parse(tree, prompt), EXAMPLE)


def parse(tree: dict[str, Any], prompt: int | None = None) -> Settings:
    """``read`` on a parsed config."""
    base, target = ranker.parse(tree), _target(tree["target"])
    if prompt is None and len(target.prompts) > 1:
        raise ConfigError(
            f"target.prompts: {list(target.prompts)} in the config need a set of maps each. Say which: "
            f"--prompt {target.prompts[0]}."
        )
    prompt = target.prompts[0] if prompt is None else prompt
    if prompt not in target.prompts:
        raise ConfigError(
            f"--prompt {prompt} is none of target.prompts, {list(target.prompts)}. Give one of them."
        )
    maps, silence = _maps(tree.get("maps", {})), _silence(tree.get("silence"))
    require(
        silence is None or not maps.symmetric,
        "silence",
        tree.get("silence"),
        "needs a map of queries for each head, and maps.symmetric leaves them none. Set it to false, or "
        "leave silence out.",
    )
    return Settings(
        base=dataclasses.replace(base, folder=Path(tree["folder"]) / str(prompt)),
        maps=maps,
        loss=_loss(tree.get("loss", {})),
        target=target,
        prompt=prompt,
        silence=silence,
    )


def _target(given: dict[str, Any]) -> Target:
    found = Target(**given | {"prompts": tuple(given["prompts"])})
    require(bool(found.prompts), "target.prompts", [], "names no length. Give one or more.")
    for name in ("sinks", "tail"):
        count(getattr(found, name), f"target.{name}", 0)
    for length in found.prompts:
        count(length, "target.prompts", found.sinks + found.tail + 2)
    for name in ("queries", "reach", "rows"):
        count(getattr(found, name), f"target.{name}")
    share = number(found.retrieved, "target.retrieved")
    require(0 <= share < 1, "target.retrieved", share, "is no share. Give one from 0 to below 1.")
    if found.policy is not None:
        _check_policy(found.policy)
    return dataclasses.replace(found, retrieved=share)


def _check_policy(spec: str) -> None:
    """Refuses a policy that drops nothing, or has a φ of its own."""
    try:
        policy = catalogue.policy(spec)
    except PolicyError as reason:
        raise ConfigError(f"target.policy: {reason}") from reason
    drops = not policy.admission.idle or policy.budget.limited
    require(drops, "target.policy", spec, "drops no token. Give one that does, or null for the middle.")
    require(policy.completion.idle, "target.policy", spec, "has a φ already. Leave it out.")


def _maps(given: dict[str, Any]) -> Maps:
    found = Maps(**given)
    count(found.features, "maps.features")
    for name in ("width", "hidden"):
        if getattr(found, name) is not None:
            count(getattr(found, name), f"maps.{name}")
    require(
        isinstance(found.symmetric, bool), "maps.symmetric", found.symmetric, "is neither true nor false."
    )
    spread = number(found.spread, "maps.spread")
    require(spread > 0, "maps.spread", spread, "makes all features alike. Give a number above 0.")
    return dataclasses.replace(found, spread=spread)


def _silence(given: dict[str, Any] | None) -> Silence | None:
    if given is None:
        return None
    found = Silence(**given | {"retrieved": tuple(given.get("retrieved", Silence.retrieved))})
    count(found.sequences, "silence.sequences")
    require(bool(found.retrieved), "silence.retrieved", [], "names no share. Give one or more.")
    shares = tuple(number(share, "silence.retrieved") for share in found.retrieved)
    for share in shares:
        require(0 <= share < 1, "silence.retrieved", share, "is no share. Give one from 0 to below 1.")
    return dataclasses.replace(found, retrieved=shares)


def _loss(given: dict[str, Any]) -> Loss:
    found = Loss(**given)
    names = [field.name for field in dataclasses.fields(Loss)]
    numbers = {name: number(getattr(found, name), f"loss.{name}") for name in names}
    for name, value in numbers.items():
        least = name in ("temperature", "band", "delta")
        require(
            value > 0 if least else value >= 0, f"loss.{name}", value, "is out of range. Give a larger one."
        )
    require(numbers["kl"] <= 1, "loss.kl", numbers["kl"], "is no share. Give one from 0 to 1.")
    return Loss(**numbers)
