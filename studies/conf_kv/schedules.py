"""What confidence buys: CONF-KV's schedule against others of its size, ranking by ranking, number by number.

Every entry is a walk over the same windows of text, all through one program (``replay``). Two budgets are
compared at equal memory: the *gain* of a setting is the NLL that a constant budget of the same mean live
slots would have, interpolated between measured ones, less its own, in nats a token. A constant budget is what
confidence has to beat; NLL is convex in slots, so that the interpolation, if anything, flatters a setting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvjax.eval.report import stats
from studies.conf_kv import signal
from studies.conf_kv.replay import Rule, Stage

Windows = list[dict[str, np.ndarray]]
Say = Callable[[str], None]

SEEDS = 2
"""Rankings by chance, and shuffled schedules, whose windows are taken together."""

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)
WEIGHTS = (
    (0.4, 0.3, 0.3),
    (1.0, 0.0, 0.0),
    (0.0, 1.0, 0.0),
    (0.0, 0.0, 1.0),
    (0.2, 0.6, 0.2),
    (0.5, 0.5, 0.0),
)
"""(wh, wm, wp): where the search starts, then each part alone, then mixes that lean on the margin."""
ALPHAS = (0.0, 0.25, 0.4, 0.5, 0.6, 0.75, 1.0)
CURVE = (0.0, 0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.75, 0.9, 1.0)
"""Alphas of the curve, close together where the first token falls out."""
GAMMAS = (0.5, 0.9, 0.98, 0.995, 0.998, 0.999)


def nll(windows: Windows) -> np.ndarray:
    """Mean over each window's steps, nats."""
    return np.asarray([w["nll"].mean() for w in windows])


def tokens(windows: Windows) -> list[float]:
    """Steps of each window."""
    return [float(len(w["nll"])) for w in windows]


def live(windows: Windows) -> float:
    """Slots a stream, mean over all steps."""
    return float(np.concatenate([w["live"] for w in windows]).mean())


def entry(name: str, windows: Windows, like: Windows | None = None, **more: Any) -> dict[str, Any]:
    """What is remembered of a walk.

    Args:
      name: of the setting.
      windows: the walk.
      like: another walk over the same windows: ``difference`` is this one's nats less that one's, paired.
      more: further facts.
    """
    mean = float(np.average(nll(windows), weights=tokens(windows)))
    facts = {"name": name, "nll": mean, "perplexity": math.exp(mean), "live": live(windows)}
    facts["peak_live"] = float(np.mean([w["live"].max() for w in windows]))
    if like is not None:
        facts["difference"] = stats.difference(nll(windows).tolist(), nll(like).tolist(), tokens(windows))
    return facts | more


def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Schedules of unequal length side by side; what is beyond a row's end is never used."""
    filled = np.ones((len(rows), max(map(len, rows))), np.float32)
    for i, row in enumerate(rows):
        filled[i, : len(row)] = row
    return filled


def rate(stage: Stage, rule: Rule, say: Say) -> dict[str, Any]:
    """CONF-KV's targets played again under other rankings, its ranking under other schedules.

    Under another ranking the model is less sure or more; so that every step drops as many, targets are those
    of the first walk. Shuffled: the same targets in another order, so that confidence says nothing about the
    step they fall on. Inverse: dealt out the other way round, few slots where the model is least sure.
    Constant: their mean, at every step.
    """
    own = stage.play(rule)
    sure = float(np.mean(np.concatenate([w["sure"] for w in own]) >= rule.threshold))
    entries = [entry("conf_kv", own, sure_share=sure)]
    say(_line(entries[-1]))
    targets = [w["target"] for w in own]

    def again(name: str, how: Rule, schedule: Sequence[np.ndarray], same: bool) -> Windows:
        windows = stage.play(how, padded(schedule))
        equal = all(np.array_equal(a["live"], b["live"]) for a, b in zip(windows, own))
        if same and not equal:
            raise ValueError(f"{name}: the walk dropped other numbers of tokens than the one it repeats.")
        return windows

    for name, how in (
        ("recency", dataclasses.replace(rule, alpha=0.0)),
        ("attention", dataclasses.replace(rule, alpha=1.0)),
    ):
        entries.append(entry(name, again(name, how, targets, True), own))
        say(_line(entries[-1]))
    chance = [
        again("random", dataclasses.replace(rule, random=seed), targets, True) for seed in range(1, SEEDS + 1)
    ]
    entries.append(entry("random", _mean(chance), own, seeds=SEEDS))
    say(_line(entries[-1]))
    shuffled = []
    for seed in range(SEEDS):
        draw = np.random.default_rng(seed)
        shuffled.append(again("shuffled", rule, [draw.permutation(t) for t in targets], False))
    entries.append(entry("shuffled schedule", _mean(shuffled), own, seeds=SEEDS))
    say(_line(entries[-1]))
    order = [signal.inverse(w["target"], w["sure"]) for w in own]
    entries.append(entry("inverse schedule", again("inverse", rule, order, False), own))
    say(_line(entries[-1]))
    mean = round(live(own))
    constant = dataclasses.replace(rule, tight=mean, loose=mean)
    entries.append(entry(f"constant {mean}", stage.play(constant), own))
    say(_line(entries[-1]))
    trace = {name: own[0][name].tolist() for name in ("live", "sure", "target", "nll")}
    counts, edges = np.histogram(np.concatenate([w["sure"] for w in own]), bins=20, range=(0, 1))
    histogram = {"edges": edges.tolist(), "counts": counts.tolist()}
    return {
        "rule": dataclasses.asdict(rule),
        "entries": entries,
        "signal": _signal(stage, rule, own),
        "trace": trace,
        "histogram": histogram,
    }


