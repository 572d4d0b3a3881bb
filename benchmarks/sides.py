"""What is compared: our policies, our dense cache of a quarter of the length, and the peers."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from pathlib import Path

from benchmarks import machine, peers
from benchmarks.child import Child
from benchmarks.random_model import SIZES, count
from kvjax.catalogue import policy
from kvjax.cli import InputError, option, shared, whole
from kvjax.models.spec import ModelSpec
from kvjax.sharding.mesh import ONE, Mesh, sizes_of
from kvjax.sharding.specs import AXES
from kvjax.types import WEIGHT_DTYPES

FULL, UNIFORM, PER_HEAD = "full", "snapkv + uniform(0.25)", "snapkv + ada(0.25)"
OURS = (FULL, UNIFORM, PER_HEAD)
DTYPES = ("float32", "bfloat16")
NO_PEERS = "no --peers folder was given; python -m benchmarks peers --make DIR makes one"


@dataclasses.dataclass(frozen=True)
class Config:
    """One line of a table.

    Attributes:
      system: "kvjax", "transformers" or "kvpress".
      name: a policy of ours in the one-string form, "quarter", or the peer's own name.
      spec: the policy or press that its process uses.
      share: of the context's prompt that this prompt has.
      weight_dtype: what our weights are quantised to, or None.
    """

    system: str
    name: str
    spec: str
    share: float = 1.0
    weight_dtype: str | None = None


QUARTER = Config("kvjax", "quarter", FULL, 0.25)
"""Our dense cache of the tokens that a policy which drops 75 % keeps."""

QUANTISED = {
    name: Config("kvjax", f"full, {name} weights", FULL, weight_dtype=name) for name in WEIGHT_DTYPES
}

PEERS = (
    Config("transformers", "full", "full"),
    Config("kvpress", "snapkv 75 %", "snapkv"),
    Config("kvpress", "adakv 75 %", "adakv"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a table compares, as options of its command line."""

    size: str = option("base", "of the random model", choices=sorted(SIZES))
    model: Path | None = option(None, "a model's folder, instead of a random model", "DIR")
    seed: int = option(0, "of weights and prompts", type=whole(0))
    threads: int = option(1, "CPUs each side is pinned to")
    contexts: tuple[int, ...] = option(
        (2048, 8192), "prompt and new tokens of a row together", flag="--context"
    )
    batches: tuple[int, ...] = option((1, 8), "rows", flag="--batch")
    dtypes: tuple[str, ...] = option(DTYPES, "of weights and cache", choices=DTYPES, flag="--dtype")
    policies: tuple[str, ...] = option(OURS, "ours, in the one-string form", "SPEC", flag="--policy")
    weight_dtypes: tuple[str, ...] = option(
        (), "our full cache again, its weights quantised", choices=WEIGHT_DTYPES, flag="--weight-dtype"
    )
    tokens: int = option(16, "of a row in one timed piece")
    rounds: int = option(5, "timed pieces (prefill: calls) of each side, in turns")
    mesh: str | None = shared("--mesh", help="virtual devices for our side (default: one)")
    peers: Path | None = option(None, "environment that `peers --make` made", "DIR")
    fill: bool = option(False, "decode from a full cache of random values, without reading")
    products: bool = option(False, "prefill also times the prompt without attention (full caches)")

    def __post_init__(self) -> None:
        for name in self.policies:
            policy(name)  # raises PolicyError
        if self.peers is not None:
            peers.command(self.peers)  # raises InputError
        machine.cpus(self.threads)
        for batch in self.batches if self.mesh is not None else ():
            heads = {"heads": self.spec.num_heads, "kv_heads": self.spec.num_kv_heads}
            self.grid.check(f"--mesh {self.mesh} --batch {batch}", rows=batch, **heads)
        for context in self.contexts:
            if context > self.spec.max_positions:
                raise InputError(
                    f"--context {context} exceeds the {self.spec.max_positions} positions of "
                    f"{self.model or self.size}. Ask for less."
                )
            if (context - self.new) * QUARTER.share < 1:
                raise InputError(
                    f"--context {context} leaves no prompt before {self.new} new tokens (--tokens "
                    f"{self.tokens}, --rounds {self.rounds}). Raise it, or time fewer tokens."
                )

    @functools.cached_property
    def spec(self) -> ModelSpec:
        """Raises InputError: a folder that holds no model."""
        if self.model is None:
            return SIZES[self.size]
        from kvjax.models import hf

        try:
            return hf.read_spec(self.model)[0]
        except hf.ModelError as error:
            raise InputError(f"--model {self.model}: {error}") from error

    @property
    def grid(self) -> Mesh:
        """The mesh, by its sizes."""
        return ONE if self.mesh is None else sizes_of(self.mesh)

    @property
    def new(self) -> int:
        """New tokens of a row: the first, those of pieces that warm up, the timed ones."""
        return 1 + self.tokens * (WARM + self.rounds)

    def prompt(self, context: int, config: Config) -> int:
        return int((context - self.new) * config.share)

    def configs(self, quarter: bool) -> list[Config]:
        """Lines of the table, peers last."""
        ours = [Config("kvjax", name, name) for name in self.policies]
        ours += [QUANTISED[name] for name in self.weight_dtypes]
        if self.policies == (FULL,):  # the other lines are what policies that drop are compared with
            return [*ours, PEERS[0]]
        return [*ours, *([QUARTER] if quarter else []), *PEERS]

    def reading(self, rows: int, prompt: int) -> float:
        """Rough seconds to read prompts, only for the bar: 40 G operations a second."""
        return rows * prompt * (2 * count(self.spec) + 2 * self._width * prompt) / 4e10

    def writing(self, rows: int, held: int) -> float:
        """Rough seconds of one timed piece with that many tokens held, only for the bar."""
        weights, tokens = 4 * count(self.spec), rows * held * 4 * self._width
        return self.tokens * (weights + 3 * tokens) / 5e9

    @property
    def _width(self) -> int:
        """Values of a token's queries in all layers."""
        return self.spec.num_layers * self.spec.num_heads * self.spec.head_dim

    def open(self, config: Config) -> Child:
        if config.system == "kvjax":
            command = [sys.executable, "-m", "benchmarks.ours"]
            return Child(command, self.threads, math.prod(self.grid.size(axis) for axis in AXES))
        assert self.peers is not None  # the caller skips peers that are absent
        return Child(peers.command(self.peers), self.threads)


WARM = 2
"""Pieces before the timed ones: the first compiles the steps, the second the check of a grown pool."""
