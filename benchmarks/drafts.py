"""What drafts can gain, on paper: bytes of weights and of keys and values that each kind of step loads.

A plain step loads all weights and the whole cache, a draft step all weights and what its selection visits
and ranks by, verification what a plain step loads. So d = (weights + selected) / (weights + cache) and v = 1:
times of devices on which a step takes as long as its bytes, whatever their number and bandwidth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from kvjax import catalogue
from kvjax.cli import InputError
from kvjax.decode import best_length, gain
from kvjax.models.spec import ModelSpec
from kvjax.plan import _shapes as shapes
from kvjax.plan._deployment import Deployment
from kvjax.sharding import mesh as meshes

ACCEPTED = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Acceptances of a table's columns."""

MOST = 8
"""Longest draft."""


def cost(spec: ModelSpec, selection: str, rows: int, context: int, dtype: str) -> dict[str, Any]:
    """Bytes of a step, and d and v, of a model whose cache holds ``context`` tokens of each row.

    Raises:
      InputError: a selection that is none.
    """
    drafts = catalogue.policy(selection)
    if drafts.selection.idle:
        raise InputError(f"--draft {selection} selects nothing. Give a selection, such as 'quest(chunks=8)'.")
    mesh = meshes.mesh("data=1", devices=jax.devices()[:1])
    full, selective = (
        Deployment(spec=spec, policy=policy, mesh=mesh, rows=rows, context=context, dtype=dtype)
        for policy in (catalogue.policy("full"), drafts)
    )
    weights = shapes.device_bytes(shapes.read_every_step(full))
    cache, selected = (sum(layer.read for layer in shapes.layer_sizes(case)) for case in (full, selective))
    return {
        "weights": weights,
        "cache": cache,
        "selected": selected,
        "draft": (weights + selected) / (weights + cache),
        "verify": 1.0,
    }


def rows(
    sizes: dict[str, tuple[ModelSpec, str]], selections: Sequence[str], cells: Sequence[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """A row for each model, selection, context and batch.

    Args:
      sizes: of models, with the dtype of weights and cache.
      selections: that draft.
      cells: (context, rows).
    """
    for name, (spec, dtype) in sizes.items():
        longest = max(context for context, _ in cells)
        spec = dataclasses.replace(spec, max_positions=max(spec.max_positions, longest))
        for selection in selections:
            for context, batch in cells:
                one = cost(spec, selection, batch, context, dtype)
                best = {a: best_length(a, one["draft"], one["verify"], MOST) or 1 for a in ACCEPTED}
                gains = {str(a): round(gain(a, k, one["draft"], one["verify"]), 2) for a, k in best.items()}
                where = {"model": name, "draft": selection, "context": context, "rows": batch}
                share = one["cache"] / (one["weights"] + one["cache"])
                yield (
                    where
                    | {"cache_share": share, "d": one["draft"], "v": one["verify"]}
                    | {
                        "gain": gains,
                        "length": {str(a): k for a, k in best.items()},
                    }
                )


def line(row: dict[str, Any]) -> str:
    """A row as text: the gain at each acceptance, behind it the length of draft that reaches it."""
    gains = "  ".join(f"a={a} {x:5.2f} (k={row['length'][a]})" for a, x in row["gain"].items())
    return (
        f"{row['model']:13} {row['draft']:24} {row['context']:7} x {row['rows']:<2} "
        f"KV {row['cache_share']:4.0%}  d={row['d']:.2f}  {gains}"
    )