def _signal(stage: Stage, rule: Rule, own: Windows) -> dict[str, Any]:
    """What the confidence of a walk foretells, ``loose`` against ``tight``; windows cut to the shortest."""
    few, many = (stage.play(dataclasses.replace(rule, tight=n, loose=n)) for n in (rule.tight, rule.loose))
    steps = min(len(w["nll"]) for w in own)
    columns = ((own, "sure"), (few, "nll"), (many, "nll"))
    return signal.foretold(*(np.stack([w[name][:steps] for w in walk]) for walk, name in columns))


def _mean(walks: Sequence[Windows]) -> Windows:
    """Several walks over the same windows as one: step by step, the mean."""
    return [{name: np.mean([w[i][name] for w in walks], axis=0) for name in walks[0][i]}
            for i in range(len(walks[0]))]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Constants:
    """Constant budgets: how likely each window is at each, and how full the cache.

    Attributes:
      slots: mean live slots, rising.
      nats: [budgets, windows].
      weight: tokens of each window.
    """

    slots: np.ndarray
    nats: np.ndarray
    weight: list[float]

    @classmethod
    def of(cls, stage: Stage, rule: Rule, budgets: Iterable[int], say: Say) -> Constants:
        """Walks them."""
        slots, nats, weight = [], [], []
        for budget in sorted(budgets):
            windows = stage.play(dataclasses.replace(rule, tight=budget, loose=budget))
            slots.append(live(windows))
            nats.append(nll(windows))
            weight = tokens(windows)
            say(_line(entry(f"constant {budget}", windows)))
        return cls(np.asarray(slots), np.asarray(nats), weight)

    def gain(self, windows: Windows) -> tuple[float, float, float] | None:
        """Nats a token that a constant budget of as many slots loses more; None beyond the measured ones."""
        at = live(windows)
        if not self.slots[0] - 0.5 <= at <= self.slots[-1] + 0.5:
            return None
        would = [float(np.interp(at, self.slots, window)) for window in self.nats.T]
        return stats.difference(would, nll(windows).tolist(), self.weight)

    def as_json(self) -> list[dict[str, float]]:
        """One entry a budget."""
        means = np.average(self.nats, axis=1, weights=self.weight)
        return [{"live": float(s), "nll": float(m)} for s, m in zip(self.slots, means)]


def grid(stage: Stage, rules: dict[str, Rule], constants: Constants, say: Say) -> list[dict[str, Any]]:
    """One entry a rule, with its gain and the share of sure steps."""
    entries = []
    for name, rule in rules.items():
        windows = stage.play(rule)
        sure = float(np.mean(np.concatenate([w["sure"] for w in windows]) >= rule.threshold))
        gain = constants.gain(windows)
        entries.append(entry(name, windows, rule=dataclasses.asdict(rule), sure_share=sure, gain=gain))
        say(_line(entries[-1]))
    return entries


def sweep(base: Rule) -> dict[str, Rule]:
    """Threshold and tight budget, one at a time."""
    loose = base.loose
    tights = sorted({loose // 4, 3 * loose // 8, loose // 2, 3 * loose // 4})
    rules = {f"threshold {t}": dataclasses.replace(base, threshold=t) for t in THRESHOLDS}
    return rules | {f"tight {t}": dataclasses.replace(base, tight=t) for t in tights}


def cliff(share: float) -> float:
    """The alpha below which the first token goes when a prompt is cut to that share of its tokens.

    It has the highest mass and no recency: its score is alpha. The last token that would stay by recency
    alone scores (1 - alpha) (1 - share).
    """
    return (1 - share) / (2 - share)


def best(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The entry of the largest gain.

    Raises:
      ValueError: no entry has one.
    """
    telling = [e for e in entries if e["gain"] is not None]
    if not telling:
        raise ValueError("no setting lies between the constant budgets. Measure more of them.")
    return max(telling, key=lambda e: e["gain"][0])


def _line(facts: dict[str, Any]) -> str:
    line = f"{facts['name']:<26} ppl {facts['perplexity']:8.2f}  nll {facts['nll']:.4f}"
    line += f"  live {facts['live']:6.1f}"
    for name in ("difference", "gain"):
        if facts.get(name):
            mean, low, high = facts[name]
            line += f"  {name} {mean:+.4f} ({low:+.4f} … {high:+.4f})"
    return line + (f"  sure {100 * facts['sure_share']:.0f} %" if "sure_share" in facts else "")
