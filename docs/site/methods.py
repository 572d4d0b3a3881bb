"""A page for each part that a policy can name, from the catalogue and the results of the front."""

from __future__ import annotations

import dataclasses
import functools
import html
import importlib
import inspect
import json
import re
from collections.abc import Sequence

from docs.site.text import docstring, read
from kvjax import catalogue
from kvjax.algebra import PLACES, Part, PolicyError, Wrapper
from kvjax.eval.report import front
from kvjax.eval.report.table import markdown

LENGTH = 1024
"""Tokens of the prompts in the curves."""

TRIED = ("uniform(0.5)", "uniform(0.5, every_step)", "recent(64)")
"""Besides every other part, what a part is tried with for its limits."""


def pages(points: Sequence[front.Point]) -> dict[str, str]:
    """A page for every part, one for keeping everything, and the list of them.

    Args:
      points: measured policies, for the curves; see ``measured``.
    """
    texts = {name: page(kind, points) for name, kind in catalogue.parts().items()}
    full = next(method for method in catalogue.methods() if method.name == "full")
    texts["full"] = f"# full\n\n{full.summary}\n\n{_curve([p for p in points if p.policy == 'full'], points)}"
    rows = [[f"[`{name}`]({name}.md)", place, summary] for name, place, summary in _listed()]
    texts["README"] = "# Methods\n\nOne page for each word of a policy.\n\n" + markdown(
        ["word", "place", "method"], [["[`full`](full.md)", "–", full.summary], *rows]
    )
    return {f"methods/{name}.md": text + "\n" for name, text in texts.items()}


def _listed() -> list[tuple[str, str, str]]:
    places = list(PLACES)
    kinds = sorted(catalogue.parts().items(), key=lambda item: (places.index(item[1].place), item[0]))
    return [(name, _place(kind), _module(kind)[0]) for name, kind in kinds]


def _place(kind: type[Part]) -> str:
    return "wrapper of an eviction" if issubclass(kind, Wrapper) else kind.place


def _module(kind: type[Part]) -> tuple[str, str]:
    return catalogue.described(importlib.import_module(kind.__module__))


def page(kind: type[Part], points: Sequence[front.Point]) -> str:
    """What a reader asks about one part."""
    summary, paper = _module(kind)
    story = (inspect.getdoc(importlib.import_module(kind.__module__)) or "").partition("\n")[2]
    about = inspect.getdoc(kind) or ""
    head = f"Place: {_place(kind)}. " + (f"Paper: <{paper}>." if paper else "It has no paper.")
    own = [p for p in points if any(isinstance(part, kind) for part in catalogue.policy(p.policy).chain)]
    blocks = [
        f"# {kind.name}" + (f" ({kind.place})" if kind.place == "budget" and _shares_its_name(kind) else ""),
        f"**{summary}**",
        head,
        docstring(story),
        "## What it does",
        docstring(re.split(r"\n(?:Attributes|Raises|Class attributes):\n", about)[0]),
        _facts(kind),
        "## Options",
        _options(kind, about),
        "## Presets and examples",
        _presets(kind),
        "## Curve",
        _curve(own, points),
        "## Limits",
        _limits(kind, about),
        f"Reference: [`{kind.__qualname__}`](../api/{'.'.join(kind.__module__.split('.')[:2])}.md"
        f"#{kind.__module__}.{kind.__qualname__})",
    ]
    return "\n\n".join(block for block in blocks if block)


def _shares_its_name(kind: type[Part]) -> bool:
    return sum(other.name == kind.name for other in catalogue.parts().values()) > 1


def _facts(kind: type[Part]) -> str:
    def code(names: Sequence[str] | property) -> str:
        if isinstance(names, property):
            return "depends on its arguments"
        return ", ".join(f"`{name}`" for name in names)

    traced = [name for name in kind.traced if name != "of"]
    needs = sorted(kind.needs) if isinstance(kind.needs, frozenset) else kind.needs
    learned = f"`{kind.learns}`; trained by `{kind.trained_by}`" if kind.learns else "none"
    if isinstance(kind.learns, property):
        learned = "depends on its arguments"
    rows = [
        ["reads of a token", code(needs) or "nothing"],
        ["stores with every token", code(kind.keeps) or "nothing"],
        ["learned weights", learned],
        [
            "change without a compilation",
            code(traced) or "none of its options",
        ],
    ]
    return markdown(["the part", "declares"], rows)


