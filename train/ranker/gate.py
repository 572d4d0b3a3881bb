"""Leaves KV heads to chance that attend to many tokens: their gates, in a file of rankers.

python -m train.ranker.gate --config configs/ranker/embedded.yaml --file default.safetensors

A ranking keeps the tokens of most attention. Where a head attends to many tokens, these are a biased sample
of what it averages, and a random choice is not. The trained cost does not see it: by the attention that is
evicted, a ranking is better than chance in such heads, too.

Heads are judged on held-out sequences that come after those of the traces, so that neither checks nor
studies read the same ones. The file then says in a leaf ``gate`` which heads are ranked. ``--by error``
leaves those to chance whose output the ranking disturbs more than a random choice; results/kvp/gates.md
compares.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kvjax import cli
from kvjax.policies import kvp
from kvjax.types import Params
from kvjax.weights import load_weights, save_weights
from train import trace_rows
from train.phi.objective import projection
from train.ranker import batches, rankings
from train.ranker.objective import Task, candidates, ranked
from train.ranker.settings import Settings, read
from train.traces import describe, trace

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

    from kvjax.loading import LanguageModel

ENTROPY = 1.1
"""Nats: a head that attends to more than about three tokens is left to chance."""

SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Budgets of output errors, as shares of the ranked tokens."""

SEQUENCES = 64


def sequences(settings: Settings, model: LanguageModel, count: int) -> Iterator[dict[str, np.ndarray]]:
    """Newly traced batches of one sequence each (``batches.assembled``), of the config's kinds."""
    recording = settings.recording
    manifest, drawn = describe(settings, model), trace_rows.sequences(settings, model.text)
    shape = manifest.layers * manifest.kv_heads, -1, manifest.head_dim
    index, found = recording.sequences + recording.held, 0
    while found < count:
        task, tokens = drawn.draw(index)
        rng, index = np.random.default_rng((settings.seed, 4, index)), index + 1
        if settings.only and batches.kind(task) not in settings.only:
            continue
        found += 1
        size, seen = batches.cache_size(rng, settings, len(tokens)), trace(model, manifest, tokens)
        later = np.flatnonzero(seen["at"] >= size)
        later = np.sort(rng.choice(later, min(settings.method.queries, len(later)), replace=False))
        q = seen["q"][:, :, later].reshape(shape[0], -1, len(later), manifest.head_dim)
        flat = {name: seen[name].reshape(shape) for name in ("k", "v", "k_pre") if name in seen}
        batch = flat | {"q": q, "at": seen["at"][later], "size": np.asarray(size, np.int32)}
        yield {name: value[None] for name, value in (batch | {"seed": np.asarray(index, np.uint32)}).items()}


def _attention_scores(task: Task, batch: dict[str, Array]) -> Float[Array, "A G F T"]:
    """Scores of the future queries, -inf where a key comes later."""
    k, q = (batch[name][0].astype(jnp.float32) for name in ("k", "q"))
    s = jnp.einsum("agfh,ath->agft", q, k) * q.shape[-1] ** -0.5
    s = s if task.softcap is None else task.softcap * jnp.tanh(s / task.softcap)
    return jnp.where(jnp.arange(k.shape[1]) <= batch["at"][0][:, None], s, -jnp.inf)


def errors(
    task: Task, batch: dict[str, Array], score_of: Mapping[str, Float[Array, "1 A T"]], wo: Array
) -> dict[str, Float[Array, " A"]]:
    """By ranking: squared error of a KV head's output after W_o, mean over queries and ``SHARES``.

    Args:
      task: which tokens are protected.
      batch: of ``sequences``.
      score_of: by name.
      wo: [A, G, H, D].
    """
    s, v = _attention_scores(task, batch), batch["v"][0].astype(jnp.float32)
    is_ranked = jnp.broadcast_to(candidates(task.agent, batch)[0], v.shape[:2])

    def output(kept: Bool[Array, "A T"]) -> Float[Array, "A G F H"]:
        weight = jax.nn.softmax(jnp.where(kept[:, None, None], s, -jnp.inf), axis=-1)
        return jnp.einsum("agft,ath->agfh", weight, v)

    whole = output(jnp.ones_like(is_ranked))

    def error(kept: Bool[Array, "A T"]) -> Float[Array, " A"]:
        moved = jnp.einsum("agfh,aghd->afd", output(kept) - whole, wo)
        return (moved**2).sum(axis=-1).mean(axis=-1)

    def of(score: Float[Array, "A T"]) -> Float[Array, " A"]:
        rank = jnp.argsort(rankings.best(score, is_ranked), axis=-1)
        slots = jnp.floor(jnp.asarray(SHARES)[:, None, None] * is_ranked.sum(axis=-1)[:, None] + 0.5)
        return jax.lax.map(error, ~is_ranked | (rank < slots)).mean(axis=0)

    return {name: of(score[0]) for name, score in score_of.items()}


