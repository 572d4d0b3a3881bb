"""Batches of traces, agents along one axis: the tokens to rank, the queries behind them, input statistics.

Batch i depends on the seed and i alone, so a resumed run reads what it would have read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import grain.python as grain
import numpy as np

from kvjax.types import EMPTY
from train.ranker import baselines
from train.ranker.settings import Agent, Settings
from train.trace_file import TraceError, Traces

if TYPE_CHECKING:
    from jaxtyping import Int

SAMPLED = 32
"""Sequences that ``statistics`` reads."""


def stored_arrays(agent: Agent) -> tuple[str, ...]:
    """The arrays of traces that training reads; keys after RoPE always, to compute attention."""
    return ("q", "at", "k", "v", *(("k_pre",) if "w_key_pre" in agent.inputs else ()))


def check_traces(traces: Traces, settings: Settings) -> None:
    """Refuses traces from which the config's agents cannot learn.

    Raises:
      ConfigError: sequences that are too short, missing keys, no sequences to train or to check on.
    """
    if "w_key_pre" in settings.agent.inputs and "pre" not in traces.manifest.keys:
        raise TraceError(
            f"{traces.folder} stores no keys before RoPE, which agent.inputs key_pre reads. Make traces with "
            "traces.keys: [post, pre]."
        )
    settings.check_length(min(traces.manifest.lengths))
    for held, purpose in ((False, "train"), (True, "check")):
        if not len(used(traces, settings, held=held)):
            kinds = f" of {', '.join(settings.only)}" if settings.only else ""
            raise TraceError(
                f"{traces.folder} has no sequences{kinds} to {purpose} on. Make traces with traces."
                f"{'held' if held else 'sequences'}{' and these in traces.data.mix' if kinds else ''}."
            )


def used(traces: Traces, settings: Settings, *, held: bool) -> Int[np.ndarray, " S"]:
    """The sequences of the config's kinds, of the held-out or the training split."""
    manifest = traces.manifest
    split = range(manifest.train, len(manifest.lengths)) if held else range(manifest.train)
    if not settings.only:
        return np.asarray(split)
    tasks = traces.tasks()
    return np.asarray([i for i in split if kind(tasks[i]) in settings.only], int)


def kind(task: str) -> str:
    """The kind of a sequence with that task."""
    return task.partition("/")[0]


def assembled(
    traces: Traces,
    settings: Settings,
    chosen: Sequence[tuple[int, int]],
    rng: np.random.Generator,
    *,
    window: int = 0,
) -> dict[str, np.ndarray]:
    """A batch of sequences of one length.

    Args:
      traces: where they are.
      settings: agents and future queries.
      chosen: (sequence, how many of its tokens are in the cache).
      rng: draws the future queries.
      window: adds the cache's last queries, this many, if the traces store them all.

    Returns:
      ``k``, ``v`` (and ``k_pre``) [B, A, T, H], ``q`` [B, A, G, F, H] at positions ``at`` [B, F] behind
      the cache, EMPTY where there are fewer, ``size`` [B], a ``seed``; ``seen`` [B, A, G, window, H].
    """
    manifest, count, head_dim = traces.manifest, settings.method.queries, traces.manifest.head_dim
    agents, groups = manifest.layers * manifest.kv_heads, manifest.heads // manifest.kv_heads
    rows: dict[str, list[np.ndarray]] = {}
    for index, size in chosen:
        trace = traces.read(index, stored_arrays(settings.agent))
        later = np.flatnonzero(trace["at"] >= size)
        later = np.sort(rng.choice(later, min(count, len(later)), replace=False))
        at = np.full(count, EMPTY, np.int32)
        at[: len(later)] = trace["at"][later]
        q = np.zeros((manifest.layers, manifest.heads, count, head_dim), trace["q"].dtype)
        q[:, :, : len(later)] = trace["q"][:, :, later]
        row = {"q": q.reshape(agents, groups, count, head_dim), "at": at}
        last = np.flatnonzero((trace["at"] >= size - window) & (trace["at"] < size))
        if window and len(last) == window:
            row["seen"] = trace["q"][:, :, last].reshape(agents, groups, window, head_dim)
        flat = (agents, manifest.lengths[index], head_dim)
        row |= {name: trace[name].reshape(flat) for name in trace if name not in ("q", "at")}
        for name, value in row.items():
            rows.setdefault(name, []).append(value)
    batch = {name: np.stack(values) for name, values in rows.items()}
    batch["size"] = np.asarray([size for _, size in chosen], np.int32)
    return batch | {"seed": np.asarray(rng.integers(2**32), np.uint32)}


