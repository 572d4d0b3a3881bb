"""What configs/gates/*.yaml may say, checked before anything is read or compiled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import optax

from kvjax.cli import option, whole
from train import config
from train.config import NOT_NEGATIVE, OPEN_SHARE, POSITIVE, REQUIRED, SHARE, ConfigError, count, require
from train.settings import TrainingSettings

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """The gates and the attention under them."""

    hidden: int | None = option(None, "F of each gate's MLP; None for 4 H")
    norm: bool = option(False, "normalise the keys that a gate sees")
    window: int = option(256, "W, latest tokens that no gate touches")
    eps: float = option(1e-6, "what a closed gate leaves while training", type=OPEN_SHARE)
    tau: float = option(0.1, "threshold of inference, used in checks", type=OPEN_SHARE)
    concrete: bool = option(False, "train by gates drawn from the hard-concrete distribution")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """AdamW's settings; after the warm-up the learning rate falls as a cosine to 0."""

    peak: float = option(1e-3, "learning rate after the warm-up", type=POSITIVE)
    warmup: float = option(0.1, "share of the updates in which it rises from 0", type=SHARE)
    weight_decay: float = option(0.01, "of matrices", type=NOT_NEGATIVE)
    accumulate: int = option(1, "batches whose gradients are averaged for one update")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(TrainingSettings):
    """A config as read, for one of its lambdas; ``folder`` is that of the lambda."""

    strength: str = option("default", "which of the lambdas is trained", flag="--strength")
    lambdas: dict[str, float] = option(
        REQUIRED, "weights of the cost", type=NOT_NEGATIVE, flag="loss.lambdas"
    )
    cost: Literal["paper", "window"] = option(REQUIRED, "of a token that is kept", flag="loss.cost")
    remat: bool = option(False, "as in ``distill``", flag="model.remat")
    sinks: int = option(4, "first tokens that stay when served; checks keep them, too", type=whole(0))
    gate: Gate = option(Gate(), "see there")
    rate: Rate = option(Rate(), "see there", flag="optimizer")
    mesh: tuple[int, int] = option((1, 1), "sizes of the axes data and tensor", type=config.axes)
    keep_teacher: bool = option(False, "the teacher's outputs are made once and kept for all lambdas")
    data: dict[str, Any] = option(REQUIRED, "as written")
    check: dict[str, Any] = option(REQUIRED, "as written")

    def __post_init__(self) -> None:
        """Raises ConfigError: data that does not fit the mesh."""
        super().__post_init__()
        data = self.data
        kind, tokens, lengths = data.get("kind"), count(data["tokens"], "data.tokens"), data["lengths"]
        require(kind in ("rows", "chat", "documents"), "data.kind", kind, "is not rows, chat or documents.")
        each = bool(lengths) and len(lengths) == len(data["shares"])
        require(each, "data.lengths", lengths, "needs one of data.shares each.")
        for length in lengths:
            count(length, "data.lengths", whole(2))
            rule = f"does not divide over mesh.tensor {self.mesh[1]}."
            require(length % self.mesh[1] == 0, "data.lengths", length, rule)
            rows = max(1, tokens // length)
            rule = f"makes batches of {rows} rows of {length}, not a multiple of mesh.data {self.mesh[0]}."
            require(rows % self.mesh[0] == 0, "data.tokens", tokens, rule)

    @property
    def lam(self) -> float:
        """Lambda, the weight of the cost."""
        return self.lambdas[self.strength]


def read(path: Path, strength: str = "default", source: str | None = None) -> Settings:
    """The config at ``path`` for one of its lambdas, and for the model of ``source`` instead of its own.

    Raises:
      ConfigError: no such file, missing or unknown keys, numbers out of range.
      ModelError: a written-out model config that kvjax does not read.
    """
    return config.read_config(path, lambda tree: parse(tree, strength, source), "configs/gates/embedded.yaml")


def parse(tree: dict[str, Any], strength: str = "default", source: str | None = None) -> Settings:
    """``read`` on a parsed config."""
    settings = config.section(Settings, tree).of(source)
    if strength not in settings.lambdas:
        raise ConfigError(f"--strength {strength!r} is none of the config's: {', '.join(settings.lambdas)}.")
    return dataclasses.replace(settings, strength=strength, folder=settings.folder / strength)


def backbone(settings: Settings) -> LanguageModel:
    """The frozen model; raises as ``train.settings.TrainingSettings.model``."""
    return settings.model()


def optimizer(rate: Rate, steps: int) -> optax.GradientTransformation:
    """AdamW with a linear rise and a cosine fall over the updates of ``steps`` batches."""
    updates = max(1, steps // rate.accumulate)
    rise = round(rate.warmup * updates)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate.peak, rise, max(updates, rise + 1))
    matrices = lambda tree: jax.tree_util.tree_map_with_path(  # noqa: E731
        lambda path, _: str(getattr(path[-1], "key", "")).startswith("w"), tree
    )
    adamw = optax.adamw(schedule, weight_decay=rate.weight_decay, mask=matrices)
    if rate.accumulate == 1:
        return adamw
    return optax.MultiSteps(adamw, rate.accumulate).gradient_transformation()
