"""What configs/ranker/*.yaml may say, checked before anything is read or compiled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.models.spec import ModelSpec
from kvjax.policies.kvp import INPUTS
from train import config, loop
from train.config import ConfigError, count, number, one_of, published, read_config, require

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel

EXAMPLE = "configs/ranker/embedded.yaml"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """What ``train.traces`` stores.

    Attributes:
      folder: of the traces, unless --out says another.
      sequences, held: how many to train on, and how many to check on.
      lengths, shares: tokens of a sequence, and how often each length is drawn.
      shard: sequences of a file.
      queries: of each sequence, evenly spread; None stores all.
      keys: "post", "pre" RoPE, or both.
      dtype: as stored.
      data: where the text comes from, as written.
    """

    folder: Path
    sequences: int
    held: int
    lengths: tuple[int, ...]
    shares: tuple[float, ...]
    shard: int = 8
    queries: int | None = None
    keys: tuple[str, ...] = ("post",)
    dtype: str = "float16"
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agent:
    """The agents.

    Attributes:
      inputs: leaves of ``kvjax.policies.kvp.INPUTS``.
      hidden, layers: width, and layers with the output layer counted.
      sinks, recent: tokens that are always kept and therefore not ranked.
      standardise: give inputs zero mean and unit variance; folded into the weights that are exported.
    """

    inputs: tuple[str, ...] = ("w_key", "w_value", "w_log")
    hidden: int = 256
    layers: int = 2
    sinks: int = 4
    recent: int = 16
    standardise: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How they learn.

    Attributes:
      kind: "rloo", or "soft_rank", the supervised surrogate.
      permutations: rankings drawn for each trace.
      rows: traces of a batch.
      queries: future queries drawn for each trace.
      least_future: tokens that must follow what is ranked.
      budget: None for all, or one, as a share of the ranked tokens.
      normalise: divide advantages by their standard deviation.
      temperature: of the surrogate's sigmoids.
    """

    kind: str = "rloo"
    permutations: int = 8
    rows: int = 1
    queries: int = 128
    least_future: int = 16
    budget: float | None = None
    normalise: bool = True
    temperature: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """AdamW's settings.

    Attributes:
      peak, final: learning rate after the warm-up and at the end of its cosine.
      warmup: updates of the linear rise.
      start: where it begins, as a share of the peak.
      clip: of each agent's gradient.
      weight_decay: of matrices.
    """

    peak: float = 5e-5
    final: float = 1e-6
    warmup: int = 100
    start: float = 0.01
    clip: float = 5.0
    weight_decay: float = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A config as read.

    Attributes:
      name: of the config.
      seed: of agents, sequences and batches.
      folder: of checkpoints and log.
      source, spec, dtype: the backbone, as in ``train.config.backbone``.
      recording, agent, method, rate, plan: see there.
      only: kinds of sequences that are trained and checked on, as ``traces.data.mix`` names them; () is all.
      devices: over which agents are spread.
    """

    name: str
    seed: int
    folder: Path
    source: str
    spec: ModelSpec | None
    dtype: str
    recording: Recording
    agent: Agent
    method: Method
    rate: Rate
    plan: loop.Cadence
    only: tuple[str, ...] = ()
    devices: int = 1

    def check_length(self, tokens: int) -> None:
        """Refuses a sequence in which nothing can be ranked.

        Raises:
          ConfigError: shorter than what is protected, two tokens to rank, and a future.
        """
        agent, future = self.agent, self.method.least_future
        least = agent.sinks + agent.recent + 2 + future
        if tokens < least:
            raise ConfigError(
                f"a sequence of {tokens} tokens is shorter than {least}: {agent.sinks} sinks, {agent.recent} "
                f"recent, 2 to rank and method.least_future {future}. Give longer ones, or protect fewer."
            )

    def model(self) -> LanguageModel:
        """The backbone; raises as ``train.config.backbone``."""
        return config.backbone(self.source, self.dtype, self.spec)


def read(path: Path, source: str | None = None, variant: str | None = None) -> Settings:
    """The config at ``path``.

    Args:
      path: the file.
      source: another model than it names.
      variant: of its ``variants``; what that says replaces what the config says, key by key, and its run lies
        in a folder of its own beside the others'.

    Raises:
      ConfigError: no such file or variant, missing or unknown keys, numbers out of range.
      ModelError: a written-out model config kvjax does not read.
    """
    return read_config(path, lambda tree: parse(varied(tree, variant), source), EXAMPLE)


def varied(tree: dict[str, Any], variant: str | None) -> dict[str, Any]:
    """A config's tree as one of its variants, or as it stands.

    Raises:
      ConfigError: it has no such variant.
    """
    variants = tree.get("variants", {})
    if variant is None:
        return tree
    if variant not in variants:
        raise ConfigError(f"--variant {variant}: the config has {', '.join(variants) or 'none'}.")
    changes = variants[variant]
    merged = {
        name: tree[name] | value if isinstance(value, dict) and name in tree else value
        for name, value in changes.items()
    }
    own = {
        "name": f"{tree['name']}-{variant}",
        "folder": str(Path(tree["folder"]).with_name(f"{tree['name']}-{variant}")),
    }
    return tree | own | merged


def parse(tree: dict[str, Any], source: str | None = None) -> Settings:
    """``read`` on a parsed config."""
    model = tree["model"]
    named = str(model["source"]) if source is None else source
    return Settings(
        name=tree["name"],
        seed=count(tree["seed"], "seed", 0),
        folder=Path(tree["folder"]),
        source=named,
        spec=published(model) if named == str(model["source"]) else None,
        dtype=one_of(model.get("dtype", "float32"), "model.dtype", ("float32", "bfloat16")),
        recording=_recording(tree["traces"]),
        agent=_agent(tree.get("agent", {})),
        method=_method(tree.get("method", {})),
        rate=_rate(tree.get("optimizer", {})),
        plan=_plan(tree["plan"]),
        only=tuple(tree.get("only", ())),
        devices=count(tree.get("devices", 1), "devices"),
    )


def _recording(given: dict[str, Any]) -> Recording:
    lists: dict[str, Any] = {
        name: tuple(given[name]) for name in ("lengths", "shares", "keys") if name in given
    }
    found = Recording(**given | lists | {"folder": Path(given["folder"])})
    for name in ("sequences", "held", "shard"):
        count(getattr(found, name), f"traces.{name}")
    if found.queries is not None:
        count(found.queries, "traces.queries")
    alike = bool(found.lengths) and len(found.lengths) == len(found.shares)
    require(alike, "traces.lengths", list(found.lengths), "needs one of traces.shares each.")
    for length in found.lengths:
        count(length, "traces.lengths", 2)
    for share in found.shares:
        require(number(share, "traces.shares") > 0, "traces.shares", share, "is no share. Give one above 0.")
    require(bool(found.keys), "traces.keys", [], "stores no keys. Give post, pre, or both.")
    for key in found.keys:
        one_of(key, "traces.keys", ("post", "pre"))
    require(
        "post" in found.keys, "traces.keys", list(found.keys), "lacks post, by which attention is computed."
    )
    one_of(found.dtype, "traces.dtype", ("float16", "float32"))
    one_of(found.data.get("kind", "rows"), "traces.data.kind", ("rows", "documents"))
    return found


def _agent(given: dict[str, Any]) -> Agent:
    names = {name: tuple(f"w_{word}" for word in given[name]) for name in ("inputs",) if name in given}
    found = Agent(**given | names)
    short = tuple(name.removeprefix("w_") for name in INPUTS)
    require(bool(found.inputs), "agent.inputs", [], f"sees nothing. Give some of {', '.join(short)}.")
    for name in found.inputs:
        one_of(name.removeprefix("w_"), "agent.inputs", short)
    inputs = tuple(name for name in INPUTS if name in found.inputs)
    count(found.hidden, "agent.hidden")
    count(found.layers, "agent.layers", 2)
    for name in ("sinks", "recent"):
        count(getattr(found, name), f"agent.{name}", 0)
    return dataclasses.replace(found, inputs=inputs)


def _method(given: dict[str, Any]) -> Method:
    found = Method(**given)
    one_of(found.kind, "method.kind", ("rloo", "soft_rank"))
    count(found.permutations, "method.permutations", 2)
    for name in ("rows", "queries", "least_future"):
        count(getattr(found, name), f"method.{name}")
    if found.budget is not None:
        share = number(found.budget, "method.budget")
        require(0 < share < 1, "method.budget", share, "is no share. Give one above 0 and below 1, or null.")
    hot = number(found.temperature, "method.temperature")
    require(hot > 0, "method.temperature", hot, "is no temperature. Give a number above 0.")
    return dataclasses.replace(found, temperature=hot)


def _rate(given: dict[str, Any]) -> Rate:
    found = Rate(**given)
    names = ("peak", "final", "start", "clip", "weight_decay")
    numbers: dict[str, Any] = {name: number(getattr(found, name), f"optimizer.{name}") for name in names}
    for name in ("peak", "clip"):
        require(numbers[name] > 0, f"optimizer.{name}", numbers[name], "learns nothing. Give one above 0.")
    for name in ("final", "start", "weight_decay"):
        require(numbers[name] >= 0, f"optimizer.{name}", numbers[name], "is below 0. Give 0 or more.")
    count(found.warmup, "optimizer.warmup", 0)
    return dataclasses.replace(found, **numbers)


def _plan(given: dict[str, Any]) -> loop.Cadence:
    plan = loop.Cadence(**given)
    count(plan.steps, "plan.steps")
    return plan
