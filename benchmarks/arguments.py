"""The command line of ``python -m benchmarks``: what can be said, and what is refused before any work."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import compile as compiling
from benchmarks import machine
from benchmarks.random_model import SIZES
from benchmarks.serving import PARTS, Serving
from benchmarks.sides import Settings
from kvjax import cli
from kvjax.catalogue import policy

DTYPES = ("float32", "bfloat16")

_FIELDS = {"context": "contexts", "batch": "batches", "dtype": "dtypes", "policy": "policies"}
"""Options that fill a field of another name."""

QUICK = {"size": "tiny", "context": [256], "batch": [1, 2], "dtype": ["float32"], "tokens": 4, "rounds": 2}
"""Defaults of ``--quick``: it proves that everything runs, and measures nothing worth knowing."""

SERVE_QUICK: dict[str, Any] = {"batches": (2,), "prompt": 96, "long": 96, "prefix": 300, "new": 12, "fit": 2}

HOST = ("full", "snapkv + ada(0.25)", "quest", "int8")
"""Policies of ``host`` when none is named."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """The command line, checked.

    Attributes:
      what: the command.
      settings: of the measuring commands.
      out: folder of results, or None.
      json: rows as JSON lines.
      policies: of ``host`` and ``compile``.
      layers, repeats, mesh: of ``host``.
      depths, threads: of ``compile``.
      serving: of ``serve``.
      make, pip: of ``peers``.
    """

    what: str
    settings: Settings | None = None
    out: Path | None = None
    json: bool = False
    layers: int = 36
    repeats: int = 300
    mesh: str | None = None
    policies: tuple[str, ...] = HOST
    depths: tuple[int, ...] = compiling.LAYERS
    threads: int = compiling.THREADS
    serving: Serving | None = None
    make: Path | None = None
    pip: tuple[str, ...] = ()


def parse(words: Sequence[str]) -> Asked:
    """The command and its options.

    Raises:
      InputError: an unknown word, a number out of range, a folder without peers.
      PolicyError: a policy that cannot be built.
    """
    said = vars(_parser("--quick" in words).parse_args(words))
    said.pop("quick", None)
    what = said.pop("what")
    if what == "host":
        policies = tuple(said["policy"] or HOST)
        named = {name: said[name] for name in ("layers", "repeats", "mesh")}
        return Asked(what=what, policies=policies, **named)
    if what == "compile":
        policies = tuple(said["policy"] or compiling.POLICIES)
        for spec in policies:
            policy(spec)  # raises PolicyError
        machine.cpus(said["threads"])
        return Asked(
            what=what,
            policies=policies,
            depths=tuple(said["layers"]),
            threads=said["threads"],
            out=said["out"],
            json=said["json"],
        )
    if what == "serve":
        out, as_json = said.pop("out"), said.pop("json")
        named = {"batch": "batches", "policy": "policies", "part": "parts"}
        serving: dict[str, Any] = {
            named.get(n, n): tuple(x) if isinstance(x, list) else x for n, x in said.items()
        }
        for spec in serving["policies"]:
            policy(spec)  # raises PolicyError
        return Asked(what=what, serving=Serving(**serving), out=out, json=as_json)
    if what == "peers":
        return Asked(what=what, make=said["make"], pip=tuple(said["pip"]))
    if what == "plot":
        return Asked(what=what, out=said["out"])
    out, as_json = said.pop("out"), said.pop("json")
    given = {_FIELDS.get(name, name): value for name, value in said.items()}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return Asked(what=what, settings=Settings(**given), out=out, json=as_json)


def _parser(quick: bool) -> cli.Parser:
    parser = cli.Parser(
        prog="python -m benchmarks", description="Benchmarks of the KV cache, beside our peers."
    )
    what = parser.add_subparsers(dest="what", required=True)
    one = what.add_parser("host", help="host cost of a decode step")
    one.add_argument("--layers", type=cli.whole("--layers"), default=36)
    cli.add(one, "--policy", action="append", help="one-string form; may be given several times")
    one.add_argument("--repeats", type=cli.whole("--repeats"), default=300)
    cli.add(one, "--mesh", help="devices of this process, as data=2,tensor=4 (default: one)")
    starts = what.add_parser("compile", help="seconds and programs of a first and a second start, by depth")
    starts.add_argument(
        "--layers", type=cli.whole("--layers"), nargs="+", default=compiling.LAYERS, metavar="N"
    )
    cli.add(starts, "--policy", action="append", help="one-string form; may be given several times")
    starts.add_argument(
        "--threads", type=cli.whole("--threads"), default=compiling.THREADS, metavar="N", help="CPUs"
    )
    cli.add(starts, "--out", help="save rows there, such as results/bench")
    cli.add(starts, "--json", help="rows as JSON lines")
    usual = QUICK if quick else {}
    beside = what.add_parser("decode", help="tokens a second, beside transformers and kvpress")
    _measuring(beside, peers=True, defaults=usual)
    beside = what.add_parser("prefill", help="time to first token and peak memory, beside them")
    _measuring(beside, peers=True, defaults={"rounds": 2} | usual)
    alone = what.add_parser("profile", help="where a decode step's time goes")
    _measuring(alone, peers=False, defaults={"context": [2048, 32768], "dtype": ["float32"]} | usual)
    _serving(
        what.add_parser("serve", help="the engine beside generate, and policies at equal KV memory"), quick
    )
    plot = what.add_parser("plot", help="pictures and a page of saved results")
    cli.add(plot, "--out", help="folder of results (default: results/bench)")
    peers = what.add_parser("peers", help="make the environment with transformers and kvpress")
    peers.add_argument("--make", type=Path, metavar="DIR", required=True, help="a new virtual environment")
    peers.add_argument(
        "--pip",
        action="append",
        default=[],
        metavar="WORD",
        help="an argument of pip install torch, as --pip=…",
    )
    return parser


def _serving(parser: argparse.ArgumentParser, quick: bool) -> None:
    """Options of ``Serving``."""
    usual = Serving(**SERVE_QUICK) if quick else Serving()

    def number(name: str, help: str, least: int = 1, **how: Any) -> None:
        default = getattr(usual, {"batch": "batches"}.get(name, name))
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        kind = cli.whole(f"--{name}", least)
        help = f"{help} (default: {shown})"
        parser.add_argument(f"--{name}", metavar="N", type=kind, default=default, help=help, **how)

    cli.add(parser, "--model")
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=PARTS, help="what is measured (default: all)"
    )
    number("batch", "rows of the engine and of generate", nargs="+")
    number("prompt", "prompt tokens of a request")
    number("long", "prompt tokens of a request where memory is equal")
    number("prefix", "prompt tokens that requests share where some were held before")
    number("new", "new tokens of a request", least=2)
    number("fit", "rows of full that the memory holds")
    number("segment", "steps between two looks of the host")
    number("threads", "CPUs it is pinned to")
    number("seed", "of the prompts", least=0)
    cli.add(
        parser, "--policy", nargs="+", metavar="SPEC", default=list(usual.policies), help="full comes first"
    )
    _peers(parser)
    cli.add(parser, "--out", help="save rows there, such as results/bench")
    parser.add_argument("--quick", action="store_true", help="only that it runs")
    cli.add(parser, "--json", help="rows as JSON lines")


def _peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", type=Path, metavar="DIR", help="environment that `peers --make` made")


def _measuring(parser: argparse.ArgumentParser, peers: bool, defaults: dict[str, Any]) -> None:
    """Options of ``Settings``; what is not said has the default there, or the command's own."""

    def add(name: str, help: str, **how: Any) -> None:
        usual = defaults.get(name, getattr(Settings, _FIELDS.get(name, name)))
        shown = " ".join(map(str, usual)) if isinstance(usual, (list, tuple)) else usual
        parser.add_argument(f"--{name}", default=usual, help=f"{help} (default: {shown})", **how)

    def number(name: str, help: str, least: int = 1, **how: Any) -> None:
        add(name, help, metavar="N", type=cli.whole(f"--{name}", least), **how)

    number("context", "prompt and new tokens of a row together", nargs="+")
    if peers:
        number("batch", "rows", nargs="+")
        cli.add(parser, "--mesh", help="virtual devices for our side, as data=2,tensor=4 (default: one)")
        _peers(parser)
    add("dtype", "of weights and cache", nargs="+", choices=DTYPES)
    add("policy", "ours, in the one-string form", nargs="+", metavar="SPEC")
    add("size", "of the random model", choices=sorted(SIZES))
    number("seed", "of weights and prompts", least=0)
    number("threads", "CPUs each side is pinned to")
    number("tokens", "of a row in one timed piece")
    number("rounds", "timed pieces (prefill: calls) of each side, in turns")
    cli.add(
        parser, "--out", help="save rows there, such as results/bench; an interrupted run goes on from there"
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: only that it runs")
    cli.add(parser, "--json", help="rows as JSON lines")
