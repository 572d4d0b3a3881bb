"""The command line of ``python -m kvjax.eval``: what can be said, and what is refused before any work."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax import cli, weights
from kvjax.eval.errors import EvalError
from kvjax.eval.measure.protocol import PROTOCOLS
from kvjax.loading import EMBEDDED
from kvjax.weights import Sources

SMOKE = Path("configs/eval/smoke.yaml")

STUDIES = ("premise", "rate", "sweep", "search")
"""Of CONF-KV; see ``studies.conf_kv.commands``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """The command line, checked word by word.

    Attributes:
      what: the command.
      jobs: for ``run``: (tasks, lengths) pairs with their own policies and counts, one a grid of cells.
      values: the other options by name.
    """

    what: str
    jobs: tuple[Job, ...] = ()
    values: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A rectangle of cells: every task at every length under every policy."""

    tasks: list[str]
    lengths: list[int]
    policies: list[str]
    samples: int = 50
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0])
    protocols: tuple[str, ...] = ("agnostic",)
    gates: str | None = None
    weights: Sources = None

    def __post_init__(self) -> None:
        """Refuses what a config says wrongly; the command line's own types have done so already.

        Raises:
          EvalError: a value of another kind, or out of range.
        """
        lists: tuple[tuple[str, type, int], ...] = (
            ("tasks", str, 0), ("lengths", int, 64), ("policies", str, 0), ("seeds", int, 0),
        )  # fmt: skip
        for name, kind, least in lists:
            values = getattr(self, name)
            if not isinstance(values, list) or not all(_is(value, kind, least) for value in values):
                what = "names" if kind is str else f"whole numbers, {least} or more"
                raise EvalError(f"{name}: {values!r} is no list of {what}. Write it like {SMOKE}.")
        if not _is(self.samples, int, 1):
            raise EvalError(f"samples: {self.samples!r} is out of range. Give a whole number, 1 or more.")
        if not self.protocols or not set(self.protocols) <= set(PROTOCOLS):
            raise EvalError(f"protocols: {list(self.protocols)!r}. Give one or both of {list(PROTOCOLS)}.")
        if self.gates is not None and self.weights is not None:
            raise EvalError(f"gates: {self.gates} and weights: {self.weights} are both said. Keep weights.")

    @property
    def given(self) -> Sources:
        """What is said of learned weights; ``gates`` is the short form of a config, too."""
        return self.weights if self.gates is None else {weights.GATES: self.gates}


def _is(value: Any, kind: type, least: int) -> bool:
    fits = type(value) is kind  # True is no whole number
    return fits and (kind is str or bool(value >= least))


def parse(words: Sequence[str]) -> Asked:
    """The command and its options.

    Raises:
      EvalError: an unknown word, a number out of range, a config that cannot be read.
    """
    said = vars(_parser().parse_args(words))
    what = said.pop("what")
    if what != "run":
        return Asked(what=what, values=said)
    jobs = _configured(said["config"]) if said["config"] else ()
    if said["task"]:
        jobs = (*jobs, _job(said))
    if not jobs:
        raise EvalError("run has nothing to do. Give --task and --policy, or --config.")
    return Asked(what=what, jobs=jobs, values=said)


def _job(said: dict[str, Any]) -> Job:
    return Job(
        tasks=[word for words in said["task"] for word in words],
        lengths=said["lengths"],
        policies=said["policy"],
        samples=said["samples"],
        seeds=said["seeds"],
        protocols=PROTOCOLS if said["protocol"] == "both" else (said["protocol"],),
        weights=said["weights"],
    )


def _configured(file: Path) -> tuple[Job, ...]:
    """The jobs of a YAML file: what stands at the top holds for every job that does not say otherwise."""
    import yaml

    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        common = {name: value for name, value in tree.items() if name != "jobs"}
        jobs = [common | job for job in tree["jobs"]]
        return tuple(Job(**job | {"protocols": tuple(job.get("protocols", ("agnostic",)))}) for job in jobs)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise EvalError(
            f"--config {file} cannot be used ({' '.join(str(error).split())}). Write it like {SMOKE}."
        ) from None


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m kvjax.eval", description="Quality against measured bytes, for any policy and model."
    )
    what = parser.add_subparsers(dest="what", required=True)
    _run(what.add_parser("run", help="measure cells; finished ones are not measured again"))
    _match(what.add_parser("match", help="find the budget at which a policy holds as many bytes as another"))
    _frontier(what.add_parser("frontier", help="every method at matched bytes, in stages; the front"))
    what.add_parser("tasks", help="every task, and from which length on it fits")
    report = what.add_parser("report", help="tables, figures and one HTML page of results")
    report.add_argument("folder", type=Path, help="of results")
    report.add_argument("--to", type=Path, metavar="DIR", help="where to write (default: there)")
    return parser


def _run(run: argparse.ArgumentParser) -> None:
    run.add_argument("--config", type=Path, metavar="FILE", help="a YAML grid of jobs")
    run.add_argument(
        "--task", action="append", type=cli.words, help="names or groups, comma-separated", metavar="NAMES"
    )
    cli.add(run, "--policy", action="append", default=[], help="one-string form; several times")
    add_model(run)
    run.add_argument("--lengths", type=cli.numbers("--lengths", 64), default=[512], help="default: 512")
    run.add_argument("--samples", type=cli.whole("--samples", 1), default=50, help="a cell (default: 50)")
    run.add_argument("--seeds", type=cli.numbers("--seeds", 0), default=[0], help="of samples (default: 0)")
    run.add_argument(
        "--protocol",
        choices=(*PROTOCOLS, "both"),
        default="agnostic",
        help="does the policy see the question while it compresses? (default: agnostic, no; the words that "
        "begin the answer follow in both)",
    )
    cli.add(run, "--out", required=True, help="folder of results, resumed if there")
    cli.add(run, "--progress")


def _frontier(front: argparse.ArgumentParser) -> None:
    front.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=Path("configs/eval/frontier.yaml"),
        help="budgets, policies and stages (default: configs/eval/frontier.yaml)",
    )
    add_model(front)
    front.add_argument(
        "--samples", type=cli.whole("--samples", 1), help="a cell (default: as the stages say)"
    )
    front.add_argument("--stages", type=cli.whole("--stages", 1), help="how many (default: all)")
    cli.add(front, "--out", required=True, help="folder of results, resumed if there")
    cli.add(front, "--progress")


def _match(match: argparse.ArgumentParser) -> None:
    match.add_argument("--task", type=cli.words, required=True, help="one task", metavar="NAME")
    cli.add(match, "--policy", required=True, help='with {} for a budget: "snapkv + uniform({})"')
    match.add_argument("--like", required=True, metavar="SPEC", help="policy whose live bytes are the target")
    add_model(match)
    match.add_argument("--lengths", type=cli.numbers("--lengths", 64), default=[512], help="one length")
    match.add_argument("--samples", type=cli.whole("--samples", 1), default=16, help="measured (default: 16)")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options of every command that loads a model."""
    cli.add(parser, "--model", default=EMBEDDED)
    weights.add_options(parser)
    cli.add(parser, "--dtype", "--mesh")