@functools.partial(jax.jit, static_argnums=0)
def signals(task: Task, agents: Params, batch: dict[str, Array], wo: Array) -> dict[str, Float[Array, " A"]]:
    """Of each head on one sequence.

    ``entropy`` of attention at the future queries in nats, mean over queries and the group; ``cost``, that of
    the training, over all budgets, 1/2 for a random choice; ``learned`` and ``random``, their ``errors``.
    """
    k, v, q = (batch[name] for name in ("k", "v", "q"))
    log = jax.nn.log_softmax(_attention_scores(task, batch), axis=-1)
    entropy = -jnp.where(log > -jnp.inf, jnp.exp(log) * log, 0.0).sum(axis=-1)
    score = kvp.scores(agents, k, batch.get("k_pre"), v, jnp.arange(k.shape[2])[None])
    worth, is_ranked = ranked(task, batch)
    cost = rankings.area(worth, rankings.best(score, is_ranked), is_ranked.sum(axis=-1))
    chance = jax.random.uniform(jax.random.key(batch["seed"][0]), score.shape)
    error = errors(task, batch, {"learned": score, "random": chance}, wo)
    return {"entropy": entropy.mean(axis=(1, 2)), "cost": cost[0]} | error


def measured(
    settings: Settings, model: LanguageModel, layers: list[Params], count: int
) -> dict[str, Float[np.ndarray, "L K"]]:
    """Means of ``signals`` over ``count`` sequences; ``error`` is the ranking's over that of a random choice.

    Raises:
      ConfigError: see ``train.traces.describe`` and ``train.trace_rows``.
    """
    task = Task(agent=settings.agent, method=settings.method, softcap=model.spec.attn_softcap)
    agents = {name: jnp.concatenate([layer[name] for layer in layers]) for name in layers[0]}
    wo = projection(model.params["layers"], model.spec.num_kv_heads)
    bar = tqdm(sequences(settings, model, count), total=count, unit="sequence", mininterval=5)
    rows = [jax.device_get(signals(task, agents, batch, wo)) for batch in bar]
    mean = {name: np.mean([row[name] for row in rows], axis=0).reshape(len(layers), -1) for name in rows[0]}
    return mean | {"error": mean["learned"] / mean["random"]}


CRITERIA: dict[str, Callable[[Mapping[str, Any]], Bool[np.ndarray, "L K"]]] = {
    "entropy": lambda heads: heads["entropy"] <= ENTROPY,
    "error": lambda heads: heads["error"] <= 1,
}
"""From ``measured`` to the heads that are ranked."""


def with_gate(layers: list[Params], on: Bool[np.ndarray, "L K"]) -> list[Params]:
    """The rankers with the other heads left to chance."""
    return [layer | {kvp.GATE: heads.astype(np.float32)} for layer, heads in zip(layers, on, strict=True)]


def bare(layers: list[Params]) -> list[Params]:
    """The rankers without gates."""
    return [{name: x for name, x in layer.items() if name != kvp.GATE} for layer in layers]


def run(settings: Settings, file: Path, out: Path, by: str) -> None:
    """Writes the file of rankers with gates by one of ``CRITERIA``.

    Raises:
      UserError: a file that does not fit, or see ``measured``.
    """
    model = settings.model()
    learned = load_weights(file, model)
    layers = bare(learned.layers)
    heads = measured(settings, model, layers, SEQUENCES)
    for layer, values in enumerate(heads[by]):
        print(f"layer {layer}, {by}: {' '.join(f'{x:.2f}' for x in values)}")
    on = CRITERIA[by](heads)
    off = " ".join(f"{layer}.{head}" for layer, head in np.argwhere(~on)) or "none"
    part = kvp.LearnedRanker(settings.agent.sinks, settings.agent.recent)
    notes = learned.notes | {"chance": off, "chance_by": f"{by}, {SEQUENCES} sequences"}
    save_weights(out, model, part, with_gate(layers, on), notes=notes)
    print(f"{out} leaves to chance: {off}")


def main(words: Sequence[str] | None = None) -> int:
    """The command line; its exit code: 0, 2 for bad input."""
    return cli.run(_command, words)


def _command(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m train.ranker.gate", description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="of the rankers")
    parser.add_argument("--variant", metavar="NAME", help="of the config's variants")
    parser.add_argument("--file", type=Path, required=True, help="of rankers, gated or not")
    parser.add_argument("--out", type=Path, help="where the gated ones go (default: in place)")
    parser.add_argument("--by", choices=list(CRITERIA), default="entropy", help="default: entropy")
    args = parser.parse_args(words)
    run(read(args.config, variant=args.variant), args.file, args.out or args.file, args.by)


if __name__ == "__main__":
    cli.start(main)
