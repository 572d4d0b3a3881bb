"""Which heads φ helps, and by how much: attention's output on held-out traces, with and without it.

Of each query head, means over queries behind the prompt: the entropy of its attention inside the prompt's
middle (over that of the uniform one), the share of that attention which the best tokens hold, and the
relative L1 error of its output where so many of them are read and the rest is left out, or φ stands for it;
besides the L2 error after the head's part of the output projection W_o, which is what the model is given.

Hoshi, Miyashita and Deguchi, Top-K Retrieval with Fixed-Size Linear-Attention Completion, appendix M,
https://arxiv.org/abs/2604.05438
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import reads
from kvjax.eval.report import stats
from kvjax.policies.phi import Phi
from kvjax.types import Params
from kvjax.weights import load_weights
from train.phi import batches, dropped
from train.phi.objective import Task, errors, outputs, projected, projection, scored
from train.phi.settings import Settings
from train.trace_file import Traces

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from kvjax.loading import LanguageModel

COUNTS = (0, 2, 5, 10, 20, 40, 80, 160, 320)
"""Tokens of the middle that are read."""

DOTS = 400
"""Pairs of scores of each head that is drawn."""

Found = dict[str, Any]


def look(task: Task, maps: Params, batch: dict[str, Array]) -> dict[str, Float[Array, "... A G"]]:
    """Of one sequence: ``entropy``, ``share`` (of φ in the whole mass) and, by count, ``mass``, ``alone`` and
    ``completed``, these two also after W_o (``batch["wo"]`` [A, G, H, D]): ``alone_wo``, ``completed_wo``;
    besides ``scores`` and ``guess`` of the middle of a head's first query [A, G, T], NaN elsewhere."""
    x = scored(task, maps, batch)
    p = jax.nn.softmax(jnp.where(x.inside, x.scores, -1e30), axis=-1)
    nats = -jnp.where(x.inside, p * jnp.log(jnp.maximum(p, 1e-30)), 0.0).sum(axis=-1)
    alone, completed = errors(x, batch["v"], COUNTS)
    out = outputs(x, batch["v"], COUNTS)
    left = x.inside & (x.order >= task.visits)
    whole = jnp.where(left, x.guess, jnp.where(x.seen, x.scores, -jnp.inf))
    share = jnp.where(left, jax.nn.softmax(whole, axis=-1), 0.0).sum(axis=-1)
    values = {
        "entropy": nats / jnp.log(jnp.maximum(x.inside.sum(axis=-1), 2)),
        "share": share,
        "mass": jnp.stack([jnp.where(x.order < c, p, 0.0).sum(axis=-1) for c in COUNTS]),
        "alone": alone,
        "completed": completed,
        "alone_wo": projected(out.alone, batch["wo"]),
        "completed_wo": projected(out.completed, batch["wo"]),
    }
    means = {name: value.mean(axis=-1)[..., 0, :, :] for name, value in values.items()}
    dots = {"scores": x.scores, "guess": x.guess}
    return means | {n: jnp.where(x.inside, s, jnp.nan)[0, :, :, 0] for n, s in dots.items()}


def measure(settings: Settings, model: LanguageModel, file: Path) -> Found:
    """Every held-out sequence of a config through the maps of a file.

    Raises:
      TraceError: no traces, or of another model.
      WeightsError: no maps of this model.
    """
    traces = Traces.open(settings.base.recording.folder)
    traces.check_model(model, settings.base.source)
    layers = load_weights(file, model).layers
    maps = {n: jnp.concatenate([layer[n] for layer in layers]) for n in layers[0] if n != "length"}
    about, verdicts = traces.manifest, settings.base.folder / dropped.FOLDER
    if settings.policy is not None:
        dropped.prepare(settings, traces, model, verdicts, batches.usable(traces, settings)[1])
    task = Task(loss=settings.loss, target=settings.target, prompt=settings.prompt, softcap=about.softcap)
    measured = jax.jit(functools.partial(look, task))
    wo = projection(model.params["layers"], model.spec.num_kv_heads)
    held = batches.held(traces, settings, verdicts)
    seen = [jax.device_get(measured(maps, {**one, "wo": wo})) for one in held]
    names = ("entropy", "share", "mass", "alone", "completed", "alone_wo", "completed_wo")
    each = {n: np.stack([one[n] for one in seen]) for n in names}
    flat = {n: x.reshape(*x.shape[:-2], -1) for n, x in each.items()}  # heads last: [sequence, (count,) head]
    features = Phi(layers[0]["last_k"].shape[-1]).features
    ends = 0 if settings.policy is not None else settings.target.sinks + settings.target.tail
    return {
        "study": "heads",
        "prompt": settings.prompt,
        "for": settings.target.policy or "the prompt's middle",
        "maps": file.name,
        "sequences": len(seen),
        "layers": about.layers,
        "heads": about.heads,
        "counts": list(COUNTS),
        "ends": ends,
        "summary": reads.summary(features, about.head_dim),
        "silent": [int(head) for head in np.flatnonzero(_silent(layers))],
        "by_head": {n: x.mean(axis=0).tolist() for n, x in flat.items()},
        "after_wo": {n: together(flat[f"{n}_wo"]) for n in ("alone", "completed")},
        "quartiles": quartiles(flat),
        "correlation": _correlation(flat),
        "fewer": fewer(flat),
        "dots": _dots(flat["entropy"].mean(axis=0), seen),
    }


