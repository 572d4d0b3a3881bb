"""What a reader sees of the measurements: tables in markdown, and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.eval.report import plotting
from studies.kvp import costs
from studies.kvp.costs import FREE, PRIVILEGED

STYLES = ("default", "oracle", *FREE, *PRIVILEGED)


def pooled(results: Mapping[str, Any], kinds: Sequence[str], what: str) -> dict[str, np.ndarray]:
    """Means of ``areas`` or ``curves`` over all sequences of some kinds."""
    parts = [
        (results["kinds"][k]["sequences"], results["kinds"][k][what]) for k in kinds if k in results["kinds"]
    ]
    total = sum(n for n, _ in parts)
    return {
        name: np.asarray(sum(n * np.asarray(part[name]) for n, part in parts) / total) for name in parts[0][1]
    }


def costs_page(results: Mapping[str, Any], sorts: Mapping[str, Sequence[str]], command: str) -> str:
    """Area by layer, by layer and head, and by what was trained on and tested on."""
    kinds = list(results["kinds"])
    areas = costs.over_oracle(pooled(results, kinds, "areas"))
    rankers = results["rankers"]
    learned = rankers[0]
    layers = areas[learned].mean(axis=1).shape[0]
    names = [*rankers, *FREE, *PRIVILEGED]
    lines = [
        "# Cost over all budgets on held-out traces",
        "",
        f"Mean area over the oracle's, {len(results['tasks'])} sequences, mean of a layer's KV heads; lower "
        f"is better, 1 is the oracle. {', '.join(PRIVILEGED)} read the cache's last queries (privileged), "
        "the others see no attention.",
        "",
        f"    {command}",
        "",
        _row(["layer", *(f"*{n}*" if n in PRIVILEGED else n for n in names)]),
        _row(["---"] * (len(names) + 1)),
    ]
    for layer in range(layers):
        lines.append(_row([layer, *(f"{areas[n][layer].mean():.2f}" for n in names)]))
    lines += [_row(["all", *(f"{areas[n].mean():.2f}" for n in names)]), "", *_won(areas, learned), ""]
    lines += [
        "## By head",
        "",
        f"`{learned}`; behind it the best attention-free ranking that learns nothing.",
        "",
    ]
    heads = areas[learned].shape[1]
    lines += [_row(["layer", *(f"head {h}" for h in range(heads))]), _row(["---"] * (heads + 1))]
    for layer in range(layers):
        cells = []
        for head in range(heads):
            best = min(FREE, key=lambda n: areas[n][layer, head])  # noqa: B023
            cells.append(f"{areas[learned][layer, head]:.2f} ({best} {areas[best][layer, head]:.2f})")
        lines.append(_row([layer, *cells]))
    lines += ["", "## Trained on one, tested on another", ""]
    lines += [_row(["ranking", *(f"{sort} (n = {_count(results, own)})" for sort, own in sorts.items())])]
    lines += [_row(["---"] * (len(sorts) + 1))]
    by_sort = {sort: costs.over_oracle(pooled(results, own, "areas")) for sort, own in sorts.items()}
    for name in names:
        lines.append(_row([name, *(f"{by_sort[sort][name].mean():.2f}" for sort in sorts)]))
    return "\n".join([*lines, ""])


def _won(areas: Mapping[str, np.ndarray], learned: str) -> list[str]:
    """Where a ranking that learns nothing and sees no attention is at least as good."""
    area = areas[learned].mean(axis=1)
    lost = []
    for layer in range(len(area)):
        best = min(FREE, key=lambda n: areas[n][layer].mean())  # noqa: B023
        if areas[best][layer].mean() <= area[layer]:
            lost.append(f"layer {layer} ({best} {areas[best][layer].mean():.2f}, learned {area[layer]:.2f})")
    free = np.stack([areas[n] for n in FREE]).min(axis=0)
    heads = f"{int((areas[learned] < free).sum())} of {free.size} heads"
    sentence = f"Not the lowest attention-free area: {', '.join(lost)}." if lost else (
        "On the mean of every layer the learned ranking has the lowest area of all attention-free rankings."
    )  # fmt: skip
    beside = [
        f"{name} {'above' if areas[name].mean() > area.mean() else 'below'} it ({areas[name].mean():.2f})"
        for name in PRIVILEGED
    ]
    return [
        f"{sentence} Head by head it is lowest on {heads}. Over all layers {area.mean():.2f}; "
        f"{', '.join(beside)}."
    ]


def _count(results: Mapping[str, Any], kinds: Sequence[str]) -> int:
    return sum(results["kinds"][k]["sequences"] for k in kinds if k in results["kinds"])


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def draw_costs(results: Mapping[str, Any], file: Path) -> Path:
    """The evicted share of attention over the budget, a panel a layer."""
    curves = pooled(results, list(results["kinds"]), "curves")
    names = [results["rankers"][0], "oracle", *FREE, *PRIVILEGED]
    plt = plotting.pyplot()
    figure, axes = plotting.panels(plt, len(curves["oracle"]), 3, (3.6, 2.8), top=0.4)
    for layer, axis in enumerate(axes):
        for number, name in enumerate(names):
            how = plotting.style(number) | {"ms": 3, "lw": 1, "markevery": 4}
            how |= {"ls": "--"} if name in PRIVILEGED else {}
            label = f"{name} (privileged)" if name in PRIVILEGED else name
            axis.plot([100 * s for s in results["shares"]], curves[name][layer], label=label, **how)
        axis.set_title(f"layer {layer}", fontsize=9)
        axis.tick_params(labelsize=8)
    figure.supxlabel("ranked tokens that are kept, %", fontsize=9)
    figure.supylabel("future attention that is evicted, share", fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=8)
    return plotting.saved(plt, figure, file)


def ablations_page(results: Mapping[str, Any], command: str) -> str:
    """A row a run."""
    runs = results["runs"]
    spread = [run["area"] for run in runs if _same_but_seed(run, runs[0])]
    lines = [
        "# Short equal runs that differ in one thing",
        "",
        f"Area over the oracle's on the same {results['sequences']} held-out sequences of "
        f"{results['length']} tokens, after {runs[0]['steps']} steps of {runs[0]['method']['rows']} traces; "
        "difference of the mean areas to `base`, over the oracle's, with the standard error over sequences.",
        "",
        f"    {command}",
        "",
        f"Seeds of the base alone lie {max(spread) - min(spread):.3f} apart (n = {len(spread)}): differences "
        "of that size say nothing, nor do these runs say what longer ones would find.",
        "",
        _row(["run", "inputs", "hidden", "K", "rate", "area", "less base", "processor s"]),
        _row(["---"] * 8),
    ]
    for run in sorted(runs, key=lambda run: run["area"]):
        inputs = " ".join(name.removeprefix("w_") for name in run["agent"]["inputs"])
        draws = run["method"]["permutations"] if run["method"]["kind"] == "rloo" else "–"
        less = f"{run['less_base']:+.3f} ± {run['less_base_error']:.3f}"
        cells = [run["name"], inputs, run["agent"]["hidden"], draws, f"{run['peak']:g}", f"{run['area']:.3f}"]
        lines.append(_row([*cells, less, f"{run['processor_seconds']:.0f}"]))
    others = ", ".join(f"{name} {area:.2f}" for name, area in results["untrained"].items())
    return "\n".join([*lines, "", f"Learning nothing: {others}.", ""])


def _same_but_seed(run: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    return all(run[name] == base[name] for name in ("agent", "method", "peak", "steps"))


def draw_ablations(results: Mapping[str, Any], file: Path) -> Path:
    """A bar a run."""
    runs = sorted(results["runs"], key=lambda run: -run["area"])
    plt = plotting.pyplot()
    figure, (axis,) = plotting.panels(plt, 1, 1, (6, 0.26 * len(runs) + 1.2))
    axis.barh([run["name"] for run in runs], [run["area"] for run in runs], color=plotting.COLOURS[0])
    axis.axvline(results["untrained"]["random"], color="0.4", lw=1, ls=":", label="random")
    axis.axvline(1, color=plotting.COLOURS[1], lw=1, label="oracle")
    axis.set_xlabel("area over the oracle's", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=8)
    return plotting.saved(plt, figure, file)


def time_page(results: Mapping[str, Any], command: str) -> str:
    """Processor time and FLOPs."""
    lines = [
        "# What ranking takes",
        "",
        f"    {command}",
        "",
        f"Processor time of one prompt, the least of {results['repeats']} (CPU, float32, agents of "
        f"{results['agent_parameters']:,} parameters on all KV heads). `compressed`: read under "
        f"`{results['policy']}`, sorting and packing included.",
        "",
        _row(["tokens", "reading, s", "ranking, s", "ranking, % of reading", "compressed, s"]),
        _row(["---"] * 5),
    ]
    for one in results["measured"]:
        s = one["cpu_seconds"]
        cells = [one["length"], f"{s['reading']:.3f}", f"{s['ranking']:.3f}"]
        lines.append(_row([*cells, f"{100 * one['ranking_over_reading']:.1f}", f"{s['compressed']:.3f}"]))
    lines += ["", "FLOPs of ranking, % of those of the prefill (counted, not measured):", ""]
    lengths = [row["length"] for row in results["flops"][0]["rows"]]
    lines += [_row(["model", *lengths]), _row(["---"] * (len(lengths) + 1))]
    for one in results["flops"]:
        lines.append(_row([one["model"], *(f"{100 * row['share']:.2f}" for row in one["rows"])]))
    return "\n".join([*lines, ""])


def draw_times(results: Mapping[str, Any], file: Path) -> Path:
    """Share of ranking over the prompt's length, measured and by FLOPs."""
    plt = plotting.pyplot()
    figure, (axis,) = plotting.panels(plt, 1, 1, (5, 3.2))
    measured = [(one["length"], 100 * one["ranking_over_reading"]) for one in results["measured"]]
    axis.plot(*zip(*measured), "o-", color=plotting.COLOURS[0], label="measured, embedded model")
    for colour, one in zip(plotting.COLOURS[1:], results["flops"]):
        counted = [(row["length"], 100 * row["share"]) for row in one["rows"]]
        axis.plot(*zip(*counted), "--", color=colour, label=f"by FLOPs, {Path(one['model']).name}")
    axis.axhline(3, color="0.4", lw=1, ls=":", label="aim from 16,384 on")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("tokens of a prompt", fontsize=9)
    axis.set_ylabel("ranking, % of reading", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=7)
    return plotting.saved(plt, figure, file)
