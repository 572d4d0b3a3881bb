"""How often the device's cache has what a selection chose of host memory, on the embedded model.

python -m studies.hits --out results/host --table kvjax/assets/embedded/hits.json

Text is fed token by token as it stands: text that a small model writes repeats itself, and would be found
more often. A state is read once for each text and fed under every selection of a kind. Its device cache is
large; from what every step read follows what a smaller one, least recently used first, would have had.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import cli, decode
from kvjax.algebra import Policy
from kvjax.cache.state import KVState
from kvjax.eval import tasks
from kvjax.eval.measure import runner
from kvjax.eval.measure.store import versions
from kvjax.eval.report.table import markdown
from kvjax.eval.tasks.data import find
from kvjax.loading import LanguageModel
from kvjax.types import Params

CONTEXTS = (2048, 4096)
TEXTS = ("ppl_books", "niah_multikey_1", "dialogue_recall")
ROWS, STEPS, PAGE, SEED = 4, 64, 64, 0

RATIOS = (1.0, 1.5, 2.0, 4.0)
"""Sizes of the device's cache, of what one read chooses; the largest is the one that is really there."""

BOOKS = TEXTS[0]
"""The text of the plan's table: running text, and more of it than a task's answer."""


def kinds(context: int) -> tuple[tuple[str, ...], ...]:
    """Selections, those of a kind together: they choose units of one size, the last one most of them."""
    large, small = (
        tuple(f"quest({round(share / 64 * context / unit)}, chunk={unit}, dense=0)" for share in (3, 6))
        for unit in (64, 16)
    )
    return large, ("topk(0.02)", "topk(0.05)"), small


@dataclasses.dataclass(frozen=True)
class Fed:
    """What the steps of a text read from host memory.

    Attributes:
      chosen: was a unit chosen by a step? [T, L, B, K, N]
      hits: how many of them the device's cache had, as it counted; [T, L, B, K].
      there: which rows had a token at a step; [T, B].
    """

    chosen: np.ndarray
    hits: np.ndarray
    there: np.ndarray


@functools.partial(jax.jit, static_argnames="network")
def _fed(
    network: Any, policy: Policy, params: Params, state: KVState, tokens: Any, active: Any
) -> tuple[Any, Any]:
    def step(state: KVState, now: tuple[Any, Any]) -> tuple[KVState, tuple[Any, Any]]:
        before = [layer.hosted.cached.hits for layer in state.layers if layer.hosted is not None]
        state, _ = decode.step(network, policy, params, {}, state, *now)
        cached = [layer.hosted.cached for layer in state.layers if layer.hosted is not None]
        used = [jnp.take_along_axis(one.used, jnp.maximum(one.place, 0), axis=-1) for one in cached]
        chosen = [(one.place >= 0) & (at == one.clock[..., None]) for one, at in zip(cached, used)]
        hits = [one.hits - earlier for one, earlier in zip(cached, before)]
        return state, (jnp.stack(chosen), jnp.stack(hits))

    return jax.lax.scan(step, state, (tokens, active))[1]


def read(model: Any, policy: Policy, texts: Sequence[tuple[list[int], list[int]]], context: int) -> KVState:
    """The prompts' state, with full pages in host memory and room for what is fed."""
    prompts = [prompt for prompt, _ in texts]
    state, _ = kvjax.prefill(model, policy, prompts, context=context, page=PAGE, chunk_size=PAGE * 8)
    return decode.reserve(policy, state, STEPS, 1)


def fed(model: Any, policy: Policy, state: KVState, texts: Sequence[tuple[list[int], list[int]]]) -> Fed:
    """Feeds what follows each prompt; the state is not changed."""
    tokens = decode.padded([new for _, new in texts], STEPS).T
    there = np.arange(STEPS)[:, None] < np.asarray([len(new) for _, new in texts])
    chosen, hits = jax.device_get(
        _fed(model.network, policy.after_prompt, model.params, state, tokens, there)
    )
    return Fed(chosen, hits, there)


