"""The studies of GVote, one JSON file a study, task and length.

proxy   overlap of drawn with true future attention, usage and correlation, by layer and head
ahead   the same by n_f, the number of positions that rotations are averaged over: how ours was chosen
ablate  what is kept, and how much future attention it holds, by voters S and nucleus p; spread over requests
cost    CPU seconds of a prompt with and without compression, by length
shares  the p that keeps 20, 30 and 40 % of the tokens, mean over all tasks named, by way to count
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax import decode
from kvjax.eval import tasks
from kvjax.eval.commands import takes_turns
from kvjax.eval.measure import runner
from kvjax.eval.measure.row import short
from kvjax.eval.measure.store import about, versions
from kvjax.eval.report.plotting import map_of, panels, pyplot, saved
from kvjax.eval.tasks.data import Data
from kvjax.loading import LanguageModel
from studies import processor
from studies.gvote import proxy
from studies.gvote.proxy import FUTURE, Agreement
from studies.gvote.shares import FORMS, shares

PS = (0.95, 0.8, 0.85, 0.9, 0.99)
COUNTS = (1, 2, 4, 8, 16, 32)
AHEAD = (1, 16, 64, 256)
OURS = 64


def texts(model: LanguageModel, data: Data, task: str, length: int, count: int) -> list[list[int]]:
    """Token ids of prompts and what follows them."""
    wanted, _ = tasks.named([task], data)
    drawn = runner.draw(wanted[0], model, data, length=length, seed=0, count=count)
    rows = [e.context + e.question + e.prefix + list(e.answer) for _, e in drawn]
    return [ids[:length] for ids in rows if len(ids) > 2 * FUTURE]


def _agreements(
    model: LanguageModel, prompts: Sequence[list[int]], ahead: int, say: Callable[[str], None]
) -> list[Agreement]:
    agreements = []
    for at, ids in enumerate(prompts):
        agreements.append(proxy.agreement_of(model, ids, ps=PS, counts=COUNTS, ahead=ahead, seed=at))
        say(f"n_f {ahead}: text {at + 1} of {len(prompts)}")
    return agreements


def _stacked(agreements: Sequence[Agreement]) -> Agreement:
    return jax.tree.map(lambda *x: np.stack(x), *agreements)


def _proxy(model: LanguageModel, prompts: Sequence[list[int]], say: Callable[[str], None]) -> dict[str, Any]:
    agreement = _stacked(_agreements(model, prompts, OURS, say))
    by_head = {n: getattr(agreement, n).mean(axis=0).tolist() for n in ("overlap", "usage", "r")}
    return {**proxy.as_json(agreement), "by_layer_and_head": by_head}


def _ahead(model: LanguageModel, prompts: Sequence[list[int]], say: Callable[[str], None]) -> dict[str, Any]:
    entries = []
    for ahead in AHEAD:
        agreement = _stacked(_agreements(model, prompts, ahead, say))
        at = (..., PS.index(0.95), COUNTS.index(8))
        entries.append(
            {"ahead": ahead, **proxy.as_json(agreement), "kept": float(agreement.kept[at].mean()),
             "held": float(agreement.held[at].mean())}
        )  # fmt: skip
    # What a kept token holds: a wider set always holds more.
    winner = max(entries, key=lambda e: e["held"] - e["kept"])
    return {"entries": entries, "winner": winner["ahead"]}


def _ablate(model: LanguageModel, prompts: Sequence[list[int]], say: Callable[[str], None]) -> dict[str, Any]:
    agreement = _stacked(_agreements(model, prompts, OURS, say))  # kept: [text, L, K, P, S]
    entries = []
    for i, p in enumerate(PS):
        for j, count in enumerate(COUNTS):
            kept, held = agreement.kept[..., i, j], agreement.held[..., i, j]
            request = kept.mean(axis=(1, 2))
            entries.append(
                {"p": p, "samples": count, "kept": float(kept.mean()), "held": float(held.mean()),
                 "request_sd": float(request.std()), "request_min": float(request.min()),
                 "request_max": float(request.max()), "head_sd": float(kept.mean(axis=0).std())}
            )  # fmt: skip
    return {"entries": entries}


def _cost(model: LanguageModel, prompts: Sequence[list[int]], say: Callable[[str], None]) -> dict[str, Any]:
    """On tokens drawn at random, since only their number counts; CPU seconds of this process."""
    length = len(prompts[0])
    model = processor.wide(model, length)
    ids = [np.resize(np.asarray(prompts[0]), length).tolist()]
    specs = ["gvote", "gvote(samples=256)", "gvote(samples=inf)", "gvote-expected", "snapkv + ada(0.25)"]
    times = processor.beside(
        lambda: decode.read_full(model, ids, context=length).inputs[-1],
        {spec: functools.partial(decode.prefill, model, spec, ids, context=length) for spec in specs},
    )
    over = times.pop("over")
    seconds = {"reading": times.pop("first"), **times}
    say(f"{length} tokens: {seconds}, over reading {over}")
    return {"cpu_seconds": seconds, "over_reading": over}


SHARES = "shares"
"""The study that takes all tasks together."""

DO: dict[str, Callable[[LanguageModel, Sequence[list[int]], Callable[[str], None]], dict[str, Any]]] = {
    "proxy": _proxy,
    "ahead": _ahead,
    "ablate": _ablate,
    "cost": _cost,
}


def do(values: dict[str, Any], model: LanguageModel, data: Data) -> list[Path]:
    """Every study on every task and length; the files."""
    folder = values["out"]
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for length in values["lengths"]:
        for task in values["task"]:
            prompts = texts(model, data, task, min(length, model.network.max_positions), values["samples"])
            for study in values["study"]:
                if study not in DO:
                    continue
                chosen = [np.resize(prompts[0], length).tolist()] if study == "cost" else prompts
                facts = {"study": study, "task": task, "length": length, "samples": len(chosen)}
                say = _saying(f"{study} {task} {length}:")
                tree = facts | about(model, data) | versions() | short(DO[study](model, chosen, say))
                file = folder / f"{study}_{task}_{length}.json"
                file.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
                print(file, flush=True)
                files.append(file)
        if SHARES in values["study"]:
            say, count = _saying(f"{SHARES} {length}:"), values["samples"]
            how: dict[str, Any] = {"protocol": values["protocol"], "chat": takes_turns(model, values)}
            found = shares(model, data, values["task"], length, count, say, values["form"] or FORMS, **how)
            tree = {"study": SHARES, "length": length, "samples": count, **about(model, data), **versions()}
            files.append(folder / f"{SHARES}_{length}.json")
            files[-1].write_text(json.dumps(tree | short(found), indent=1) + "\n", encoding="utf-8")
    return files + draw(folder)


def _saying(head: str) -> Callable[[str], None]:
    return lambda text: print(head, text, flush=True)


def draw(folder: Path) -> list[Path]:
    """A map of overlap by layer and head, of each proxy file."""
    files = []
    for file in sorted(folder.glob("proxy_*.json")):
        tree = json.loads(file.read_text(encoding="utf-8"))
        grids = tree["by_layer_and_head"]
        plt = pyplot()
        figure, axes = panels(plt, len(grids), 3, (3.2, 2.8))
        for axis, (name, grid) in zip(axes, grids.items()):
            cells = 100 * np.asarray(grid)
            map_of(axis, cells, (range(cells.shape[0]), range(cells.shape[1])), f"{name}, %")
        figure.supylabel("layer", fontsize=9)
        figure.supxlabel("query head", fontsize=9)
        files.append(saved(plt, figure, file.with_suffix(".png")))
        print(files[-1], flush=True)
    return files
