"""The command line of ``python -m benchmarks``: its options, and what is refused before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks import compile as compiling
from benchmarks import machine, peers
from benchmarks.random_model import SIZES
from benchmarks.serving import Serving
from benchmarks.sides import DTYPES, Comparison
from kvjax import cli
from kvjax.catalogue import policy
from kvjax.cli import option, shared, whole

QUICK = {
    "size": "tiny",
    "contexts": (256,),
    "batches": (1, 2),
    "dtypes": ("float32",),
    "tokens": 4,
    "rounds": 2,
}
"""Defaults of ``--quick``, which only shows that everything runs."""

SERVE_QUICK = {"batches": (2,), "prompt": 96, "long": 96, "prefix": 300, "new": 12, "fit": 2}


DRAFTED = ("base", "0.5b", "1b", "llama-3.1-8b")
"""Models of the table of drafts."""


_SHARE = cli.Rule(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")


def _shares(text: str) -> list[float]:
    return [_SHARE(word) for word in cli.words(text)] or [_SHARE("")]


def _specs(default: tuple[str, ...]) -> Any:
    return shared("--policy", default, "one-string form; several times", action="append", flag="--policy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """Measure the host's cost of a decode step."""

    layers: int = option(36, "of the model")
    policies: tuple[str, ...] = _specs(("full", "snapkv + ada(0.25)", "quest", "int8"))
    repeats: int = option(300, "steps that are timed")
    mesh: str | None = shared("--mesh", help="devices of this process (default: one)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rows:
    """Options of the commands that measure rows."""

    out: Path | None = shared("--out", help="save rows there, such as results/bench")
    json: bool = shared("--json", False, "rows as JSON lines")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile(_Rows):
    """Measure seconds and programs of a first and a second start, by depth."""

    depths: tuple[int, ...] = option(compiling.LAYERS, "of a narrow model", flag="--layers")
    size: str | None = option(None, "of a random model, in place of --layers", choices=sorted(SIZES))
    policies: tuple[str, ...] = _specs(compiling.POLICIES)
    threads: int = option(compiling.THREADS, "CPUs")

    def __post_init__(self) -> None:
        """Raises PolicyError or InputError: a policy that cannot be built, more threads than CPUs."""
        for spec in self.policies:
            policy(spec)
        machine.cpus(self.threads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafts(_Rows):
    """Work out what drafts can gain, from the bytes of a step."""

    models: tuple[str, ...] = option(DRAFTED, "models", choices=DRAFTED, flag="--size")
    drafts: tuple[str, ...] = option(
        ("quest(chunks=8, dense=0)", "quest(chunks=8)", "topk(0.01)"),
        "a selection; several times",
        "SPEC",
        action="append",
        flag="--draft",
    )
    contexts: tuple[int, ...] = option((8192, 32768, 131072), "tokens that a row has seen", flag="--context")
    batches: tuple[int, ...] = option((1, 4, 8), "rows", flag="--batch")

    def __post_init__(self) -> None:
        """Raises PolicyError: a selection that cannot be built."""
        for spec in self.drafts:
            policy(spec)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafted(_Rows):
    """Measure the speed of drafts beside the formula, with acceptance planted."""

    size: str = option("base", "of the random model", choices=sorted(SIZES))
    drafts: tuple[str, ...] = option(
        ("quest(chunks=8, dense=0)", "topk(0.01)"), "a selection; several times", "SPEC", action="append",
        flag="--draft",
    )  # fmt: skip
    contexts: tuple[int, ...] = option((32768,), "tokens of a row", flag="--context")
    batches: tuple[int, ...] = option((1, 8), "rows", flag="--batch")
    accepted: tuple[float, ...] = option((0.8,), "planted acceptance", "X,X", type=_shares)
    most: int = option(8, "tokens of a draft", type=whole(2))
    rounds: int = option(3, "turns of each kind")

    def __post_init__(self) -> None:
        """Raises PolicyError: a selection that cannot be built."""
        for spec in self.drafts:
            policy(spec)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accepted(_Rows):
    """Measure how many drafted tokens stand in the embedded model's text."""

    targets: tuple[str, ...] = _specs(("full", "snapkv + uniform(0.5)"))
    drafts: tuple[str, ...] = option(
        ("quest(chunks=8)", "quest(chunks=8, dense=0)", "topk(0.02)"), "a selection; several times", "SPEC",
        action="append", flag="--draft",
    )  # fmt: skip
    tasks: tuple[str, ...] = option(
        ("ppl_books", "niah", "mqar"), "of evaluation, whose prompts are written on", "NAMES", type=cli.words,
        flag="--task",
    )  # fmt: skip
    contexts: tuple[int, ...] = option((1024, 4096), "tokens of prompt and text", flag="--context")
    temperatures: tuple[float, ...] = option((0.0, 0.8), "of sampling", "X,X", type=_shares)
    count: int = option(4, "prompts of a task", flag="--samples")
    new: int = option(64, "tokens written behind each")

    def __post_init__(self) -> None:
        """Raises PolicyError: a policy or selection that cannot be built."""
        for spec in (*self.targets, *self.drafts):
            policy(spec)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load(_Rows):
    """Measure seconds and peak memory of reading a model, beside transformers."""

    size: str = option("0.5b", "of the random model", choices=sorted(SIZES))
    seed: int = option(0, "of the weights", type=whole(0))
    dtypes: tuple[str, ...] = option(DTYPES, "of weights in memory", choices=DTYPES, flag="--dtype")
    rounds: int = option(2, "processes of each row")
    threads: int = option(1, "CPUs")
    peers: Path | None = option(None, "environment that `peers --make` made", "DIR")

    def __post_init__(self) -> None:
        """Raises InputError: a folder without peers, more threads than CPUs."""
        if self.peers is not None:
            peers.command(self.peers)
        machine.cpus(self.threads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table(Comparison, _Rows):
    """A table of rows; ``table`` is its name, and that of the module that measures it."""

    table: ClassVar[str]
    quick: bool = option(False, "seconds instead of minutes: only that it runs")


class Decode(Table):
    """Measure tokens a second, beside transformers and kvpress; an interrupted run goes on with --out."""

    table = "decode"


class Prefill(Table):
    """Measure time to first token and peak memory, beside them; an interrupted run goes on with --out."""

    table = "prefill"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile(Table):
    """Measure where a decode step's time goes; an interrupted run goes on with --out."""

    table = "profile"
    batches: tuple[int, ...] = Comparison.batches  # one row of ours alone: no options for others
    mesh: str | None = None
    peers: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(Serving, _Rows):
    """Measure the engine beside generate, and policies at equal KV memory."""

    quick: bool = option(False, "only that it runs")

    def __post_init__(self) -> None:
        """Raises InputError or PolicyError: a folder without peers, a policy that cannot be built."""
        super().__post_init__()
        for spec in self.policies:
            policy(spec)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw pictures and a page of saved results."""

    out: Path | None = shared("--out", help="folder of results (default: results/bench)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity:
    """Compare the tokens that evictions keep with those that kvpress keeps."""

    peers: Path = option(None, "environment made by `peers --make`", "DIR", required=True)
    only: tuple[str, ...] = option((), "methods to compare anew; rows of others stay", "METHOD", nargs="+")
    out: Path = option(Path("results/parity"), "folder of the results")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of a row under each method, beside those of kvpress's cache."""

    peers: Path | None = option(None, "environment made by `peers --make`; without it ours alone", "DIR")
    out: Path = option(Path("results/parity"), "folder of the results")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peers:
    """Make the environment with transformers and kvpress."""

    make: Path = option(None, "a new virtual environment", "DIR", required=True)
    pip: tuple[str, ...] = option((), "an argument of pip install torch, as --pip=…", "WORD", action="append")


COMMANDS: dict[str, type] = {
    "host": Host,
    "compile": Compile,
    "drafts": Drafts,
    "drafted": Drafted,
    "accepted": Accepted,
    "load": Load,
    "decode": Decode,
    "prefill": Prefill,
    "profile": Profile,
    "serve": Serve,
    "plot": Plot,
    "parity": Parity,
    "held": Held,
    "peers": Peers,
}


def parse(words: Sequence[str]) -> tuple[str, Any]:
    """The command's name and its options, an instance of its class in ``COMMANDS``.

    Raises:
      InputError: an unknown word, a number out of range, a folder without peers.
      PolicyError: a policy that cannot be built.
    """
    quick = "--quick" in words
    usual: dict[str, Any] = QUICK if quick else {}
    profile = {"contexts": (2048, 32768), "dtypes": ("float32",)} | usual
    defaults = {
        "decode": usual,
        "prefill": {"rounds": 2} | usual,
        "profile": {name: value for name, value in profile.items() if name != "batches"},
        "serve": SERVE_QUICK if quick else {},
    }
    about = {
        "prog": "python -m benchmarks",
        "description": "Benchmarks of the KV cache, beside our peers.",
        "examples": "The kernels have a command line of their own: python -m benchmarks kernels --help",
    }
    return cli.parse_command(COMMANDS, words, defaults, **about)