def drawn(model: LanguageModel, name: str, context: int, rows: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what follows: of books the next tokens, of tasks the question and its answer."""
    data, texts = find(), []
    [task] = tasks.named([name], data)[0]
    for _, one in runner.draw(task, model, data, length=context, seed=SEED, count=rows):
        text = one.context + one.question + one.prefix + one.answer
        new = min(len(text) - len(one.context), STEPS)
        texts.append((text[:-new], text[-new:]))
    return texts


def found(chosen: np.ndarray, places: int) -> np.ndarray:
    """How many units of each step a cache of so many had; [T, ..., N] to [T, ...].

    It holds the units that were read last. Of those of one read, the first in the text goes first.
    """
    steps, *lists, units = chosen.shape
    last = np.full((*lists, units), -1)
    hits = np.zeros((steps, *lists), np.int64)
    for step, now in enumerate(chosen):
        least = np.partition(last, max(units - places, 0), axis=-1)[..., max(units - places, 0)]
        hits[step] = (now & (last >= 0) & (last >= least[..., None])).sum(axis=-1)
        last = np.where(now, step * units + np.arange(units), last)
    return hits


def rates(one: Fed, hits: np.ndarray) -> dict[str, Any]:
    """Hits of all that was asked for, over everything and by layer, from the second read on."""
    counts = one.there[1:, None, :, None]
    asked = (one.chosen.sum(axis=-1)[1:] * counts).sum(axis=(0, 2, 3))
    had = (hits[1:] * counts).sum(axis=(0, 2, 3))
    layers = had / np.maximum(asked, 1)
    lists = int(one.there[1:].sum()) * one.chosen.shape[1] * one.chosen.shape[3]
    return {
        "hits": round(float(had.sum() / asked.sum()), 4),
        "low": round(float(layers.min()), 4),
        "high": round(float(layers.max()), 4),
        "asked": round(float(asked.sum() / lists), 2),
    }


def measured(
    model: Any,
    selections: Sequence[str],
    texts: Sequence[tuple[list[int], list[int]]],
    context: int,
) -> Iterator[dict[str, Any]]:
    """A row for each selection of a kind and each size of the cache."""
    largest = kvjax.policy(selections[-1]).selection
    most = largest.most_units(context)
    share = min((RATIOS[-1] * most * largest.unit + 0.5) / context, 1.0)
    state = read(model, kvjax.policy(f"{selections[-1]} + host(cache={share})"), texts, context)
    for name in selections:
        policy = kvjax.policy(f"{name} + host(cache={share})")
        one, chooses = fed(model, policy, state, texts), policy.selection.most_units(context)
        near = policy.near(context, 0)
        assert near is not None
        for ratio in RATIOS:
            places = math.ceil(ratio * chooses)
            row = {"selection": name, "unit": near.unit, "chooses": chooses, "places": places}
            row |= {"ratio": round(places / chooses, 3)} | rates(one, found(one.chosen, places))
            if places == near.units:
                row["counted"] = rates(one, one.hits)["hits"]
            yield row


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the plan reads: hits on books by kind of selection, unit and size of the cache."""
    groups: dict[tuple[str, int, float], list[float]] = {}
    for row in rows:
        if row["text"] == BOOKS:
            ratio = min(RATIOS, key=lambda x: abs(x - row["ratio"]))
            key = (row["selection"].partition("(")[0], row["unit"], ratio)
            groups.setdefault(key, []).append(row["hits"])
    return [
        {"selection": kind, "unit": unit, "ratio": ratio, "hits": round(float(np.mean(hits)), 3)}
        for (kind, unit, ratio), hits in sorted(groups.items())
    ]


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a page."""
    cells: dict[tuple[Any, ...], dict[float, str]] = {}
    for row in rows:
        ratio = min(RATIOS, key=lambda x: abs(x - row["ratio"]))
        key = (row["text"], f"{row['context']:,}", f"`{row['selection']}`", row["asked"])
        cells.setdefault(key, {})[ratio] = (
            f"{100 * row['hits']:.0f} ({100 * row['low']:.0f} to {100 * row['high']:.0f})"
        )
    lines = [[*map(str, key), *(one.get(ratio, "") for ratio in RATIOS)] for key, one in cells.items()]
    head = ("text", "context", "selection", "units asked", *(f"cache {ratio:g} x" for ratio in RATIOS))
    counted = [abs(row["counted"] - row["hits"]) for row in rows if "counted" in row]
    facts = ", ".join(f"{name} {version}" for name, version in rows[0]["versions"].items())
    return (
        "# How often the device's cache has what a selection chose\n\n"
        f"`{rows[0]['command']}`; the embedded "
        f"model (6.9 M parameters, six layers of four KV heads), float32, batches of {rows[0]['rows']} rows, "
        f"seed {SEED}; {facts}.\n\n"
        "With `host`, full pages lie in host memory. A step brings the units that the selection chose and "
        "that the device's cache has not. The table says what share of the chosen units the cache had, in "
        "per cent, over all heads, layers and rows; in brackets the lowest and the highest layer. `units "
        "asked` are those that a KV head chooses in one step among what lies in host memory (a unit is a "
        "chunk of Quest, or one token of Top-K). The cache holds 1, 1.5, 2 or 4 times what one read chooses "
        "at most, rounded up to whole units.\n\n"
        + markdown(head, lines)
        + f"\n\n`{BOOKS}`: the next {STEPS} tokens of held-out books. The others are tasks, of which the "
        "question and its right answer are fed. All text is fed as it stands, one token a step, so nothing "
        "is found because a model repeats itself. The first read of a text finds the cache empty, brings all "
        "it chooses, and is not counted; the texts of the tasks are short (about 20 and 40 tokens), so large "
        "caches are not full before they end.\n\n"
        "Each text was fed once with the largest cache. The smaller ones are computed from what every step "
        "chose, by the same rule: what was read longest ago goes first. For the largest, what is computed "
        "and what the cache itself counted differ by at most "
        f"{100 * max(counted, default=0.0):.2f} points.\n\n"
        "`python -m kvjax.plan` names the rate on books of the same kind of selection, at the unit and then "
        "the size of the cache that are nearest. This is a small model with short contexts: a model of "
        "another size, a longer context or a smaller share of it may find more or less. `Cached.asked` and "
        "`Cached.hits` count it on a model of yours.\n"
    )


def read_rows(out: Path) -> list[dict[str, Any]]:
    """The rows of a folder; a study that was cut off goes on behind them."""
    path = out / "hits.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines()]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes and prints the rows; the exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.hits", description=(__doc__ or "").splitlines()[0])
    cli.add(parser, "--out", required=True)
    parser.add_argument("--table", type=Path, metavar="FILE", help="where the plan's table goes")
    parser.add_argument(
        "--contexts",
        type=cli.numbers(256),
        default=[*CONTEXTS],
        help="tokens of prompt and text (default: 2048,4096)",
    )
    parser.add_argument("--rows", type=cli.whole(1), default=ROWS, help="texts of a batch (default: 4)")
    options = parser.parse_args(words)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    about = {"command": shlex.join(["python", "-m", "studies.hits", *words]), "versions": versions()}
    model, rows = kvjax.load(), read_rows(out)
    drawn_texts = {x: {name: drawn(model, name, x, options.rows) for name in TEXTS} for x in options.contexts}
    done = {(row["text"], row["context"], row["selection"]) for row in rows}
    with (out / "hits.jsonl").open("a", encoding="utf-8") as file:
        for of_kind in zip(*map(kinds, options.contexts)):
            for context, selections in zip(options.contexts, of_kind):
                for name, texts in drawn_texts[context].items():
                    if (name, context, selections[-1]) in done:
                        continue
                    where = {"text": name, "context": context, "rows": options.rows, "seed": SEED}
                    fresh = [where | row | about for row in measured(model, selections, texts, context)]
                    rows += fresh
                    lines = "".join(json.dumps(row) + "\n" for row in fresh)
                    print(lines, end="", file=file, flush=True)
                    print(lines, end="", flush=True)
    (out / "README.md").write_text(page(rows), encoding="utf-8")
    if options.table:
        options.table.write_text(json.dumps(table(rows), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    cli.start(main)
