"""Batches of traces, agents along one axis: what is ranked, what came after it, statistics of the inputs.

Batch i is a pure function of (seed, i), as in ``train.data``, so a resumed run sees what it would have seen.
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
"""Sequences of which statistics are made."""


def names(agent: Agent) -> tuple[str, ...]:
    """The arrays that are read for training: keys after RoPE give the attention in any case."""
    return ("q", "at", "k", "v", *(("k_pre",) if "w_key_pre" in agent.inputs else ()))


def check_traces(traces: Traces, settings: Settings) -> None:
    """Refuses traces from which the config's agents cannot learn.

    Raises:
      ConfigError: sequences that are too short, keys that are not there, nothing to check on.
    """
    if "w_key_pre" in settings.agent.inputs and "pre" not in traces.about.keys:
        raise TraceError(
            f"{traces.folder} stores no keys before RoPE, which agent.inputs key_pre reads. Make traces with "
            "traces.keys: [post, pre]."
        )
    settings.check_length(min(traces.about.lengths))
    for held, what in ((False, "train"), (True, "check")):
        if not len(used(traces, settings, held=held)):
            kinds = f" of {', '.join(settings.only)}" if settings.only else ""
            raise TraceError(
                f"{traces.folder} has no sequences{kinds} to {what} on. Make traces with traces."
                f"{'held' if held else 'sequences'}{' and these in traces.data.mix' if kinds else ''}."
            )


def used(traces: Traces, settings: Settings, *, held: bool) -> Int[np.ndarray, " S"]:
    """Sequences of the kinds that are asked for, of the held-out split or of the other."""
    about = traces.about
    split = range(about.train, len(about.lengths)) if held else range(about.train)
    if not settings.only:
        return np.asarray(split)
    tasks = traces.tasks()
    return np.asarray([i for i in split if kind(tasks[i]) in settings.only], int)


def kind(task: str) -> str:
    """Of a sequence, by its task."""
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
      window: give the cache's last queries too, so many, where the traces store them all.

    Returns:
      ``k``, ``v`` (and ``k_pre``) [B, A, T, H], ``q`` [B, A, G, F, H] at positions ``at`` [B, F] behind
      the cache, EMPTY where there are fewer, ``size`` [B], a ``seed``; ``seen`` [B, A, G, window, H].
    """
    about, count = traces.about, settings.method.queries
    agents, groups = about.layers * about.kv_heads, about.heads // about.kv_heads
    rows: dict[str, list[np.ndarray]] = {}
    for index, size in chosen:
        found = traces.read(index, names(settings.agent))
        later = np.flatnonzero(found["at"] >= size)
        later = np.sort(rng.choice(later, min(count, len(later)), replace=False))
        at = np.full(count, EMPTY, np.int32)
        at[: len(later)] = found["at"][later]
        q = np.zeros((about.layers, about.heads, count, about.head_dim), found["q"].dtype)
        q[:, :, : len(later)] = found["q"][:, :, later]
        row = {"q": q.reshape(agents, groups, count, about.head_dim), "at": at}
        last = np.flatnonzero((found["at"] >= size - window) & (found["at"] < size))
        if window and len(last) == window:
            row["seen"] = found["q"][:, :, last].reshape(agents, groups, window, about.head_dim)
        flat = (agents, about.lengths[index], about.head_dim)
        row |= {name: found[name].reshape(flat) for name in found if name not in ("q", "at")}
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
        self.lengths = np.asarray(traces.about.lengths)[self.used]

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
    """Every held-out sequence once, one a batch, cut where its number says, with the cache's last queries."""
    for index in used(traces, settings, held=True).tolist():
        rng = np.random.default_rng((settings.seed, 3, index))
        size = cache_size(rng, settings, traces.about.lengths[index])
        yield assembled(traces, settings, [(index, size)], rng, window=baselines.WINDOW)


def statistics(traces: Traces, settings: Settings) -> dict[str, dict[str, Any]]:
    """Mean and standard deviation of every input channel, by agent, over some training sequences."""
    about, agent, there = traces.about, settings.agent, used(traces, settings, held=False)
    if not agent.standardise:
        return {}
    chosen = there[np.unique(np.linspace(0, len(there) - 1, min(SAMPLED, len(there))).round().astype(int))]
    agents = about.layers * about.kv_heads
    sums: dict[str, np.ndarray] = {}
    for index in chosen:
        length = about.lengths[index]
        at = np.broadcast_to(np.arange(length, dtype=float)[:, None], (agents, length, 1))
        read = traces.read(int(index), [name for name in names(agent) if name not in ("q", "at")])
        wide = {name: x.reshape(agents, length, -1).astype(float) for name, x in read.items()}
        given = {"w_key": wide["k"], "w_key_pre": wide.get("k_pre", wide["k"]), "w_value": wide["v"]}
        given |= {"w_log": np.log2(1 + at) / 16, "w_linear": at / 4096}
        for name in agent.inputs:
            x = given[name][:, agent.sinks :]
            found = np.stack([np.full(x.shape[::2], float(x.shape[1])), x.sum(axis=1), (x**2).sum(axis=1)])
            sums[name] = sums.get(name, 0.0) + found
    made = {}
    for name, (number, total, squares) in sums.items():
        mean = total / number
        spread = np.sqrt(np.maximum(squares / number - mean**2, 0.0))
        scale = np.where(spread > 1e-6, spread, 1.0)
        made[name] = {"mean": mean.astype(np.float32), "scale": scale.astype(np.float32)}
    return made