def together(errors: Float[np.ndarray, "S C N"]) -> list[float]:
    """By count: the root of the summed squares of all heads' mean errors."""
    return [float(x) for x in np.sqrt((errors.mean(axis=0) ** 2).sum(axis=-1))]


def _silent(layers: Sequence[Params]) -> np.ndarray:
    """Which query heads of all layers have no φ; nothing where maps are symmetric."""
    biases = [np.asarray(layer["last_q"]) for layer in layers if "last_q" in layer]
    return np.asarray(np.isneginf(np.concatenate(biases)).all(axis=-1)) if biases else np.zeros(0, bool)


def quartiles(flat: dict[str, np.ndarray]) -> list[Found]:
    """Heads by their entropy, the lowest quarter first: mean errors by count, and what φ gains of them."""
    order = np.argsort(flat["entropy"].mean(axis=0))
    entries = []
    for heads in np.array_split(order, 4):
        alone, completed = (flat[n][..., heads].mean(axis=-1) for n in ("alone", "completed"))  # [S, C]
        gains = [stats.difference(a, b) for a, b in zip(alone.T.tolist(), completed.T.tolist())]
        entries.append(
            {
                "entropy": [float(flat["entropy"].mean(axis=0)[heads[at]]) for at in (0, -1)],
                "heads": len(heads),
                "alone": alone.mean(axis=0).tolist(),
                "completed": completed.mean(axis=0).tolist(),
                "gain": [list(one) for one in gains],
                "helped": _helped(flat, heads),
            }
        )
    return entries


def _helped(flat: dict[str, np.ndarray], heads: np.ndarray) -> list[float]:
    """Share of heads whose mean error φ lowers, by count."""
    gain = (flat["alone"] - flat["completed"])[..., heads].mean(axis=0)
    return [float(x) for x in (gain > 0).mean(axis=-1)]


def _correlation(flat: dict[str, np.ndarray]) -> list[float]:
    """Of a head's entropy with φ's gain, by ranks (Spearman), by count."""
    entropy, gain = flat["entropy"].mean(axis=0), (flat["alone"] - flat["completed"]).mean(axis=0)

    def ranks(x: np.ndarray) -> np.ndarray:
        return np.argsort(np.argsort(x))

    return [float(np.corrcoef(ranks(entropy), ranks(one))[0, 1]) for one in gain]


def fewer(flat: dict[str, np.ndarray]) -> list[Found]:
    """How many tokens φ reads where selection alone reads so many, at the same mean error of all heads.

    Between measured counts the error is taken as linear; ``completed`` is 0 where φ alone errs less, and None
    where it errs more at every count.
    """
    alone, completed = (flat[n].mean(axis=(0, 2)) for n in ("alone", "completed"))
    entries = []
    for count, error in list(zip(COUNTS, alone))[1:]:
        below = np.flatnonzero(completed <= error)
        if len(below) == 0:
            needed = None
        elif below[0] == 0:
            needed = 0.0
        else:
            high = int(below[0])
            pair, ends = completed[[high, high - 1]], (COUNTS[high], COUNTS[high - 1])
            needed = float(np.interp(error, pair, ends))
        entries.append({"alone": count, "error": float(error), "completed": needed})
    return entries


def _dots(entropy: np.ndarray, seen: list[dict[str, np.ndarray]]) -> list[Found]:
    """Scores and φ's guesses of them for the heads of least, median and greatest entropy, unless silent."""
    order, entries = np.argsort(entropy), []
    for head in (order[0], order[len(order) // 2], order[-1]):
        pairs = []
        for one in seen:
            s, guess = (one[n].reshape(-1, one[n].shape[-1])[head] for n in ("scores", "guess"))
            pairs.append(np.stack([s, guess], axis=-1)[np.isfinite(s) & np.isfinite(guess)])
        every = np.concatenate(pairs)
        some = every[np.random.default_rng(0).permutation(len(every))[:DOTS]]
        entries.append({"head": int(head), "entropy": float(entropy[head]), "pairs": some.tolist()})
    return entries
