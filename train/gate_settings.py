"""What configs/gates/*.yaml may say, checked before anything is read or compiled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import optax

from kvjax.models.spec import ModelSpec
from train import config, loop
from train.config import ConfigError as ConfigError
from train.config import axes, count, number, published, read_config, require

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel

COSTS = ("paper", "window")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """The gates and the attention under them.

    Attributes:
      hidden: F of each gate's MLP; None for 4 H.
      norm: normalise the keys a gate sees.
      window: W, latest tokens no gate touches.
      eps: what a closed gate leaves while training.
      tau: threshold of inference, used in checks.
    """

    hidden: int | None = None
    norm: bool = False
    window: int = 256
    eps: float = 1e-6
    tau: float = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """AdamW's settings.

    Attributes:
      peak: learning rate after the warm-up.
      warmup: share of the updates in which it rises from 0; afterwards it falls as a cosine to 0.
      weight_decay: of matrices.
      accumulate: batches whose gradients are averaged for one update.
    """

    peak: float = 1e-3
    warmup: float = 0.1
    weight_decay: float = 0.01
    accumulate: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A config as read.

    Attributes:
      name: of the config.
      strength: which of ``lambdas`` is trained.
      lam: lambda, the weight of the cost.
      cost: one of ``COSTS``.
      seed: of gates and batches.
      folder: of checkpoints and log.
      source: the backbone: "embedded", a folder or a hub id.
      spec: the backbone's sizes where the config writes them out; None to ask the source.
      dtype: of the backbone's weights and of its walk.
      remat: as in ``distill.Net``.
      sinks: first tokens the streaming heads of ``train.duo`` keep.
      gate, rate, plan: see there.
      mesh: sizes of the axes data and tensor.
      data, check: as written.
    """

    name: str
    strength: str
    lam: float
    cost: Literal["paper", "window"]
    seed: int
    folder: Path
    source: str
    spec: ModelSpec | None
    dtype: str
    remat: bool
    sinks: int
    gate: Gate
    rate: Rate
    plan: loop.Cadence
    mesh: tuple[int, int]
    data: dict[str, Any]
    check: dict[str, Any]


def _gate(given: dict[str, Any]) -> Gate:
    gate = Gate(**given)
    count(gate.window, "gate.window")
    if gate.hidden is not None:
        count(gate.hidden, "gate.hidden")
    tau, eps = number(gate.tau, "gate.tau"), number(gate.eps, "gate.eps")
    require(
        0 < tau < 1, "gate.tau", gate.tau, "is no threshold of a gate. Give a number above 0 and below 1."
    )
    require(0 < eps < 1, "gate.eps", gate.eps, "cannot stand for a closed gate. Give a small number above 0.")
    return dataclasses.replace(gate, tau=tau, eps=eps)


def _rate(given: dict[str, Any]) -> Rate:
    rate = Rate(**given)
    peak, warmup = number(rate.peak, "optimizer.peak"), number(rate.warmup, "optimizer.warmup")
    decay = number(rate.weight_decay, "optimizer.weight_decay")
    require(peak > 0, "optimizer.peak", rate.peak, "does not learn. Give a number above 0.")
    require(0 <= warmup < 1, "optimizer.warmup", rate.warmup, "is a share of the updates. Give 0 to below 1.")
    require(decay >= 0, "optimizer.weight_decay", rate.weight_decay, "would grow weights. Give 0 or more.")
    count(rate.accumulate, "optimizer.accumulate")
    return dataclasses.replace(rate, peak=peak, warmup=warmup, weight_decay=decay)


def _lambda(lambdas: Any, strength: str) -> float:
    require(
        isinstance(lambdas, dict) and bool(lambdas), "loss.lambdas", lambdas, "must map names to numbers."
    )
    for name, value in lambdas.items():
        require(
            number(value, f"loss.lambdas.{name}") >= 0,
            f"loss.lambdas.{name}",
            value,
            "would pay for keeping tokens. Give 0 or more.",
        )
    if strength not in lambdas:
        raise ConfigError(f"--strength {strength!r} is none of the config's: {', '.join(lambdas)}.")
    return float(lambdas[strength])


def _check_data(data: dict[str, Any], mesh: tuple[int, int]) -> None:
    require(
        data.get("kind") in ("rows", "documents"), "data.kind", data.get("kind"), "is not rows or documents."
    )
    tokens = count(data["tokens"], "data.tokens")
    lengths = data["lengths"]
    require(
        bool(lengths) and len(lengths) == len(data["shares"]),
        "data.lengths",
        lengths,
        "needs one of data.shares each.",
    )
    for length in lengths:
        count(length, "data.lengths", 2)
        require(length % mesh[1] == 0, "data.lengths", length, f"does not divide over mesh.tensor {mesh[1]}.")
        rows = max(1, tokens // length)
        rule = f"makes batches of {rows} rows of {length}, not a multiple of mesh.data {mesh[0]}."
        require(rows % mesh[0] == 0, "data.tokens", tokens, rule)


def read(path: Path, strength: str = "default") -> Settings:
    """The config at ``path`` for one of its lambdas.

    Raises:
      ConfigError: no such file, missing or unknown keys, numbers out of range.
      ModelError: a written-out model config kvjax does not read.
    """
    return read_config(path, lambda tree: parse(tree, strength), "configs/gates/embedded.yaml")


def parse(tree: dict[str, Any], strength: str = "default") -> Settings:
    """``read`` on a parsed config."""
    mesh = axes(tree.get("mesh", {}))
    loss, model = tree["loss"], tree["model"]
    require(loss["cost"] in COSTS, "loss.cost", loss["cost"], f"is none of {', '.join(COSTS)}.")
    dtype = model.get("dtype", "float32")
    require(dtype in ("float32", "bfloat16"), "model.dtype", dtype, "is none of float32, bfloat16.")
    _check_data(tree["data"], mesh)
    plan = loop.Cadence(**tree["plan"])
    count(plan.steps, "plan.steps")
    return Settings(
        name=tree["name"],
        strength=strength,
        lam=_lambda(loss["lambdas"], strength),
        cost=loss["cost"],
        seed=count(tree["seed"], "seed", 0),
        folder=Path(tree["folder"]) / strength,
        source=str(model["source"]),
        spec=published(model),
        dtype=dtype,
        remat=bool(model.get("remat", False)),
        sinks=count(tree.get("sinks", 4), "sinks", 0),
        gate=_gate(tree.get("gate", {})),
        rate=_rate(tree.get("optimizer", {})),
        plan=plan,
        mesh=mesh,
        data=tree["data"],
        check=tree["check"],
    )


def backbone(settings: Settings) -> LanguageModel:
    """The frozen model in the config's dtype, in the host's memory; raises as ``train.config.backbone``."""
    return config.backbone(settings.source, settings.dtype, settings.spec)


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
