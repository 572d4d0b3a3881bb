"""A row of results: one cell, measured. On disk it is one JSON object, whose keys are the fields here."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvjax.catalogue import describe
from kvjax.catalogue import policy as parse_policy

CHAT, RAW = "chat", "raw"
"""How a sample is put to the model: through its chat template, or as bare words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What is measured: one task at one length under one policy.

    Attributes:
      task, length: name of the task; L, tokens.
      policy: the one-string form that parses back to it.
      protocol: agnostic, aware, either or answer.
      seed, samples: of the samples, and how many.
      weights: learned ones of the policy, as ``kvjax.weights.Found.label`` names them.
      prompt: chat or raw; on disk a row says it only if it is chat.
    """

    task: str
    length: int
    policy: str
    protocol: str
    seed: int
    samples: int
    weights: str = ""
    prompt: str = RAW

    @property
    def drawn(self) -> tuple[str, int, int, int, str]:
        """(task, length, seed, number, prompt): equal for cells about the same samples."""
        return self.task, self.length, self.seed, self.samples, self.prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switches:
    """How a policy was applied; ``protocol.switches`` reads it off the policy.

    Attributes:
      compress_at: when the cache shrinks.
      prefill_attention: "policy" where the prompt is already read through the policy, else "full".
      budget: the parts that limit what is kept or read.
      sinks, recent: tokens that always stay.
    """

    compress_at: str
    prefill_attention: str
    budget: str
    sinks: int
    recent: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reads:
    """What a decode step loads per KV head, in tokens (K and V of one position); means over samples.

    Attributes:
      slots: live slots.
      summary, summary_paper: φ, by its bytes and by the paper's count.
      selector: what the selection looks at to choose.
    """

    slots: float
    summary: float
    selector: float
    summary_paper: float = 0.0

    def equivalent(self, generated: int = 1, *, by_bytes: bool = False) -> float:
        """Token-equivalents a step with φ read once for ``generated`` tokens; the selector is not counted."""
        return self.slots + (self.summary if by_bytes else self.summary_paper) / generated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of one row of the cache, means over samples.

    Attributes:
      live, allocated: when the answer begins.
      peak_live: live at its highest while answering.
      peak_allocated, prefill_live: at their highest, prefill included.
      full: of the full cache on the same samples.
    """

    live: float
    peak_live: float
    allocated: float
    peak_allocated: float
    prefill_live: float
    full: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Each:
    """Values per sample, in order; pairs and intervals are made of them.

    Attributes:
      score: in [0, 1]; None where only likelihood is judged.
      nll, tokens: mean nats of the scored reference tokens, and how many they are.
      kept, live, peak_live, retention: as in ``batch.Outcome``.
      ranked: is the likeliest label the right one? None without labels.
      output: the text that was written; None where nothing is.
      digits: share of the reference's digits that are right; None unless all references are numbers.
      found: of each scored span, are all its tokens the likeliest after the reference's own? None for all
        tasks but recall.
      written: tokens of the answer: of what was written up to its end, or of a long answer; None where
        nothing is written.
      kl, top: as in ``batch.Outcome``; None for tasks that are not compared with the full cache.
      tags: facts that results are grouped by, such as depth; on disk they are fields like the others.
    """

    score: list[Any]
    nll: list[float]
    tokens: list[int]
    kept: list[float]
    live: list[float]
    peak_live: list[float]
    retention: list[float | None]
    ranked: list[float | None] | None = None
    output: list[str] | None = None
    digits: list[float] | None = None
    tags: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    found: list[list[int]] | None = None
    written: list[int] | None = None
    kl: list[float] | None = None
    top: list[float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """The first sample, token by token.

    Attributes:
      held: how many (layer, KV head) hold each token when the answer begins.
      pieces, needed, answer: its tokens as text, which of them hold the answer, and that; full cache only.
    """

    held: list[int]
    pieces: list[str] | None = None
    needed: list[int] | None = None
    answer: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """The full cache on the same samples."""

    score: float | None
    nll: float
    perplexity: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A measured cell.

    Attributes:
      cell: what was measured.
      policy: its policy, as ``catalogue.describe`` gives it.
      group, metric: of the task.
      model, data: names of the model, and of where texts came from.
      switches: how the policy was applied.
      score, nll, ranked, digits: means over samples; None where the task has none.
      perplexity, bits_per_byte: of the scored tokens; perplexity tasks only.
      kept_fraction: live slots over tokens seen when the answer begins, mean over samples, layers and heads.
      peak_fraction, mean_fraction: the same over the steps of the answer: the highest, the mean.
      reads_per_step: slots and φ together.
      reads, bytes: what a step loads, and what was held.
      span_retention: share of (layer, head, needed token) held when the answer begins; None if none is.
      heads: kept fraction by layer and KV head, ``[L][K]``.
      each, example: per sample; the first sample.
      full: the full cache on the same samples.
      informative: does the full cache reach 80 % there? Else the cell says nothing about a policy.
      versions: of the software.
    """

    cell: Cell
    policy: dict[str, Any]
    group: str
    metric: str
    model: str
    data: str
    switches: Switches
    score: float | None
    nll: float
    ranked: float | None
    digits: float | None
    perplexity: float | None
    bits_per_byte: float | None
    kept_fraction: float
    peak_fraction: float
    mean_fraction: float
    reads_per_step: float
    reads: Reads
    span_retention: float | None
    bytes: Bytes
    heads: list[list[float]]
    each: Each
    example: Example
    full: Reference
    informative: bool
    versions: dict[str, str]

    @property
    def parts(self) -> frozenset[str]:
        """Names of the parts of the policy."""
        return frozenset(part["name"] for part in self.policy["parts"])

    @property
    def selects(self) -> bool:
        """Does the policy choose what each step reads?"""
        return any(part["place"] == "selection" for part in self.policy["parts"])


NESTED: dict[str, Any] = {
    "cell": Cell,
    "switches": Switches,
    "reads": Reads,
    "bytes": Bytes,
    "example": Example,
    "full": Reference,
}


def as_json(row: Row) -> dict[str, Any]:
    """The row as a JSON object, without what is None in ``each`` and ``example``, and without "raw"."""
    tree = dataclasses.asdict(row)
    if row.cell.prompt == RAW:
        del tree["cell"]["prompt"]
    for name in ("each", "example"):
        tree[name] = {key: value for key, value in tree[name].items() if value is not None}
    each = tree["each"]
    last = {name: each.pop(name) for name in ("found", "written", "kl", "top") if name in each}
    tree["each"] = each | each.pop("tags") | last
    return tree


def from_json(tree: dict[str, Any]) -> Row:
    """The row of a JSON object; an object that does not describe its policy gets that from the policy's name.

    Raises:
      PolicyError: no description, and a policy that cannot be parsed.
      TypeError, KeyError: the object is not a row.
    """
    policy = tree.get("policy") or describe(parse_policy(tree["cell"]["policy"]))
    known = {field.name for field in dataclasses.fields(Each)}
    each = {name: value for name, value in tree["each"].items() if name in known}
    tags = {name: value for name, value in tree["each"].items() if name not in known}
    # Older rows call the weights of a cell gates.
    cell = {"weights" if name == "gates" else name: value for name, value in tree["cell"].items()}
    nested = {name: kind(**(tree | {"cell": cell})[name]) for name, kind in NESTED.items()}
    return Row(**(tree | nested | {"policy": policy, "each": Each(**each, tags=tags)}))


def short(value: Any) -> Any:
    """Floats to six significant digits, in trees of dataclasses, lists and dicts; arrays become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: short(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return type(value)(**fields)
    if isinstance(value, dict):
        return {name: short(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [short(x) for x in value]
    if isinstance(value, np.ndarray):
        return short(value.tolist())
    if isinstance(value, (float, np.floating)):
        return float(f"{float(value):.6g}")
    return int(value) if isinstance(value, np.integer) else value