def cache_size(rng: np.random.Generator, settings: Settings, length: int) -> int:
    """Tokens in the cache: at least two to rank, and a future behind them."""
    agent = settings.agent
    least = agent.sinks + agent.recent + 2
    return int(rng.integers(least, length - settings.method.least_future + 1))


class Batches:
    """Random-access source of training batches (a grain source)."""

    def __init__(self, traces: Traces, settings: Settings):
        self.traces, self.settings = traces, settings
        self.used = used(traces, settings, held=False)
        self.lengths = np.asarray(traces.manifest.lengths)[self.used]

    def __len__(self) -> int:
        return self.settings.plan.steps

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((self.settings.seed, 2, int(index)))
        length = int(rng.choice(self.lengths))
        drawn = rng.choice(self.used[self.lengths == length], self.settings.method.rows)
        chosen = [(int(i), cache_size(rng, self.settings, length)) for i in drawn]
        return assembled(self.traces, self.settings, chosen, rng)


def batches(traces: Traces, settings: Settings) -> grain.MapDataset:
    """The batches as a grain dataset."""
    return grain.MapDataset.source(Batches(traces, settings))


def held(traces: Traces, settings: Settings) -> Iterator[dict[str, np.ndarray]]:
    """Every held-out sequence once, one a batch, with the cache's last queries."""
    for index in used(traces, settings, held=True).tolist():
        rng = np.random.default_rng((settings.seed, 3, index))
        size = cache_size(rng, settings, traces.manifest.lengths[index])
        yield assembled(traces, settings, [(index, size)], rng, window=baselines.WINDOW)


def statistics(traces: Traces, settings: Settings) -> dict[str, dict[str, Any]]:
    """Mean and standard deviation of every input channel, by agent, over some training sequences."""
    manifest, agent, usable = traces.manifest, settings.agent, used(traces, settings, held=False)
    if not agent.standardise:
        return {}
    chosen = usable[np.unique(np.linspace(0, len(usable) - 1, min(SAMPLED, len(usable))).round().astype(int))]
    agents = manifest.layers * manifest.kv_heads
    names = [name for name in stored_arrays(agent) if name not in ("q", "at")]
    sums: dict[str, np.ndarray] = {}
    for index in chosen:
        length = manifest.lengths[index]
        at = np.broadcast_to(np.arange(length, dtype=float)[:, None], (agents, length, 1))
        trace = traces.read(int(index), names)
        float64 = {name: x.reshape(agents, length, -1).astype(float) for name, x in trace.items()}
        key = float64["k"]
        inputs = {"w_key": key, "w_key_pre": float64.get("k_pre", key), "w_value": float64["v"]}
        inputs |= {"w_log": np.log2(1 + at) / 16, "w_linear": at / 4096}
        for name in agent.inputs:
            x = inputs[name][:, agent.sinks :]
            moments = np.stack([np.full(x.shape[::2], float(x.shape[1])), x.sum(axis=1), (x**2).sum(axis=1)])
            sums[name] = sums.get(name, 0.0) + moments
    result = {}
    for name, (number, total, squares) in sums.items():
        mean = total / number
        spread = np.sqrt(np.maximum(squares / number - mean**2, 0.0))
        scale = np.where(spread > 1e-6, spread, 1.0)
        result[name] = {"mean": mean.astype(np.float32), "scale": scale.astype(np.float32)}
    return result
