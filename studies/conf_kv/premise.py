"""CONF-KV's premise: the surer a model is of its next token, the less it would miss the recent past.

At every step of real text: the confidence of the full cache's logits, and how far the next-token
distribution moves, KL(full || cut), when some tokens before the current one are taken out of the cache for
this step alone: the newest ones, as in the paper, or all but those, which is what an eviction really takes.
All steps of a window are done at once: one stream of activations reads everything, and a second one reads
the keys and values of the first, less those tokens, and its own.

Li, Miao: CONF-KV: Confidence-Aware KV Cache Eviction with Mixed-Precision Storage for Long-Horizon LLM
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode
from kvjax.budgets.confidence import Confidence
from kvjax.eval.tasks.sample import Samples
from kvjax.types import Heads, Network, Params, Weighted
from studies.conf_kv import signal

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

PARTS = {"entropy": (1.0, 0.0, 0.0), "margin": (0.0, 1.0, 0.0), "best": (0.0, 0.0, 1.0)}
"""The three quantities that confidence mixes, as the weights that pick each of them out."""

SHIFTS = ("recent", "older")
"""What is taken out: the newest tokens before the current one, or all others."""

BINS = 10
ROWS = 4
"""Windows read together: their logits are held at once."""

THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""The share of sure steps is given for each."""


def mixed(x: Heads, k: Array, v: Array, seen: Bool[Array, "T S"]) -> Float[Array, "B T N H"]:
    """Dense attention of x's queries over S keys; float32 inside."""
    b, t, n, h = x.q.shape
    q = x.q.reshape(b, t, k.shape[2], -1, h)
    s = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * h**-0.5
    s = s if x.softcap is None else x.softcap * jnp.tanh(s / x.softcap)
    p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bskh->btkgh", p, v.astype(jnp.float32)).reshape(b, t, n, h)


@functools.partial(jax.jit, static_argnames=("network", "first"))
def steps(
    network: Network, params: Params, tokens: Int[Array, "B T"], first: int, cut: Int[Array, " 2"]
) -> tuple[Float[Array, "B S V"], Float[Array, "B S V"]]:
    """Log-probabilities of the next token at positions ``first`` and on: everything read, and less the cut.

    Args:
      network, params: the model.
      tokens: whole windows.
      first: position of the first step.
      cut: least and largest distance before the current token of those taken out.
    """
    t = tokens.shape[1]
    pos = jnp.broadcast_to(jnp.arange(t), tokens.shape)
    age = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
    own = jnp.eye(t - first, dtype=bool)
    network = network.at(t)
    x = network.embed(params, tokens, pos)
    less = x[:, first:]
    for index, block in enumerate(params["layers"]):
        window = network.windows[index]
        seen = (age >= 0) & (age < (t if window is None else window))
        left = (seen & (age > 0) & ((age < cut[0]) | (age > cut[1])))[first:]

        def whole(_: int, heads: Heads, carry: Any, seen: Array = seen) -> tuple[Array, tuple[Array, Array]]:
            return mixed(heads, heads.k, heads.v, seen), (heads.k, heads.v)

        def part(_: int, heads: Heads, carry: Any, left: Array = left) -> tuple[Array, Any]:
            k, v = (jnp.concatenate(pair, axis=1) for pair in zip(carry, (heads.k, heads.v)))
            return mixed(heads, k, v, jnp.concatenate([left, own], axis=1)), carry

        x, held = network.layer(block, index, x, pos, whole, None)
        less, _ = network.layer(block, index, less, pos[:, first:], part, held)
    full, gone = (jax.nn.log_softmax(network.logits(params, y)) for y in (x[:, first:], less))
    return full, gone


@functools.partial(jax.jit, static_argnames="budgets")
def _told(
    full: Float[Array, "B S V"], gone: Float[Array, "B S V"], budgets: tuple[Confidence, ...]
) -> tuple[Float[Array, "B S"], Float[Array, "Q B S"]]:
    """KL(full || gone), and what each budget makes of the full logits."""
    flat = full.reshape(-1, full.shape[-1])
    sure = jnp.stack([budget.confidence(flat).reshape(full.shape[:2]) for budget in budgets])
    return (jnp.exp(full) * (full - gone)).sum(axis=-1), sure


def measure(
    model: Weighted, samples: Samples, budget: Confidence, *, cut: int
) -> dict[str, Float[np.ndarray, "B S"]]:
    """Two shifts, confidence and its three parts at every step of the second half of each window.

    Args:
      model: the model.
      samples: windows of text, cut to the shortest.
      budget: whose confidence.
      cut: tokens taken out (``recent``), or left in beside the current one (``older``).
    """
    texts = [[*e.context, *e.question, *e.prefix, *e.answer] for _, e in samples]
    t = min(map(len, texts))
    parts = tuple(Confidence(wh=h, wm=m, wp=p) for h, m, p in PARTS.values())
    batches = []
    for start in range(0, len(texts), ROWS):
        rows = [text[:t] for text in texts[start : start + ROWS]]
        filled = rows + rows[:1] * (ROWS - len(rows))
        tokens = jnp.asarray(decode.padded(filled, t))
        moved = []
        for ages in ((1, cut), (cut + 1, t)):
            full, gone = steps(model.network, model.params, tokens, t // 2, jnp.asarray(ages))
            shift, sure = _told(full, gone, (budget, *parts))
            moved.append(shift)
        batches.append(np.concatenate([np.stack(moved), sure])[:, : len(rows)])
    names = (*SHIFTS, "confidence", *PARTS)
    return dict(zip(names, np.concatenate(batches, axis=1)))


def binned(confidence: np.ndarray, shift: np.ndarray) -> list[dict[str, float]]:
    """Ten bins of equally many steps, least sure first: mean confidence, mean shift, its standard error."""
    order = np.argsort(confidence, axis=None)
    sure, moved = confidence.ravel()[order], shift.ravel()[order]
    return [
        {"confidence": float(c.mean()), "shift": float(s.mean()), "error": float(s.std() / len(s) ** 0.5)}
        for c, s in zip(np.array_split(sure, BINS), np.array_split(moved, BINS))
    ]


def as_json(series: dict[str, np.ndarray], budget: Confidence, cut: int) -> dict[str, Any]:
    """Summary of what ``measure`` gives."""
    counts, edges = np.histogram(series["confidence"], bins=20, range=(0, 1))
    shifts = {
        name: {
            "mean": float(series[name].mean()),
            "r": {of: signal.correlation(series[of], series[name]) for of in ("confidence", *PARTS)},
            "bins": binned(series["confidence"], series[name]),
        }
        for name in SHIFTS
    }
    return {
        "budget": repr(budget),
        "cut": cut,
        "windows": len(series["confidence"]),
        "steps": series["confidence"].size,
        "shifts": shifts,
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        "sure_share": {f"{t:g}": float((series["confidence"] >= t).mean()) for t in THRESHOLDS},
    }
