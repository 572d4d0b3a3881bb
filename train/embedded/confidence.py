"""A model's confidence in its next token: its calibration, its kinds, and whether a cache can use it.

Rows of text are read three times: with all keys, and with the first tokens and a window only (``TIGHT`` and
``LOOSE`` tokens), which gives the gain of more slots at every step. Confidence is CONF-KV's c
(``kvjax.budgets.confidence``, its default weights).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.budgets.confidence import Confidence
from kvjax.models import decoder
from kvjax.models.spec import ModelSpec
from kvjax.types import AttendFn, Heads, Params
from train.embedded.tasks import logs
from train.rows import Source, text_row

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

BUDGET = Confidence()
SINKS, TIGHT, LOOSE = 4, 64, 256
BEGIN = LOOSE
"""The first step that counts: up to it both windows hold everything."""
HORIZONS = (1, 4, 16, 64)
MATCH = 3
"""A token is a copy if it followed the same ``MATCH`` tokens earlier in the row."""


def windowed(spec: ModelSpec, window: int | None) -> AttendFn[None]:
    """Dense attention to the first ``SINKS`` and the last ``window`` tokens; None is all tokens."""
    full = decoder.dense_attend(spec)

    def attend(index: int, x: Heads, carry: None) -> tuple[Array, None]:
        if window is None:
            return full(index, x, carry)
        b, t, n, h = x.q.shape
        q = x.q.reshape(b, t, spec.num_kv_heads, spec.groups, h)
        s = jnp.einsum("btkgh,bskh->bkgts", q, x.k) * h**-0.5
        i, j = jnp.arange(t)[:, None], jnp.arange(t)[None, :]
        p = jax.nn.softmax(
            jnp.where((i >= j) & ((i - j < window - SINKS) | (j < SINKS)), s, -jnp.inf), axis=-1
        )
        return jnp.einsum("bkgts,bskh->btkgh", p, x.v).reshape(b, t, n, h), carry

    return attend


@functools.partial(jax.jit, static_argnums=(0, 3))
def read(
    spec: ModelSpec, params: Params, row: Int[Array, " T"], window: int | None
) -> tuple[Float[Array, " T-1"], Float[Array, " T-1"], Float[Array, " T-1"], Array]:
    """(nll of each next token, c, best probability, whether the best token is the next one)."""
    tokens = row[None]
    positions = jnp.arange(tokens.shape[1])[None]
    x, _ = decoder.forward(spec, params, tokens, positions, windowed(spec, window), None)
    logits = decoder.logits(spec, params, x)[0, :-1]
    p = jax.nn.log_softmax(logits, axis=-1)
    nll = -jnp.take_along_axis(p, row[1:, None], axis=1)[:, 0]
    return nll, BUDGET.confidence(logits), jnp.exp(p.max(-1)), logits.argmax(-1) == row[1:]


def kinds(row: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """The kind of each next token: "copy", "word" (it continues a word) or "other"; [T - 1].

    Args:
      row: ids [T].
      begins: by id, whether a token does not continue a word.
    """
    followers: dict[tuple[int, ...], set[int]] = {}
    kind = np.where(begins[row[1:]], "other", "word")
    for at in range(MATCH - 1, len(row) - 1):
        past = tuple(row[at - MATCH + 1 : at + 1].tolist())
        if int(row[at + 1]) in followers.get(past, ()):
            kind[at] = "copy"
        followers.setdefault(past, set()).add(int(row[at + 1]))
    return kind


def starts_word(source: Source) -> np.ndarray:
    """By id, whether a token does not continue a word, because it does not begin with a letter."""
    written = (source.tokenizer.decode([i]) for i in range(source.tokenizer.get_vocab_size()))
    return np.asarray([not text[:1].isalpha() for text in written])


def calibration_error(best: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    """Mean over bins of equal width of |mean probability - share right|, weighted by their steps."""
    place = np.minimum((best * bins).astype(int), bins - 1)
    gap = np.bincount(place, best - right, minlength=bins)
    return float(np.abs(gap).sum() / len(best))


def autocorrelation(c: np.ndarray, lag: int) -> float:
    """Of the steps of all rows, [R, S], around their common mean."""
    d = c - c.mean()
    return float((d[:, :-lag] * d[:, lag:]).mean() / (d * d).mean())


def ahead(gain: np.ndarray, horizon: int) -> np.ndarray:
    """Mean of the ``horizon`` gains behind each step, [R, S - horizon]."""
    total = np.cumsum(np.pad(gain, ((0, 0), (1, 0))), axis=1)
    return (total[:, horizon + 1 :] - total[:, 1:-horizon]) / horizon


def schedules(c: np.ndarray, tight: np.ndarray, loose: np.ndarray, threshold: float) -> dict[str, float]:
    """Mean nll with few slots at the sure steps (the paper's), at as many least sure steps, and at random.

    ``c`` [R, S] decides for the next step.
    """
    c, tight, loose = c[:, :-1].ravel(), tight[:, 1:].ravel(), loose[:, 1:].ravel()
    sure = c >= threshold
    least = np.zeros(c.shape, bool)
    least[np.argsort(c, kind="stable")[: sure.sum()]] = True
    share = sure.mean()
    return {
        "tight_when_sure": float(np.where(sure, tight, loose).mean()),
        "tight_when_least_sure": float(np.where(least, tight, loose).mean()),
        "tight_at_random": float((share * tight + (1 - share) * loose).mean()),
    }


def measure(
    spec: ModelSpec, params: Params, sources: dict[str, Source], *, count: int, length: int, seed: int
) -> dict[str, Any]:
    """Confidence on prose and on predictable text.

    Args:
      spec, params: the model; attention is dense.
      sources: "prose" draws text, "predictable" logs and dialogues.
      count: rows of each.
      length: of a row; more than ``BEGIN``.
      seed: of the rows.

    Returns:
      By text and for "both": calibration_error, sure (share of steps with c >= 0.7), sure_kinds and all_kinds
      (shares of the sure steps and of all that are a copy, a word's continuation, other), autocorrelation by
      lag, gain_correlation by horizon, schedules.
    """
    draws: dict[str, Callable[..., Any]] = {"prose": text_row, "predictable": logs.row}
    parts: dict[str, list[np.ndarray]] = {}
    for name, source in sources.items():
        begins, rng = starts_word(source), np.random.default_rng(seed)
        rows: list[list[np.ndarray]] = []
        while len(rows) < count:
            drawn = draws[name](rng, source, length)
            if drawn is None:
                continue
            whole, tight, loose = (read(spec, params, drawn[0], w) for w in (None, TIGHT, LOOSE))
            steps = [*map(np.asarray, (*whole, tight[0], loose[0])), kinds(drawn[0], begins)]
            rows.append([x[BEGIN:] for x in steps])
        parts[name] = [np.stack(column) for column in zip(*rows)]
    parts["both"] = [np.concatenate(column) for column in zip(*parts.values())]
    return {name: _statistics(*columns) for name, columns in parts.items()}


def _statistics(
    nll: np.ndarray,
    c: np.ndarray,
    best: np.ndarray,
    right: np.ndarray,
    tight: np.ndarray,
    loose: np.ndarray,
    kind: np.ndarray,
) -> dict[str, Any]:
    sure = c >= BUDGET.threshold
    names = ("copy", "word", "other")
    shares = lambda of: {name: _mean(of == name) for name in names}  # noqa: E731
    gain = tight - loose
    correlations = {h: np.corrcoef(c[:, :-h].ravel(), ahead(gain, h).ravel())[0, 1] for h in HORIZONS}
    return {
        "steps": c.size,
        "nll": _mean(nll),
        "calibration_error": calibration_error(best.ravel(), right.ravel()),
        "sure": _mean(sure),
        "sure_kinds": shares(kind[sure]) if sure.any() else None,
        "all_kinds": shares(kind),
        "autocorrelation": {str(lag): autocorrelation(c, lag) for lag in (1, 4, 16)},
        "gain": _mean(gain),
        "gain_correlation": {str(h): float(r) for h, r in correlations.items()},
        "schedules": schedules(c, tight, loose, BUDGET.threshold),
    }


def _mean(x: np.ndarray) -> float:
    return float(np.mean(x))
