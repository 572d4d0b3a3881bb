"""``plot``: pictures of saved results."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import Row
from kvjax.cli import InputError

_COLOURS = {"kvjax": "#1f77b4", "transformers": "#999999", "kvpress": "#d98c3f"}


def draw(folder: Path) -> list[Path]:
    """Pictures of every table in ``folder``.

    Raises:
      InputError: nothing to draw, or no matplotlib.
    """
    wanted = {
        "decode": [("tokens_per_s", "tokens / s", 1.0), ("allocated_bytes", "cache, MiB allocated", 2.0**20)],
        "prefill": [
            ("ttft_s", "s to first token", 1.0),
            ("peak_rss_growth_bytes", "peak of process, MiB", 2.0**20),
        ],
    }
    saved = {name: fields for name, fields in wanted.items() if (folder / f"{name}.json").exists()}
    if not saved:
        raise InputError(f"plot --out {folder} finds no decode.json or prefill.json. Run those first.")
    try:
        import matplotlib
    except ImportError:
        raise InputError("plot needs matplotlib. Install it: pip install -e '.[plot]'") from None
    matplotlib.use("Agg")
    return [_figure(folder, name, fields) for name, fields in saved.items()]


def newest(runs: Sequence[Row]) -> list[Row]:
    """Measured rows of the last run's model: the newest of each kind."""
    rows: dict[tuple[Any, ...], Row] = {}
    for run in runs:
        if run["model"] == runs[-1]["model"]:
            for row in run["rows"]:
                rows[tuple(row[name] for name in ("system", "config", "context", "batch", "dtype"))] = row
    return [row for row in rows.values() if "skipped" not in row]


def _figure(folder: Path, name: str, fields: list[tuple[str, str, float]]) -> Path:
    from matplotlib import pyplot

    rows = newest(results.read(folder / f"{name}.json"))
    if not rows:
        raise InputError(f"plot --out {folder}: {name}.json has no measured row. Run {name} again.")
    cells = sorted({(row["context"], row["batch"]) for row in rows})
    size = (3.6 * len(cells), 3.4 * len(fields))
    figure, axes = pyplot.subplots(len(fields), len(cells), figsize=size, squeeze=False, layout="constrained")
    for column, (context, batch) in enumerate(cells):
        cell = [row for row in rows if (row["context"], row["batch"]) == (context, batch)]
        for line, (field, label, unit) in enumerate(fields):
            _bars(axes[line][column], cell, field, unit)
            axes[line][column].set_xlabel(label)
        axes[0][column].set_title(f"{context} tokens, batch {batch}", fontsize=10)
    figure.suptitle(f"benchmarks {name}: solid float32, pale bfloat16", fontsize=11)
    file = folder / f"{name}.png"
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return file


def _bars(axis: Any, rows: Sequence[Row], field: str, unit: float) -> None:
    """Horizontal bars, one group a configuration, one bar a dtype."""
    names = list(dict.fromkeys((row["system"], row["config"]) for row in rows))
    dtypes = sorted({row["dtype"] for row in rows}, reverse=True)  # float32 first
    height = 0.8 / len(dtypes)
    for row in rows:
        if row.get(field) is None:
            continue
        offset = (dtypes.index(row["dtype"]) - (len(dtypes) - 1) / 2) * height
        at, value = names.index((row["system"], row["config"])) + offset, row[field] / unit
        alpha = 1.0 if row["dtype"] == "float32" else 0.5
        axis.barh(at, value, height, color=_COLOURS[row["system"]], alpha=alpha)
        axis.text(value, at, f" {value:.3g}", va="center", fontsize=7)
    labels = [textwrap.fill(f"{system}: {config}", 30) for system, config in names]
    axis.set_yticks(range(len(names)), labels, fontsize=7)
    axis.invert_yaxis()
    axis.margins(x=0.18)
    axis.tick_params(axis="x", labelsize=7)
