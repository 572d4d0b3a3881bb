"""Calibrates LU-KV: what every layer and head keeps at each share of the cache, for one eviction.

python -m train.utility --config configs/ranker/embedded.yaml --eviction snapkv --recent 32 --export FILE

For contexts that a config of traces names (``train.trace_rows``) the model writes an answer under full
attention. A token's utility is the most that it gives to any token of the answer and query head of its group,

  max_k,n  A_kn ||W_o v||_n / sum of all ||W_o v|| of the layer,

with A the attention of the answer's token k (section 3.1 of the paper; the norms' sum stands in the authors'
code only). A head drops tokens in the eviction's order, so the utility that goes with each of them is made
non-increasing in that order (a convex loss). For every share the tokens of least utility go first, over all
layers and heads. The table is the mean over contexts of what each head has dropped.

Of the authors' protocol this has everything but their questions: the config's sequences end in theirs.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import kvjax
from kvjax import decode
from kvjax.algebra import Eviction, Piece, Policy, Replay
from kvjax.budgets.lu_kv import LUKV, SHARES
from kvjax.budgets.overall import Overall
from kvjax.errors import UserError
from kvjax.sharding.mesh import ONE
from kvjax.weights import save_weights
from train import trace_rows
from train.config import ConfigError
from train.ranker import settings as ranker
from train.settings import add_options

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from kvjax.loading import LanguageModel

BLOCK = 16
"""Tokens of an answer whose attention is in memory at a time."""


@dataclasses.dataclass(frozen=True, repr=False)
class Utility(Eviction):
    """The utility of a prompt's tokens for an answer behind it; "oracle importance" in LU-KV's paper."""

    name = "utility"
    needs = frozenset({"k", "v", "wo_norm", "replayed"})
    replays = True

    def replayed(self, piece: Replay) -> Float[Array, "B K T"]:
        rows, heads, t, h = piece.prompt_k.shape
        k = jnp.concatenate([piece.prompt_k, piece.k], axis=2).astype(jnp.float32)
        size = piece.q.shape[2]
        q = piece.q.astype(jnp.float32).reshape(rows, heads, -1, size, h)
        real = jnp.arange(t) < piece.pos[:, :1]  # the answer begins behind the prompt
        best = jnp.zeros((rows, heads, q.shape[2], t))
        for begin in range(0, size, BLOCK):
            at = slice(begin, begin + BLOCK)
            s = jnp.einsum("bkgph,bkch->bkgpc", q[:, :, :, at], k, precision="highest") * h**-0.5
            if piece.softcap is not None:
                s = piece.softcap * jnp.tanh(s / piece.softcap)
            own = (piece.pos[:, None, :] <= piece.pos[:, at, None]) & (piece.pos[:, None, :] >= 0)
            sees = jnp.concatenate([jnp.broadcast_to(real[:, None], (rows, own.shape[1], t)), own], axis=2)
            s = jnp.where(sees[:, None, None], s, -jnp.inf)
            share = jnp.exp(s - s.max(axis=-1, keepdims=True))
            share = (share / share.sum(axis=-1, keepdims=True))[..., :t]
            asks = (piece.pos[:, at] >= 0)[:, None, None, :, None]
            best = jnp.maximum(best, jnp.where(asks, share, 0.0).max(axis=3))
        norm = jnp.where(real[:, None], piece.wo_norm(piece.prompt_v, 2), 0.0)
        norm = norm / norm.sum(axis=(1, 2), keepdims=True)
        return (best * norm.reshape(best.shape)).max(axis=2)


def measured(
    model: LanguageModel, policy: Policy, weights: Any, context: Int[np.ndarray, " T"], answer: list[int]
) -> tuple[Float[np.ndarray, "L K T"], Float[np.ndarray, "L K T"]]:
    """The utility of a context's tokens, and the eviction's scores: inf for the protected."""
    network, params = model.network.at(len(context) + len(answer)), model.params
    ((tokens, *numbers),) = decode.padded_pieces([[Piece(answer, 0, 0)]])
    total, count = (jnp.asarray([n], jnp.int32) for n in (len(context), int(numbers[0][0])))
    none, seeds = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.uint32)
    width = decode.bucket(len(context))
    outer = decode.outer(params)
    x = decode.embed(network, outer, np.zeros(1, np.int32), decode.padded([context], width), ONE)
    y = decode.embed(network, outer, total, tokens, ONE)
    oracle = Policy(eviction=Utility(), budget=Overall())
    utility, scores = [], []
    for call in decode.layer_calls(network, policy, params, weights):
        x, (k, v, score) = decode.rank_layer(network, policy, None, *call[1:], x, total, seeds)
        scores.append(np.asarray(score)[0, :, : len(context)])
        start = jnp.zeros_like(score)
        where = (network, oracle, None, call.block, call.number)
        y, worth = decode.replay_layer(*where, y, k, v, start, total, count, none, none)
        utility.append(np.asarray(worth)[0, :, : len(context)])
    return np.stack(utility), np.stack(scores)


def non_increasing(values: Float[np.ndarray, " T"]) -> Float[np.ndarray, " T"]:
    """The nearest sequence that never rises, in squares: neighbours that rise are given their mean."""
    means: list[float] = []
    sizes: list[int] = []
    for value in values.astype(np.float64):
        means.append(float(value))
        sizes.append(1)
        while len(means) > 1 and means[-2] < means[-1]:
            mean, size = means.pop(), sizes.pop()
            means[-1] = (means[-1] * sizes[-1] + mean * size) / (sizes[-1] + size)
            sizes[-1] += size
    return np.repeat(means, sizes)


def removed(
    utility: Float[np.ndarray, "L K T"], scores: Float[np.ndarray, "L K T"]
) -> Float[np.ndarray, "99 L K"]:
    """The share of each head that has gone when 1, 2, ... 99 % of all tokens have, as far as they may.

    A head keeps its protected tokens, and at least one in a hundred.
    """
    *shape, t = utility.shape
    gains, heads = [], []
    for head, (own, score) in enumerate(zip(utility.reshape(-1, t), scores.reshape(-1, t))):
        free = np.flatnonzero(np.isfinite(score))
        ranked = free[np.argsort(-score[free], kind="stable")]
        stay = max(round(0.01 * t) - (t - len(free)), 0)  # of the best
        gain = non_increasing(own[ranked])[stay:]
        gains.append(gain)
        heads.append(np.full(len(gain), head))
    order = np.lexsort((np.concatenate(heads), np.concatenate(gains)))
    gone = np.concatenate(heads)[order]
    counts = [
        np.bincount(gone[: round(percent / 100 * utility.size)], minlength=len(gains))
        for percent in range(1, SHARES + 1)
    ]
    return np.stack(counts).reshape(-1, *shape) / t


def run(
    settings: ranker.Settings,
    words: str,
    protected: tuple[int, int],
    new: int,
    sources: str | None,
    file: Path,
    dtype: Any,
) -> None:
    """Calibrates a table and writes it.

    Raises:
      ConfigError, ModelError: sliding windows; see ``train.trace_rows``.
      PolicyError, WeightsError: an eviction that cannot be read, or has no weights.
    """
    model, (sinks, recent) = settings.model(), protected
    if any(window is not None for window in model.network.windows):
        raise ConfigError(
            "calibration of a model with sliding-window layers: such a layer takes no eviction. Choose a "
            "model whose layers all attend fully."
        )
    policy = kvjax.policy(f"{words} + overall(0.5) + sinks({sinks}) + recent({recent})")
    if policy.eviction.replays:
        raise ConfigError(
            f"{words} reads a prompt twice, and calibration ranks in one pass. Choose another one."
        )
    weights = kvjax.weights_for(policy, model, sources)
    sequences, total = trace_rows.sequences(settings, model.text), np.zeros(())
    count = settings.recording.sequences
    for index in tqdm(range(count), mininterval=5):
        context = sequences.draw(index)[1]
        if len(context) + new > model.network.max_positions:
            context = context[: model.network.max_positions - new]
        answer = kvjax.generate(
            model,
            "full",
            [context],
            max_new_tokens=new,
            temperature=0.7,
            seed=settings.seed + index,
            stops=(),
        )
        utility, scores = measured(model, policy, weights, context, list(answer.tokens[0]))
        total = total + removed(utility, scores)
    layers = [{"removed": layer} for layer in np.moveaxis(total / count, 0, -1)]
    notes = {"eviction": repr(policy.eviction), "sinks": sinks, "recent": recent, "contexts": count}
    notes |= {"config": settings.name, "seed": settings.seed}
    save_weights(file, model, LUKV(), layers, notes=notes, dtype=dtype)
    print(f"{file} holds the table of lu_kv for {policy.eviction!r}, from {count} contexts")


def main(words: list[str] | None = None) -> int:
    """The command line; its exit code: 0, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m train.utility", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", type=Path, required=True, help="of traces, as configs/ranker/embedded.yaml"
    )
    parser.add_argument("--eviction", required=True, help="in words, as 'expected_attention(floor=0.02)'")
    parser.add_argument("--weights", metavar="SOURCES", help="of an eviction that learns, as PART=FILE")
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that stay (4)")
    parser.add_argument("--recent", type=int, default=1, help="newest tokens that stay (1)")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer (64)")
    parser.add_argument("--export", type=Path, metavar="FILE", required=True, help="written, or replaced")
    add_options(parser)
    args = parser.parse_args(words)
    try:
        settings, protected = ranker.read(args.config, args.model), (args.sinks, args.recent)
        run(settings, args.eviction, protected, args.new, args.weights, args.export, args.export_dtype)
    except UserError as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
