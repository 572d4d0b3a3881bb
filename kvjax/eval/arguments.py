"""The command line of ``python -m kvjax.eval``: its options, and what is refused before any work."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax import cli, weights
from kvjax.cli import option, shared
from kvjax.eval.errors import EvalError
from kvjax.eval.measure.protocol import EVERY, PROTOCOLS
from kvjax.loading import EMBEDDED
from kvjax.weights import Sources

SMOKE = Path("configs/eval/smoke.yaml")

_PROTOCOL = (
    "does the policy see the question while it compresses? (default: agnostic, no; the words that begin the "
    "answer follow in both; tasks with long answers have a protocol of their own, answer)"
)


_RAW = (
    "ask a model that has a chat template in bare words (default: context and question are a user's turn, "
    "the beginning of the answer is the assistant's; rows say which)"
)
_LENGTHS = "tokens; BOS, what the chat template writes, question and answer are counted"


_SUITE = (
    "its rows from the hub, its prompts and scores: kvpress-ruler-4k, -8k, -16k, longbench, longbench-TASK, "
    "longbench-v2, aime25, math500"
)
_PRICE = cli.Rule(float, lambda x: 0 <= x < 1e6, "a number, 0 or more")
_RATIO = cli.Rule(float, lambda x: 0 < x < 1, "a number above 0, below 1")


def _ratios(text: str) -> list[float]:
    return [_RATIO(word) for word in cli.words(text)] or [_RATIO("")]


def add_model(parser: argparse._ActionsContainer) -> None:
    """The options of every command that loads a model."""
    cli.add(parser, "--model", default=EMBEDDED)
    weights.add_options(parser)
    cli.add(parser, "--dtype", "--weight-dtype", "--mesh")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The options of ``add_model``."""

    model: str = shared("--model", EMBEDDED)
    weights: Sources = option(add=weights.add_options)
    dtype: str | None = shared("--dtype")
    weight_dtype: str | None = shared("--weight-dtype")
    mesh: str | None = shared("--mesh")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOptions(Model):
    """Of commands that put tasks to the model."""

    raw: bool = option(False, _RAW, action="store_true")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(TaskOptions):
    """Measure cells; finished ones are not measured again."""

    config: Path | None = option(None, "a YAML grid of jobs", "FILE")
    stage: list[str] | None = option(
        None, "of the config's jobs those of these stages (default: all)", "NAMES", type=cli.words
    )
    task: tuple[list[str], ...] = option(
        (), "names or groups, comma-separated; several times", "NAMES", type=cli.words, action="append"
    )
    policy: tuple[str, ...] = shared("--policy", (), "one-string form; several times", action="append")
    lengths: tuple[int, ...] = option((512,), _LENGTHS, "N,N", type=cli.numbers(64))
    samples: int | None = option(None, "of a cell (default: 50); of each task of a suite (default: all)")
    seeds: tuple[int, ...] = option((0,), "of samples", "N,N", type=cli.numbers(0))
    protocol: str = option("agnostic", _PROTOCOL, choices=(*EVERY, "both"))
    out: Path = shared("--out", help="folder of results, resumed if there", required=True)
    progress: bool | None = shared("--progress")
    suite: str | None = option(None, _SUITE, "NAME", group="a public benchmark")
    ratios: tuple[float, ...] = option(
        (),
        "shares of a prompt removed: {} in a policy is what stays (default: kvpress's four)",
        "X,X",
        type=_ratios,
    )
    rows: Path | None = option(None, "its data set, from the hub by 'hf download', or a file", "DIR|FILE")
    revision: str | None = option(None, "of the data set (default: the newest)", "COMMIT")
    price: float | None = option(None, "of an hour of the device, to estimate the cost", type=_PRICE)
    by: str | None = option(None, "who measures, for the leaderboard", "NAME")
    dry_run: bool = option(False, "say rows, hours and cost, and stop")

    def jobs(self) -> tuple[Job, ...]:
        """The jobs of ``--config``, and that of ``--task``.

        Raises:
          EvalError: there are none, or a config that cannot be read.
        """
        jobs = _configured(self.config) if self.config else ()
        if self.stage is not None:
            known = list(dict.fromkeys(job.stage for job in jobs if job.stage is not None))
            unknown = [stage for stage in self.stage if stage not in known]
            if unknown:
                raise EvalError(f"--stage {unknown[0]}: the config has {', '.join(known) or 'no stages'}.")
            jobs = tuple(job for job in jobs if job.stage in self.stage)
        if self.task:
            protocols = PROTOCOLS if self.protocol == "both" else (self.protocol,)
            own = Job(
                tasks=[name for names in self.task for name in names],
                lengths=list(self.lengths),
                policies=list(self.policy),
                samples=self.samples or 50,
                seeds=list(self.seeds),
                protocols=protocols,
                weights=self.weights,
            )
            jobs = (*jobs, own)
        if self.suite is not None:
            if jobs:
                raise EvalError(f"--suite {self.suite} is a run of its own. Leave --task and --config out.")
            return ()
        for name in ("ratios", "rows", "revision", "price", "by", "dry_run"):
            if getattr(self, name):
                flag = name.replace("_", "-")
                raise EvalError(
                    f"--{flag} is for a public benchmark. Leave it out, or name one with --suite."
                )
        if not jobs:
            raise EvalError(
                "run has nothing to do. Give --task and --policy, or --config, or --suite and --policy."
            )
        return jobs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match(TaskOptions):
    """Find the budget at which a policy holds as many bytes as another."""

    task: tuple[str, ...] = option(None, "one task", "NAME", type=cli.words, required=True)
    policy: str = shared("--policy", help='with {} for a budget: "snapkv + uniform({})"', required=True)
    like: str = option(None, "policy whose live bytes are the target", "SPEC", required=True)
    lengths: tuple[int, ...] = option((512,), "one length", type=cli.numbers(64))
    samples: int = option(16, "measured")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frontier(TaskOptions):
    """Measure every method at matched bytes, in stages, and draw the front."""

    config: Path = option(Path("configs/eval/frontier.yaml"), "budgets, policies and stages", "FILE")
    samples: int | None = option(None, "of a cell (default: as the stages say)")
    stages: int | None = option(
        None, "how many; 0: only the pages, of what is measured (default: all)", type=cli.whole(0)
    )
    out: Path = shared("--out", help="folder of results, resumed if there", required=True)
    progress: bool | None = shared("--progress")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tasks:
    """List every task, and from which length on it fits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Make tables, figures and one HTML page of results."""

    folder: Path = option(None, "of results", flag="folder")
    to: Path | None = option(None, "where to write (default: there)", "DIR")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaderboard:
    """Make the page of who measured what on which device."""

    folders: tuple[Path, ...] = option((), "of results", flag="folders", nargs="*", type=Path)
    to: Path = option(
        Path("results/leaderboard"), "where to write; folders of results in it are on the page, too", "DIR"
    )


