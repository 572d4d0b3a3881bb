"""What configs/ranker/*.yaml may say, checked before anything is read or compiled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from kvjax.cli import option, whole
from kvjax.policies.kvp import INPUTS
from train import config
from train.config import NOT_NEGATIVE, OPEN_SHARE, POSITIVE, REQUIRED, ConfigError, require
from train.settings import TrainingSettings

EXAMPLE = "configs/ranker/embedded.yaml"

SHORT = tuple(name.removeprefix("w_") for name in INPUTS)
"""The inputs as configs name them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """What ``train.traces`` stores."""

    folder: Path = option(REQUIRED, "of the traces, unless --out names another")
    sequences: int = option(REQUIRED, "to train on")
    held: int = option(REQUIRED, "to check on")
    lengths: tuple[int, ...] = option(REQUIRED, "tokens of a sequence", type=whole(2))
    shares: tuple[float, ...] = option(REQUIRED, "how often each length is drawn", type=POSITIVE)
    shard: int = option(8, "sequences of a file")
    queries: int | None = option(None, "of each sequence, evenly spread; None stores all")
    keys: tuple[Literal["post", "pre"], ...] = option(("post",), "after RoPE, before it, or both")
    dtype: Literal["float16", "float32"] = option("float16", "as stored")
    data: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ConfigError: values that do not go together."""
        lengths, keys, kind = self.lengths, list(self.keys), self.data.get("kind", "rows")
        each = len(lengths) == len(self.shares)
        require(each, "traces.lengths", list(lengths), "needs one of traces.shares each.")
        require("post" in keys, "traces.keys", keys, "lacks post, by which attention is computed.")
        kinds = ("rows", "chat", "documents")
        require(kind in kinds, "traces.data.kind", kind, f"is none of {', '.join(kinds)}.")


def _inputs(names: Any) -> tuple[str, ...]:
    """The leaves of ``kvjax.policies.kvp.INPUTS`` that a config names, in their order there."""
    require(bool(names), "agent.inputs", names, f"sees nothing. Give some of {', '.join(SHORT)}.")
    for name in names:
        require(name in SHORT, "agent.inputs", name, f"is none of {', '.join(SHORT)}.")
    return tuple(f"w_{name}" for name in SHORT if name in names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agent:
    """The agents."""

    inputs: tuple[str, ...] = option(("w_key", "w_value", "w_log"), "that an agent sees", type=_inputs)
    hidden: int = option(256, "width")
    layers: int = option(2, "with the output layer counted", type=whole(2))
    sinks: int = option(4, "first tokens that are always kept and therefore not ranked", type=whole(0))
    recent: int = option(16, "last ones, likewise", type=whole(0))
    standardise: bool = option(True, "give inputs zero mean and unit variance; folded into exported weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How they learn."""

    kind: Literal["rloo", "soft_rank", "projected_rank"] = option(
        "rloo", "the others are supervised surrogates: pairwise sigmoids, Blondel's projection"
    )
    permutations: int = option(8, "rankings drawn for each trace", type=whole(2))
    rows: int = option(1, "traces of a batch")
    queries: int = option(128, "future queries drawn for each trace")
    least_future: int = option(16, "tokens that must follow what is ranked")
    budget: float | None = option(
        None, "None for all, or one, as a share of the ranked tokens", type=OPEN_SHARE
    )
    normalise: bool = option(True, "divide advantages by their standard deviation")
    temperature: float = option(1.0, "of the surrogate's ranks", type=POSITIVE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """AdamW's settings."""

    peak: float = option(5e-5, "learning rate after the warm-up", type=POSITIVE)
    final: float = option(1e-6, "and at the end of its cosine", type=NOT_NEGATIVE)
    warmup: int = option(100, "updates of the linear rise", type=whole(0))
    start: float = option(0.01, "where it begins, as a share of the peak", type=NOT_NEGATIVE)
    clip: float = option(5.0, "of each agent's gradient", type=POSITIVE)
    weight_decay: float = option(0.01, "of matrices", type=NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(TrainingSettings):
    """A config as read."""

    recording: Recording = option(REQUIRED, "see there", flag="traces")
    agent: Agent = option(Agent(), "see there")
    method: Method = option(Method(), "see there")
    rate: Rate = option(Rate(), "see there", flag="optimizer")
    only: tuple[str, ...] = option((), "kinds of sequences, as traces.data.mix names them; () is all")
    devices: int = option(1, "over which agents are spread")

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


def read(path: Path, source: str | None = None, variant: str | None = None) -> Settings:
    """The config at ``path``.

    Args:
      path: the file.
      source: another model than it names.
      variant: of its ``variants``; its keys replace those of the config, and its run lies in a folder of its
        own beside the others'.

    Raises:
      ConfigError: no such file or variant, missing or unknown keys, numbers out of range.
      ModelError: a written-out model config that kvjax does not read.
    """
    return config.read_config(path, lambda tree: parse(varied(tree, variant), source), EXAMPLE)


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
    merged = {
        name: tree[name] | value if isinstance(value, dict) and name in tree else value
        for name, value in variants[variant].items()
    }
    name = f"{tree['name']}-{variant}"
    return tree | {"name": name, "folder": str(Path(tree["folder"]).with_name(name))} | merged


def parse(tree: dict[str, Any], source: str | None = None) -> Settings:
    """``read`` on a parsed config; the keys of configs/phi are passed over."""
    others = ("variants", "maps", "loss", "target", "silence")
    return config.section(Settings, tree, others=others).of(source)
