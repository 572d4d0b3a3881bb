"""The frontier: every method and composition at matched bytes, in stages, from one YAML file.

The first stage looks at all policies on few samples; later ones look again, on fresh and many samples and
at more lengths, at those within ``near`` points of the best that no more bytes buy, if they answer at all.
Budgets are shares of a 16-bit cache that keeps everything: a policy whose pages hold codes has more slots for
the same bytes.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kvjax.algebra import Policy, PolicyError
from kvjax.catalogue import policy as parse_policy
from kvjax.eval import tasks
from kvjax.eval.errors import EvalError
from kvjax.eval.measure import grid, runner
from kvjax.eval.measure.grid import Grid
from kvjax.eval.measure.store import Store
from kvjax.eval.report import front
from kvjax.eval.report.table import Results
from kvjax.eval.tasks.data import Data
from kvjax.loading import LanguageModel
from kvjax.weights import Sources, WeightsError, find, sources

EXAMPLE = Path("configs/eval/frontier.yaml")
NUMBER = re.compile(r"\{(n(?:[*/]\d+)?)\}")
"""A budget's place in a template: ``{n}`` slots a stream, ``{n*2}``, ``{n/2}``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """Tasks at lengths, with so many samples.

    Attributes:
      tasks, lengths, samples, seed: of the cells.
      near: points behind the front up to which a policy of the stage before takes part; None: all of that
        stage's.
      least: percent that it must score there: where nothing answers, the front is no choice.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    seed: int
    near: float | None = None
    least: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
      shares: budgets, of the 16-bit bytes of a cache that keeps everything.
      protocols: agnostic, aware, or both.
      policies: templates, with the weights they are given; those without ``{n}`` have no budget to set.
      stages: in order.
    """

    shares: tuple[float, ...]
    protocols: tuple[str, ...]
    policies: Mapping[str, Sources]
    stages: tuple[Stage, ...]


def read(file: Path) -> Plan:
    """The plan of a YAML file.

    Raises:
      EvalError: a file that is none.
    """
    import yaml

    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        stages = tuple(
            Stage(**one | {"tasks": tuple(one["tasks"]), "lengths": tuple(one["lengths"])})
            for one in tree["stages"]
        )
        given = [one if isinstance(one, dict) else {"policy": one} for one in tree["policies"]]
        made = Plan(
            shares=tuple(float(share) for share in tree["budgets"]),
            protocols=tuple(tree["protocols"]),
            policies={one["policy"]: one.get("weights") for one in given},
            stages=stages,
        )
    except (
        OSError,
        UnicodeDecodeError,
        yaml.YAMLError,
        TypeError,
        KeyError,
        ValueError,
        AttributeError,
    ) as error:
        said = " ".join(str(error).split())
        raise EvalError(f"--config {file} cannot be used ({said}). Write it like {EXAMPLE}.") from None
    if not all(0 < share <= 1 for share in made.shares) or not stages:
        raise EvalError(f"--config {file}: budgets are shares in (0, 1], and stages at least one.")
    return made


def slots(template: str, share: float, length: int, head_dim: int) -> int:
    """Slots of a stream whose bytes are ``share`` of ``length`` tokens at 16 bits."""
    storage = parse_policy(filled(template, length)).storage
    exact, cost = storage.recent if not storage.exact else 0, front.slot_cost(storage, head_dim)
    wanted = share * length
    return max(1, round(wanted if wanted <= exact or cost == 1 else exact + (wanted - exact) / cost))


def filled(template: str, number: int) -> str:
    """The template with its budget written in."""

    def one(found: re.Match[str]) -> str:
        times, over = re.search(r"\*(\d+)", found[1]), re.search(r"/(\d+)", found[1])
        return str(max(1, number * int(times[1]) if times else number // int(over[1]) if over else number))

    return NUMBER.sub(one, template)


def policies(
    plan: Plan, length: int, model: LanguageModel
) -> tuple[dict[str, tuple[str, Policy]], list[str]]:
    """At one length: (template, policy) by "template @ share"; and what is left out, with the reason."""
    found: dict[str, tuple[str, Policy]] = {}
    missing: dict[str, str] = {}
    for template, given in plan.policies.items():
        shares = plan.shares if NUMBER.search(template) else (None,)
        for share in shares:
            try:
                number = 0 if share is None else slots(template, share, length, model.network.head_dim)
                policy = parse_policy(filled(template, number))
                if policy.learned:
                    find(policy, model, sources(policy, given))
            except (PolicyError, WeightsError) as error:
                missing.setdefault(template, f"{template} is left out at {length} tokens: {error}")
                continue
            found[template if share is None else f"{template} @ {share:g}"] = template, policy
    return found, list(missing.values())


def run(
    plan: Plan,
    model: LanguageModel,
    data: Data,
    store: Store,
    *,
    samples: int | None = None,
    last: int | None = None,
    say: Callable[[str], None] = print,
    shown: bool | None = None,
) -> Results:
    """Measures every stage; finished cells are not measured again.

    Args:
      plan, model, data, store: what, on what, from what, into what.
      samples: fewer or more a cell than the stages say.
      last: stop after so many stages.
      say: told each cell and the time of each stage.
      shown: progress bar.
    """
    chosen: set[str] | None = None
    began = time.perf_counter()
    for number, stage in enumerate(plan.stages[:last], start=1):
        start = time.perf_counter()
        count = samples or stage.samples
        grids, notes, named = _grids(plan, stage, model, data, count, chosen)
        for note in dict.fromkeys(notes):
            say(f"note: {note}")
        if not grids:
            raise EvalError(f"stage {number} has no policy left to measure. Raise near, or name others.")
        whole = grid.joined(grids)
        runner.run(whole, model, data, store, say=say, shown=shown)
        took, total = (time.perf_counter() - x for x in (start, began))
        say(f"stage {number}: {len(whole.cells)} cells, {took / 60:.1f} min; {total / 60:.1f} min in all")
        next_ = plan.stages[number] if number < len(plan.stages) else None
        if next_ is not None and next_.near is not None:
            rows = [r for r in store.done().values() if (r.cell.seed, r.cell.samples) == (stage.seed, count)]
            found = Results(tuple(rows))
            chosen = near_the_front(found, named, model.network.head_dim, next_.near, next_.least)
            say(f"within {next_.near:g} points of the front: {', '.join(sorted(chosen))}")
    return Results(tuple(store.done().values()))


def _grids(
    plan: Plan, stage: Stage, model: LanguageModel, data: Data, count: int, chosen: set[str] | None
) -> tuple[list[Grid], list[str], dict[tuple[int, str], str]]:
    """The cells of a stage; notes; and the name of each policy by length and one-string form."""
    wanted, absent = tasks.named(list(stage.tasks), data)
    grids, notes = [], [f"{task.name} needs {task.needs[0]}; left out." for task in absent]
    named: dict[tuple[int, str], str] = {}
    for length in stage.lengths:
        found, missing = policies(plan, length, model)
        notes += missing
        groups: dict[str, list[Policy]] = {}
        for name, (template, policy) in found.items():
            if chosen is None or name in chosen:
                groups.setdefault(template, []).append(policy)
                named[length, repr(policy)] = name
        for template, these in groups.items():
            one = grid.build(
                [task for task in wanted if task.fits <= length],
                these,
                lengths=[length],
                seeds=[stage.seed],
                samples=count,
                asked=plan.protocols,
            )
            given = plan.policies[template] if any(policy.learned for policy in these) else None
            grids.append(grid.with_weights(one, model, given))
    return grids, notes, named


def near_the_front(
    results: Results, named: Mapping[tuple[int, str], str], head_dim: int, near: float, least: float = 0.0
) -> set[str]:
    """Names of the policies that are, at some length and protocol, within ``near`` points of the front.

    Those that score less than ``least`` are not among them, however few bytes they take.
    """
    found = set()
    for (length, _), there in front.points(results, head_dim).items():
        close = front.near(there, near, least)
        found |= {named[length, point.policy] for point in close if (length, point.policy) in named}
    return found