COMMANDS = {kind.__name__.lower(): kind for kind in (Run, Match, Frontier, Tasks, Report, Leaderboard)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """The command line, checked word by word.

    Attributes:
      what: the command.
      jobs: for ``run``: (tasks, lengths) pairs with their own policies and counts, one a grid of cells.
      values: the options by name.
    """

    what: str
    jobs: tuple[Job, ...]
    values: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A rectangle of cells: every task at every length under every policy.

    Attributes:
      tasks, lengths, policies, samples, seeds, protocols: of the cells.
      gates, weights: learned weights of the policies.
      stage: its name for ``--stage``.
      solved: of the tasks only so many: the first that the full cache solves in the folder's results.
    """

    tasks: list[str]
    lengths: list[int]
    policies: list[str]
    samples: int = 50
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0])
    protocols: tuple[str, ...] = ("agnostic",)
    gates: str | None = None
    weights: Sources = None
    stage: str | None = None
    solved: int | None = None

    def __post_init__(self) -> None:
        """Refuses wrong values of a config; the command line's own types have done so already.

        Raises:
          EvalError: a value of another kind, or out of range.
        """
        for name, kind, least in (
            ("tasks", str, 0),
            ("lengths", int, 64),
            ("policies", str, 0),
            ("seeds", int, 0),
        ):
            values = getattr(self, name)
            if not isinstance(values, list) or not all(_is(value, kind, least) for value in values):
                what = "names" if kind is str else f"whole numbers, {least} or more"
                raise EvalError(f"{name}: {values!r} is not a list of {what}. Write it like {SMOKE}.")
        if not _is(self.samples, int, 1):
            raise EvalError(f"samples: {self.samples!r} is out of range. Give a whole number, 1 or more.")
        if self.solved is not None and not _is(self.solved, int, 1):
            raise EvalError(f"solved: {self.solved!r} is out of range. Give a whole number, 1 or more.")
        if not self.protocols or not set(self.protocols) <= set(EVERY):
            raise EvalError(f"protocols: {list(self.protocols)!r}. Give one or more of {list(EVERY)}.")
        if self.gates is not None and self.weights is not None:
            raise EvalError(f"gates: {self.gates} and weights: {self.weights} are both given. Keep weights.")

    @property
    def given(self) -> Sources:
        """The sources of learned weights; ``gates`` is the short form of a config, too."""
        return self.weights if self.gates is None else {weights.GATES: self.gates}


def _is(value: Any, kind: type, least: int) -> bool:
    fits = type(value) is kind  # True is no whole number
    return fits and (kind is str or bool(value >= least))


def parse(words: Sequence[str]) -> Command:
    """The command and its options.

    Raises:
      EvalError: an unknown word, a number out of range, a config that cannot be read.
    """
    what, options = cli.parse_command(
        COMMANDS,
        words,
        prog="python -m kvjax.eval",
        description="Quality against measured bytes, for any policy and model.",
    )
    return Command(what=what, jobs=options.jobs() if what == "run" else (), values=vars(options))


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