def _options(kind: type[Part], about: str) -> str:
    """Each field a user writes: type, default, the values it takes, its meaning."""
    meanings = section_of(about, "Attributes")
    rows = []
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if issubclass(kind, Wrapper) and field.name == "of":
            continue  # the eviction that it holds, which is written before it
        argument = kind.arguments.get(field.name)
        default = "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        values = f"{argument.expected}{', or None' if argument.optional else ''}" if argument else "–"
        meaning = meanings.get(field.name, argument.what if argument else "–")
        type_ = str(field.type).replace(" | ", " or ")
        rows.append([f"`{field.name}`", f"`{type_}`", default, values, meaning])
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return markdown(["option", "type", "default", "values", "meaning"], rows) if rows else "None."


def section_of(about: str, title: str) -> dict[str, str]:
    """The entries of a docstring's section, by name."""
    body = re.search(rf"^{title}:\n((?:  .*\n?|\n)+)", about + "\n", re.MULTILINE)
    entries: dict[str, str] = {}
    for entry in re.split(r"^  (?=\S)", body[1], flags=re.MULTILINE)[1:] if body else ():
        names, _, text = entry.partition(": ")
        entries |= dict.fromkeys(names.split(", "), " ".join(text.split()).replace("``", "`"))
    return entries


def _presets(kind: type[Part]) -> str:
    def uses(policy: object) -> bool:
        return any(isinstance(part, kind) for part in policy.chain)  # type: ignore[attr-defined]

    presets = [
        [f"`{n}`", f"`{spec}`"] for n, spec in catalogue.PRESETS.items() if uses(catalogue.policy(spec))
    ]
    examples = [e for method in catalogue.methods() for e in method.examples if uses(e)]
    table = markdown(["preset", "policy"], presets) if presets else "No preset."
    shown = "\n".join(dict.fromkeys(map(repr, examples[:6])))
    return f"{table}\n\n```text\n{shown}\n```" if shown else table


def measured() -> list[front.Point]:
    """Every policy of the front at ``LENGTH`` tokens, question unseen, embedded model."""
    from docs.site.text import ROOT
    from kvjax.eval.measure.store import read as rows_of
    from kvjax.eval.report.table import Results

    dim = json.loads(read("kvjax/assets/embedded/config.json"))["head_dim"]
    rows = [row for row in rows_of(ROOT / "results/frontier") if row.cell.length == LENGTH]
    return front.points(Results(tuple(rows)), dim)[LENGTH, "agnostic"]


def _curve(own: Sequence[front.Point], points: Sequence[front.Point]) -> str:
    if not own:
        return "The measured policies of [the front](../results/frontier/front.md) do not have this part."
    own = sorted(own, key=lambda p: p.share)
    rows = [
        [f"`{p.name}`", f"{100 * p.share:.1f} %", f"{p.score:.1f} ({p.low:.1f} … {p.high:.1f})"] for p in own
    ]
    table = markdown(["policy", "bytes", "score, % (95 %)"], rows)
    return (
        f"Mean score of {own[0].tasks} tasks over the bytes held, embedded model, {LENGTH:,} tokens, "
        "question unseen; grey: all measured policies ([the front](../results/frontier/front.md)).\n\n"
        f"{svg(own, points)}\n\n{table}"
    )


