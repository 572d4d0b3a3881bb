"""How often Top-K chooses the same tokens by codes of the keys as by the keys, on the embedded model's text.

python -m studies.overlap --out results/host

After a prompt that is read whole, states with exact keys and with codes hold the same, and the device's cache
of each is empty. After one step it holds what the step chose, and the two are compared head by head. The
first layer's queries are the same to the bit, those of later layers nearly so, as where codes are used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax import cli, decode
from kvjax.cache.state import KVState
from kvjax.eval import tasks
from kvjax.eval.measure import runner
from kvjax.eval.measure.store import versions
from kvjax.eval.report.table import markdown
from kvjax.eval.tasks.data import find
from kvjax.loading import LanguageModel

SHARE, CACHE, CODES, ROWS, LENGTH = 0.02, 0.021, ("int8", "int4"), 8, 2048
TASKS = ("text_books", "niah_multikey_1", "dialogue_recall")
COMMAND = "python -m studies.overlap --out results/host"

HEAD = f"""\
# Choosing by codes of the keys

`topk({SHARE}) + host(keys=int8)` and `int4` rank by codes of the keys and read the chosen tokens as they are.
Below: of the tokens that a step chooses by exact keys, how many it chooses by codes. The embedded model,
{ROWS} texts of {LENGTH:,} tokens a task, one step behind each, all layers and KV heads; of the lowest head
the mean over texts.

    {COMMAND}

"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    return cli.run(_run, argv)


def _run(argv: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.overlap", description=__doc__)
    cli.add(parser, "--out", required=True)
    out, model, rows = parser.parse_args(argv).out, kvjax.load(), []
    out.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        prompts = texts(model, task)
        right = chosen(model, f"topk({SHARE}) + host(cache={CACHE})", prompts)
        for code in CODES:
            other = chosen(model, f"topk({SHARE}) + host(cache={CACHE}, keys={code})", prompts)
            rows.append({"task": task, "keys": code} | overlap(right, other))
            print(rows[-1], flush=True)
    found = {"command": COMMAND, "versions": versions(), "data": find().source, "rows": rows}
    (out / "overlap.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (out / "overlap.md").write_text(page(rows), encoding="utf-8")


def texts(model: LanguageModel, name: str) -> list[list[int]]:
    """Prompts of a task with its answer left out, a token less than ``LENGTH`` each."""
    drawn = runner.draw(tasks.tasks()[name], model, find(), length=LENGTH, seed=0, count=ROWS)
    whole = [one.context + one.question + one.prefix + one.answer for _, one in drawn]
    return [ids[: LENGTH - 1] for ids in whole]


def chosen(model: LanguageModel, spec: str, prompts: list[list[int]]) -> list[list[set[int]]]:
    """Units that one step brings, by layer and then by row and KV head."""
    policy = kvjax.policy(spec)
    state, logits = kvjax.prefill(model, policy, prompts, context=LENGTH)
    state = decode.reserve(policy, state, 1, 1)
    before = held(state)
    assert not any(units for layer in before for units in layer), "the caches are not empty"
    fed = np.asarray(logits).argmax(axis=-1).astype(np.int32)
    step = decode.step_program
    state, _ = step(model.network, policy, model.params, {}, state, fed, np.ones(len(fed), bool))
    return held(state)


def held(state: KVState) -> list[list[set[int]]]:
    """Units in the device's caches, by layer and then by row and KV head."""
    there = [jax.device_get(layer.hosted.cached.holds) for layer in state.layers if layer.hosted is not None]
    return [[{*head[head >= 0].tolist()} for row in holds for head in row] for holds in there]


def overlap(right: list[list[set[int]]], other: list[list[set[int]]]) -> dict[str, Any]:
    """Shares of what exact keys choose that codes choose, too, by heads."""
    shares = np.asarray([[len(a & b) / len(a) for a, b in zip(x, y)] for x, y in zip(right, other)])
    heads = shares.reshape(len(shares), ROWS, -1).mean(axis=1)
    return {
        "chosen": float(np.mean([len(a) for layer in right for a in layer])),
        "overlap": float(shares.mean()),
        "first_layer": float(shares[0].mean()),
        "lowest_head": float(heads.min()),
    }


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The page."""
    names = ("overlap", "first_layer", "lowest_head")
    lines = [
        [row["task"], row["keys"], f"{row['chosen']:.0f}"] + [f"{100 * row[name]:.1f} %" for name in names]
        for row in rows
    ]
    titles = ["text", "keys", "tokens a head", "chosen by both", "first layer", "lowest head"]
    return HEAD + markdown(titles, lines) + "\n"


if __name__ == "__main__":
    cli.start(main)
