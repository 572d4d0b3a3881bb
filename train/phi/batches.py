"""Batches of traces for φ maps: a prompt, and queries that come behind it.

Batch i depends on the seed and i alone, so a resumed run reads what it would have read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grain.python as grain
import numpy as np

from train.phi import dropped
from train.phi.settings import Settings
from train.trace_file import Manifest, TraceError, Traces

if TYPE_CHECKING:
    from jaxtyping import Bool


def usable(traces: Traces, settings: Settings) -> tuple[list[int], list[int]]:
    """Sequences to train and to check on: those that reach far enough behind the prompt.

    Raises:
      TraceError: none to train or none to check on.
    """
    manifest = traces.manifest

    def has_queries(length: int) -> bool:
        at = manifest.query_positions(length)
        return length >= settings.tokens and bool(((at >= settings.prompt) & (at < settings.tokens)).any())

    long = [i for i, n in enumerate(manifest.lengths) if has_queries(n)]
    train, held = [i for i in long if i < manifest.train], [i for i in long if i >= manifest.train]
    if not train or not held:
        raise TraceError(
            f"{traces.folder} has {len(train)} sequences to train and {len(held)} to check on with queries "
            f"among the {settings.target.reach} tokens behind a prompt of {settings.prompt}. Make traces "
            f"with traces.lengths of {settings.tokens} or more, and traces.held."
        )
    return train, held


def assembled(
    traces: Traces, settings: Settings, folder: Path, chosen: Sequence[int], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """A batch of sequences.

    Args:
      traces: where they are.
      settings: prompt, queries and policy.
      folder: of ``dropped``.
      chosen: sequences.
      rng: draws the queries.

    Returns:
      ``k`` and ``v`` [B, A, T, H], T = ``settings.tokens``; ``q`` [B, A, G, Q, H] at positions ``at`` [B, Q];
      ``dropped`` [B, A, T] for the tokens of a policy.
    """
    rows = []
    for index in chosen:
        lost = None if settings.policy is None else dropped.read(folder, index)
        trace = traces.read(index, ("q", "at", "k", "v"))
        rows.append(of_sequence(traces.manifest, settings, trace, lost, rng))
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def of_sequence(
    manifest: Manifest,
    settings: Settings,
    trace: Mapping[str, np.ndarray],
    lost: Bool[np.ndarray, "L K N"] | None,
    rng: np.random.Generator,
) -> dict[str, np.ndarray]:
    """One sequence's part of ``assembled``, without the axis of rows.

    Args:
      manifest: sizes of the model.
      settings: prompt, queries and policy.
      trace: of the sequence.
      lost: tokens of the prompt that the policy drops, if there is one.
      rng: draws the queries.
    """
    heads, groups = manifest.layers * manifest.kv_heads, manifest.heads // manifest.kv_heads
    count, head_dim = settings.target.queries, manifest.head_dim
    later = np.flatnonzero((trace["at"] >= settings.prompt) & (trace["at"] < settings.tokens))
    drawn = np.sort(rng.choice(later, count, replace=len(later) < count))
    q = trace["q"][:, :, drawn].reshape(heads, groups, count, head_dim)
    row = {"q": q, "at": trace["at"][drawn].astype(np.int32)}
    for name in ("k", "v"):
        row[name] = trace[name].reshape(heads, -1, head_dim)[:, : settings.tokens]
    if lost is not None:
        lost = lost.reshape(heads, -1)[:, : settings.prompt]
        row["dropped"] = np.pad(lost, ((0, 0), (0, settings.target.reach)))
    return row


class Batches:
    """Random-access source of training batches (a grain source)."""

    def __init__(self, traces: Traces, settings: Settings, folder: Path):
        self.traces, self.settings, self.folder = traces, settings, folder
        self.train, _ = usable(traces, settings)

    def __len__(self) -> int:
        return self.settings.base.plan.steps

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((self.settings.base.seed, 5, int(index)))
        chosen = [int(i) for i in rng.choice(self.train, self.settings.target.rows)]
        return assembled(self.traces, self.settings, self.folder, chosen, rng)


def batches(traces: Traces, settings: Settings, folder: Path) -> grain.MapDataset:
    """The batches as a grain dataset."""
    return grain.MapDataset.source(Batches(traces, settings, folder))


def held(traces: Traces, settings: Settings, folder: Path) -> Iterator[dict[str, np.ndarray]]:
    """Every held-out sequence once, one a batch."""
    for index in usable(traces, settings)[1]:
        rng = np.random.default_rng((settings.base.seed, 6, index))
        yield assembled(traces, settings, folder, [index], rng)