def svg(own: Sequence[front.Point], points: Sequence[front.Point]) -> str:
    """Score, 0 to 100, over bytes, 0 to 100 %; the text of a point is its policy."""
    wide, high = 520, 260
    left, right, top, bottom = 44, wide - 14, 8, high - 34

    def at(share: float, score: float) -> tuple[float, float]:
        return left + share / 100 * (right - left), bottom - score / 100 * (bottom - top)

    def dot(p: front.Point, size: float, of: str) -> str:
        x, y = at(100 * p.share, p.score)
        said = html.escape(f"{p.name}: {100 * p.share:.1f} % of the bytes, {p.score:.1f} %")
        return f'<circle class="{of}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"><title>{said}</title></circle>'

    ticks = []
    for number in range(0, 101, 25):
        x, y = at(number, number)
        ticks.append(f'<text x="{x:.0f}" y="{bottom + 14}" text-anchor="middle">{number}</text>')
        ticks.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{number}</text>')
        ticks.append(f'<line x1="{left}" x2="{right}" y1="{y:.0f}" y2="{y:.0f}"/>')
    titles = (
        f'<text x="{wide / 2}" y="{high - 4}" text-anchor="middle">live bytes, % of the full cache\'s</text>'
        f'<text transform="translate(11,{bottom / 2}) rotate(-90)" text-anchor="middle">score, %</text>'
    )
    dots = [dot(p, 2.2, "other") for p in points] + [dot(p, 4, "own") for p in own]
    return (
        f'<svg class="curve" viewBox="0 0 {wide} {high}" role="img" aria-label="Score over bytes held">'
        f"{''.join(ticks)}{titles}{''.join(dots)}</svg>"
    )


@functools.cache
def _words() -> dict[str, str]:
    """Every part as a user writes it: without arguments, with half as a budget, or as an example has it."""
    words = {}
    shown = [part for method in catalogue.methods() for e in method.examples for part in e.chain]
    for name, kind in catalogue.parts().items():
        if kind.idle:
            continue
        texts = [kind.name, f"{kind.name}(0.5)", *(part.word for part in shown if type(part) is kind)]
        words[name] = next((text for text in texts if _refusal(_alone(kind, text)) is None), "")
    return {name: word for name, word in words.items() if word}


def _alone(kind: type[Part], word: str) -> str:
    """The smallest policy in which a part does something."""
    if issubclass(kind, Wrapper):
        return f"knorm + {word} + uniform(0.5)"
    around = {"eviction": "{} + uniform(0.5)", "budget": "knorm + {}", "completion": "topk + {}"}
    # A word that stands for two places needs no other.
    plain = _refusal(word) is None
    return word if plain else around.get(kind.place, "{}").format(word)


def _refusal(text: str) -> str | None:
    try:
        catalogue.policy(text)
    except PolicyError as error:
        return str(error)
    return None


def _limits(kind: type[Part], about: str) -> str:
    """What the policy's own checks refuse beside this part, with their reasons."""
    name = next(n for n, other in catalogue.parts().items() if other is kind)
    lines = [f"* {what}: {text}" for what, text in section_of(about, "Raises").items()]
    if name in _words():
        base = _alone(kind, _words()[name])
        reasons: dict[str, list[str]] = {}
        for other, word in [*_words().items(), *((text, text) for text in TRIED)]:
            theirs = catalogue.parts().get(other)
            if theirs is not None and (theirs.place == kind.place or theirs.place in _filled(base, kind)):
                continue
            text = _with(base, word)
            refusal = _refusal(text)
            if refusal is not None and "has no place left" not in refusal:  # a word that fills two places
                reasons.setdefault(refusal.replace(repr(word), "it"), []).append(f"`{text}`")
        lines += [f"* {', '.join(texts)}: {reason}" for reason, texts in reasons.items()]
    return "\n".join(lines) or "No other part is refused beside it."


def _filled(base: str, kind: type[Part]) -> set[str]:
    """Places that the smallest policy fills with other parts, except a budget, which is replaced."""
    busy = {part.place for part in catalogue.policy(base).chain if not part.idle}
    return busy - {kind.place} - {"budget"}


def _with(base: str, word: str) -> str:
    """The base with a word more, or with another budget."""
    parts = base.split(" + ")
    kinds = catalogue.parts()
    head = word.partition("(")[0]
    if head in kinds and kinds[head].place == "budget" and len(parts) > 1:
        parts = [part for part in parts if part != "uniform(0.5)"]
    return " + ".join([*parts, word])
