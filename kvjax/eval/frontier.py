"""The frontier: every method and composition at matched bytes, in stages, from one YAML file.

The first stage measures all policies on few samples. Later stages measure again, on new and more samples and
at more lengths, the policies that came within ``near`` points of the best of no more bytes. Budgets are
shares of a 16-bit cache that keeps everything: pages of codes have more slots for the same bytes.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
"""The budget in a template: ``{n}`` slots a KV head, ``{n*2}``, ``{n/2}``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """Tasks at lengths.

    Attributes:
      tasks, lengths, samples, seed: of the cells.
      near: a policy of the stage before takes part if it was at most so many points behind the front; None:
        all of them do.
      least: and if it scored at least so many percent.
      policies: those of this stage alone; None: the config's.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    seed: int
    near: float | None = None
    least: float = 0.0
    policies: Mapping[str, Sources] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontierConfig:
    """What is measured.

    Attributes:
      shares: budgets, of the 16-bit bytes of a cache that keeps everything.
      protocols: of agnostic, aware and answer.
      policies: templates with the sources of their weights; one without ``{n}`` has no budget to set.
      stages: in order.
    """

    shares: tuple[float, ...]
    protocols: tuple[str, ...]
    policies: Mapping[str, Sources]
    stages: tuple[Stage, ...]


def read(file: Path) -> FrontierConfig:
    """The config in a YAML file.

    Raises:
      EvalError: the file is not such a config.
    """
    import yaml

    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        stages = tuple(_stage(stage) for stage in tree["stages"])
        config = FrontierConfig(
            shares=tuple(float(share) for share in tree["budgets"]),
            protocols=tuple(tree["protocols"]),
            policies=_templates(tree["policies"]),
            stages=stages,
        )
    except (OSError, yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise EvalError(f"--config {file} cannot be used ({reason}). Write it like {EXAMPLE}.") from None
    if not all(0 < share <= 1 for share in config.shares) or not stages:
        raise EvalError(f"--config {file}: budgets must be shares in (0, 1], and there must be a stage.")
    return config


def _stage(tree: dict[str, Any]) -> Stage:
    own = _templates(tree["policies"]) if "policies" in tree else None
    tuples = {name: tuple(tree[name]) for name in ("tasks", "lengths")}
    return Stage(**tree | tuples | {"policies": own})


def _templates(entries: Sequence[Any]) -> dict[str, Sources]:
    """Weights by template; an entry is a template, or one with ``weights``."""
    named = [entry if isinstance(entry, dict) else {"policy": entry} for entry in entries]
    return {entry["policy"]: entry.get("weights") for entry in named}


def slots(template: str, share: float, length: int, head_dim: int) -> int:
    """Slots of a KV head whose bytes are ``share`` of ``length`` tokens at 16 bits."""
    storage = parse_policy(filled(template, length)).storage
    exact, cost = storage.recent if not storage.exact else 0, front.slot_cost(storage, head_dim)
    wanted = share * length
    return max(1, round(wanted if wanted <= exact or cost == 1 else exact + (wanted - exact) / cost))


def filled(template: str, number: int) -> str:
    """The template with its budget written in."""

    def budget(match: re.Match[str]) -> str:
        times, over = re.search(r"\*(\d+)", match[1]), re.search(r"/(\d+)", match[1])
        return str(max(1, number * int(times[1]) if times else number // int(over[1]) if over else number))

    return NUMBER.sub(budget, template)


def policies(
    config: FrontierConfig, length: int, model: LanguageModel
) -> tuple[dict[str, tuple[str, Policy]], list[str]]:
    """At one length: (template, policy) by "template @ share"; and why other templates are left out."""
    usable: dict[str, tuple[str, Policy]] = {}
    missing: dict[str, str] = {}
    for template, weights in config.policies.items():
        for share in config.shares if NUMBER.search(template) else (None,):
            try:
                number = 0 if share is None else slots(template, share, length, model.network.head_dim)
                if number >= length:  # codes so small that these bytes hold every token
                    continue
                policy = parse_policy(filled(template, number))
                if policy.learned:
                    find(policy, model, sources(policy, weights))
            except (PolicyError, WeightsError) as error:
                missing.setdefault(template, f"{template} is left out at {length} tokens: {error}")
                continue
            usable[template if share is None else f"{template} @ {share:g}"] = template, policy
    return usable, list(missing.values())


def run(
    config: FrontierConfig,
    model: LanguageModel,
    data: Data,
    store: Store,
    *,
    samples: int | None = None,
    last: int | None = None,
    chat: bool = False,
    say: Callable[[str], None] = print,
    shown: bool | None = None,
) -> Results:
    """Measures every stage; finished cells are not measured again.

    Args:
      config: what to measure.
      model, data: the model, and where texts come from.
      store: the folder of results.
      samples: a cell; None: as the stages say.
      last: stop after so many stages; 0 measures nothing.
      chat: put questions through the chat template.
      say: called with a line for each cell and stage.
      shown: progress bar.
    """
    chosen: set[str] | None = None
    began = time.perf_counter()
    for number, stage in enumerate(config.stages[:last], start=1):
        start = time.perf_counter()
        count = samples or stage.samples
        of_stage = config
        if stage.policies is not None:
            of_stage, chosen = dataclasses.replace(config, policies=stage.policies), None
        grids, notes, named = _grids(of_stage, stage, model, data, count, chosen)
        for note in dict.fromkeys(notes):
            say(f"note: {note}")
        if not grids:
            raise EvalError(f"stage {number} has no policy left to measure. Raise near, or name others.")
        whole = grid.joined([grid.as_turns(cells) for cells in grids] if chat else grids)
        runner.run(whole, model, data, store, say=say, shown=shown)
        took, total = (time.perf_counter() - x for x in (start, began))
        say(f"stage {number}: {len(whole.cells)} cells, {took / 60:.1f} min; {total / 60:.1f} min in all")
        following = config.stages[number] if number < len(config.stages) else None
        if following is not None and following.near is not None:
            rows = [r for r in store.done().values() if (r.cell.seed, r.cell.samples) == (stage.seed, count)]
            chosen = near_the_front(
                Results(tuple(rows)), named, model.network.head_dim, following.near, following.least
            )
            say(f"within {following.near:g} points of the front: {', '.join(sorted(chosen))}")
    return Results(tuple(store.done().values()))


def _grids(
    config: FrontierConfig,
    stage: Stage,
    model: LanguageModel,
    data: Data,
    count: int,
    chosen: set[str] | None,
) -> tuple[list[Grid], list[str], dict[tuple[int, str], str]]:
    """The cells of a stage; notes; and the name of each policy by length and one-string form."""
    wanted, absent = tasks.named(list(stage.tasks), data)
    grids, notes = [], [f"{task.name} needs {task.needs[0]}; left out." for task in absent]
    named: dict[tuple[int, str], str] = {}
    for length in stage.lengths:
        usable, missing = policies(config, length, model)
        notes += missing
        groups: dict[str, list[Policy]] = {}
        for name, (template, policy) in usable.items():
            if chosen is None or name in chosen:
                groups.setdefault(template, []).append(policy)
                named[length, repr(policy)] = name
        for template, group in groups.items():
            cells = grid.build(
                [task for task in wanted if task.fits <= length],
                group,
                lengths=[length],
                seeds=[stage.seed],
                samples=count,
                protocol=config.protocols,
            )
            weights = config.policies[template] if any(policy.learned for policy in group) else None
            grids.append(grid.with_weights(cells, model, weights))
    return grids, notes, named


def near_the_front(
    results: Results, named: Mapping[tuple[int, str], str], head_dim: int, near: float, least: float = 0.0
) -> set[str]:
    """Names of the policies that, at some length and protocol, are near the front (see ``front.near``)."""
    return {
        named[length, point.policy]
        for (length, _), group in front.points(results, head_dim).items()
        for point in front.near(group, near, least)
        if (length, point.policy) in named
    }
