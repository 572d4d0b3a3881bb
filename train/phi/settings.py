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
from kvjax.cli import Rule, option, whole
from train.config import NOT_NEGATIVE, POSITIVE, REQUIRED, SHARE, count, read_config, require, section
from train.config import ConfigError as ConfigError
from train.ranker import settings as ranker

EXAMPLE = "configs/phi/embedded.yaml"

_CLOSED_SHARE = Rule(float, lambda x: 0 <= x <= 1, "a share from 0 to 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maps:
    """The maps."""

    features: int = option(64, "d_φ")
    width: int | None = option(None, "of the stem; None for the head dimension")
    hidden: int | None = option(None, "of the block behind it; None for half of that")
    symmetric: bool = option(False, "one map for queries and keys")
    spread: float = option(0.5, "of the random directions they begin with", type=POSITIVE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """The objective, with the paper's weights; the temperature is not in it and chosen here."""

    temperature: float = option(2.0, "tau", type=POSITIVE)
    kl: float = option(0.99, "lambda_KL", type=_CLOSED_SHARE)
    top: float = option(1.0, "lambda_top", type=NOT_NEGATIVE)
    far: float = option(2.0, "lambda_fp", type=NOT_NEGATIVE)
    mass: float = option(4.0, "lambda_Z", type=NOT_NEGATIVE)
    band: float = option(8.0, "Delta, how far below the best score the top band reaches", type=POSITIVE)
    delta: float = option(1.0, "where the Huber penalty turns linear", type=POSITIVE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What the maps stand for, and which queries ask.

    The middle between the two ends of the prompt is what a summary holds, or what ``policy`` drops of it.
    """

    prompts: tuple[int, ...] = option(REQUIRED, "a set of maps for each of these lengths; see --prompt")
    sinks: int = option(4, "tokens at the beginning of the prompt that are always exact", type=whole(0))
    tail: int = option(16, "and at its end", type=whole(0))
    policy: str | None = option(None, "None, or a policy: then a summary holds what it drops of the prompt")
    weights: dict[str, str] = dataclasses.field(default_factory=dict)
    queries: int = option(64, "drawn of each trace")
    reach: int = option(128, "tokens behind the prompt among which they lie")
    rows: int = option(1, "traces of a batch")
    retrieved: float = option(0.02, "share of the prompt that checks read beside the maps", type=SHARE)

    def __post_init__(self) -> None:
        """Raises ConfigError: prompts that are too short, or a policy that leaves the maps nothing to do."""
        for length in self.prompts:
            count(length, "target.prompts", whole(self.sinks + self.tail + 2))
        if self.policy is None:
            return
        try:
            policy = catalogue.policy(self.policy)
        except PolicyError as reason:
            raise ConfigError(f"target.policy: {reason}") from reason
        drops = not policy.admission.idle or policy.budget.limited
        rule = "drops no token. Give one that does, or null for the middle."
        require(drops, "target.policy", self.policy, rule)
        require(policy.completion.idle, "target.policy", self.policy, "has a φ already. Leave it out.")


def _tasks(names: Any) -> tuple[str, ...]:
    """The names of an evaluation's tasks."""
    from kvjax.eval import tasks

    require(isinstance(names, list), "silence.tasks", names, "is not a list of names.")
    for name in names:
        require(name in tasks.tasks(), "silence.tasks", name, "is not a task of kvjax.eval.")
    return tuple(names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Silence:
    """Leaves φ out of the query heads whose output it does not improve, after the training."""

    sequences: int = option(16, "that decide; held out, and none of those that traces hold")
    retrieved: tuple[float, ...] = option(
        (0.02,), "shares of the prompt that are read beside the maps; φ must help a head at each", type=SHARE
    )
    tasks: tuple[str, ...] = option(
        (), "of ``kvjax.eval``, whose samples decide, too: a quarter as many of each", type=_tasks
    )


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
        """Tokens of a trace that are used."""
        return self.prompt + self.target.reach

    @property
    def policy(self) -> Policy | None:
        """The policy whose dropped tokens are learned; None for the middle."""
        return None if self.target.policy is None else catalogue.policy(self.target.policy)


def read(path: Path, prompt: int | None = None, source: str | None = None) -> Settings:
    """The config at ``path``, for prompts of that many tokens; where it names one length alone, for those.

    ``source`` is another model than it names.

    Raises:
      ConfigError: no such file or length, missing or unknown keys, numbers out of range.
      ModelError: a written-out model config that kvjax does not read.
    """
    return read_config(path, lambda tree: parse(tree, prompt, source), EXAMPLE)


def parse(tree: dict[str, Any], prompt: int | None = None, source: str | None = None) -> Settings:
    """``read`` on a parsed config."""
    base, target = ranker.parse(tree, source), section(Target, tree["target"], "target.")
    if prompt is None and len(target.prompts) > 1:
        raise ConfigError(
            f"target.prompts: {list(target.prompts)} in the config need a set of maps each. Choose one: "
            f"--prompt {target.prompts[0]}."
        )
    prompt = target.prompts[0] if prompt is None else prompt
    if prompt not in target.prompts:
        raise ConfigError(
            f"--prompt {prompt} is none of target.prompts, {list(target.prompts)}. Give one of them."
        )
    maps, silence = section(Maps, tree.get("maps", {}), "maps."), tree.get("silence")
    rule = "needs a map of queries for each head, and maps.symmetric leaves them none. Set it to false, or "
    require(silence is None or not maps.symmetric, "silence", silence, rule + "leave silence out.")
    sampled = silence is not None and bool(silence.get("tasks"))
    rule = "needs the prompt's middle in the summary, and target.policy drops other tokens. Leave it out."
    require(not sampled or target.policy is None, "silence.tasks", (silence or {}).get("tasks"), rule)
    return Settings(
        base=dataclasses.replace(base, folder=base.folder / str(prompt)),
        maps=maps,
        loss=section(Loss, tree.get("loss", {}), "loss."),
        target=target,
        prompt=prompt,
        silence=None if silence is None else section(Silence, silence, "silence."),
    )
