"""The studies of CONF-KV, one JSON file a study, task and length.

premise  does confidence fall where the recent past matters more?
rate     the same schedule under other rankings, the same ranking under other schedules
sweep    threshold and tight budget, beside constant budgets
alpha    the ranking's mix of attention and recency, and where the first token falls out of it
search   the numbers the paper does not give, on text that nothing is reported on (WikiText-2's valid split)

Budgets follow the length L: tight L/8, loose L/4, window L/32 but at least 16.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.budgets.confidence import Confidence
from kvjax.eval import tasks
from kvjax.eval.errors import EvalError
from kvjax.eval.measure import runner
from kvjax.eval.measure.row import short
from kvjax.eval.measure.store import about, versions
from kvjax.eval.tasks import perplexity
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.sample import Samples
from kvjax.eval.tasks.task import Task
from kvjax.loading import LanguageModel
from studies.conf_kv import pictures, premise, schedules
from studies.conf_kv.replay import Rule, Stage
from studies.conf_kv.schedules import Constants, Say

VALID = Task(
    name="ppl_wikitext_valid",
    group="ppl",
    fits=128,
    make=functools.partial(perplexity.make, ("wikitext2/valid.txt.gz",), True),
    metric="perplexity",
    asks=False,
    needs=("wikitext2/valid.txt.gz",),
)
"""What the search looks at."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """Budgets for windows of L tokens (evaluation on models of width 512 and less)."""

    length: int

    @property
    def tight(self) -> int:
        """L/8."""
        return self.length // 8

    @property
    def loose(self) -> int:
        """L/4."""
        return self.length // 4

    @property
    def recent(self) -> int:
        """L/32, at least 16."""
        return max(16, self.length // 32)

    def rule(self, threshold: float) -> Rule:
        """CONF-KV's defaults at this length."""
        ours = Confidence()
        return Rule(
            tight=self.tight, loose=self.loose, threshold=threshold, weights=(ours.wh, ours.wm, ours.wp)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyInput:
    """The input of a study.

    Attributes:
      model, samples: the model, and windows of text.
      scale: of their length.
      threshold: c*.
      say: called with a line for each finished walk.
    """

    model: LanguageModel
    samples: Samples
    scale: Scale
    threshold: float
    say: Say

    @functools.cached_property
    def stage(self) -> Stage:
        """The windows with the scale's own numbers."""
        return self.staged()

    def staged(self, **numbers: Any) -> Stage:
        """The same with other ``loose``, ``recent`` or ``gamma``; a program of its own."""
        own = {"length": self.scale.length, "loose": self.scale.loose, "recent": self.scale.recent}
        return Stage.of(self.model, self.samples, **own | numbers)

    @functools.cached_property
    def constants(self) -> Constants:
        """``budgets``, walked with our own numbers."""
        return Constants.of(self.stage, self.scale.rule(self.threshold), self.budgets, self.say)

    @property
    def budgets(self) -> tuple[int, ...]:
        """Constant ones, from half of tight to loose."""
        tight, loose = self.scale.tight, self.scale.loose
        return max(tight // 2, self.scale.recent + 2), tight, (tight + loose) // 2, loose


def _premise(work: StudyInput) -> dict[str, Any]:
    budget, cut = Confidence(), work.scale.tight
    measured = premise.measure(work.model, work.samples, budget, cut=cut)
    return premise.as_json(measured, budget, cut)


def _rate(work: StudyInput) -> dict[str, Any]:
    return schedules.rate(work.stage, work.scale.rule(work.threshold), work.say)


def _sweep(work: StudyInput) -> dict[str, Any]:
    constants, rules = work.constants, schedules.sweep(work.scale.rule(work.threshold))
    entries = schedules.grid(work.stage, rules, constants, work.say)
    return {"constant": constants.as_json(), "entries": entries}


def _search(work: StudyInput) -> dict[str, Any]:
    """Alpha with gamma; then, with the best of them, the weights, the window and the loose budget.

    It starts from fixed numbers, not from ours, so that it says the same whatever we make of it. Thresholds
    make half of the steps sure, whatever the weights.
    """
    measured = premise.measure(work.model, work.samples, Confidence(), cut=work.scale.tight)
    quantiles = {
        w: float(np.median(sum(x * measured[name] for x, name in zip(w, premise.PARTS))))
        for w in schedules.WEIGHTS
    }
    first = schedules.WEIGHTS[0]
    base = dataclasses.replace(work.scale.rule(quantiles[first]), weights=first)
    stages = {gamma: work.staged(gamma=gamma) for gamma in schedules.GAMMAS}
    constants = Constants.of(stages[0.9], dataclasses.replace(base, alpha=0.5), work.budgets, work.say)

    def tried(stage: Stage, rules: dict[str, Rule]) -> list[dict[str, Any]]:
        return schedules.grid(stage, rules, constants, work.say)

    mixes = []
    for gamma, stage in stages.items():
        rules = {
            f"alpha {a:g}, gamma {gamma:g}": dataclasses.replace(base, alpha=a) for a in schedules.ALPHAS
        }
        mixes += [e | {"gamma": gamma} for e in tried(stage, rules)]
    best = schedules.best(mixes)
    gamma, base = best["gamma"], Rule(**best["rule"])
    weights = {
        f"weights {'/'.join(f'{x:g}' for x in w)}": dataclasses.replace(
            base, weights=w, threshold=quantiles[w]
        )
        for w in schedules.WEIGHTS
    }
    wide = {"recent": 2 * work.scale.recent, "loose": 3 * base.loose // 2}
    others = tried(stages[gamma], weights)
    others += tried(work.staged(gamma=gamma, recent=wide["recent"]), {f"recent {wide['recent']}": base})
    looser = dataclasses.replace(base, loose=wide["loose"])
    others += tried(work.staged(gamma=gamma, loose=wide["loose"]), {f"loose {wide['loose']}": looser})
    return {
        "constant": constants.as_json(),
        "entries": mixes + [e | {"gamma": gamma} for e in others],
        "mix": best["name"],
        "winner": schedules.best(mixes + others)["name"],
    }


def _alpha(work: StudyInput) -> dict[str, Any]:
    """Without sinks the first token, of the highest mass and no recency, stays where alpha is large."""
    rule = work.scale.rule(work.threshold)
    rules = {f"alpha {a:g}": dataclasses.replace(rule, alpha=a) for a in schedules.CURVE}
    entries = schedules.grid(work.stage, rules, work.constants, work.say)
    share = work.scale.tight / work.scale.length
    return {"entries": entries, "default": rule.alpha, "cliff": schedules.cliff(share)}


DO: dict[str, Callable[[StudyInput], dict[str, Any]]] = {
    "premise": _premise,
    "rate": _rate,
    "sweep": _sweep,
    "alpha": _alpha,
    "search": _search,
}


def do(values: dict[str, Any], model: LanguageModel, data: Data) -> list[Path]:
    """Every study on every task and length; the files.

    Raises:
      EvalError: a task that is not a text.
    """
    folder = values["out"]
    folder.mkdir(parents=True, exist_ok=True)
    wanted, _ = tasks.named(values["task"], data)
    wrong = [task.name for task in wanted if task.metric != "perplexity"]
    if wrong:
        raise EvalError(f"--task {','.join(wrong)} asks questions; the studies read text. Give ppl tasks.")
    files = []
    for length in values["lengths"]:
        for study in values["study"]:
            for task in [VALID] if study == "search" else wanted:
                samples = runner.draw(task, model, data, length=length, seed=0, count=values["samples"])
                work = StudyInput(
                    model=model,
                    samples=samples,
                    scale=Scale(length=length),
                    threshold=values["threshold"],
                    say=functools.partial(print, f"{study} {task.name} {length}:", flush=True),
                )
                facts = {"study": study, "task": task.name, "length": length, "samples": len(samples)}
                tree = facts | about(model, data) | versions() | short(DO[study](work))
                file = folder / f"{study}_{task.name}_{length}.json"
                file.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
                print(file, flush=True)
                files.append(file)
    drawn = pictures.draw(folder)
    for picture in drawn:
        print(picture, flush=True)
    return files + drawn
