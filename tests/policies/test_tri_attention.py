"""TriAttention against float64 NumPy with complex numbers, as the paper writes it: keys before RoPE."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import prompt_rows as rows
import pytest

from kvjax.algebra import PolicyError
from kvjax.models.rope import Rope, Yarn, rotate
from kvjax.policies.tri_attention import TriAttention

THETA = 30.0
PARTLY = Rope(theta=THETA, fraction=0.5)
STRETCHED = Rope(
    theta=THETA, scaling=Yarn(factor=4.0, original_max_position_embeddings=64, attention_factor=1.2)
)

_random = np.random.default_rng(8)
SAMPLES = _random.standard_normal((50, rows.N, rows.H)) + 2 * _random.standard_normal((rows.N, rows.H))
"""Queries before RoPE of a calibration text."""


def in_pairs(x: np.ndarray, turning: int) -> list[np.ndarray]:
    """Channels as complex pairs (i, i + R / 2) of the first R; the others as they are."""
    half = turning // 2
    together = [x[..., i] + 1j * x[..., i + half] for i in range(half)]
    return together + [x[..., i] + 0j for i in range(turning, x.shape[-1])]


def centres(rope: Rope) -> dict[str, np.ndarray]:
    """What calibration writes."""
    turning = int(rows.H * rope.fraction)
    length = np.stack([np.abs(z).mean(axis=0) for z in in_pairs(SAMPLES, turning)], axis=-1)
    half = turning // 2
    length = np.concatenate([length[:, :half], length[:, :half], length[:, half:]], axis=-1)
    return {"mean": np.float32(SAMPLES.mean(axis=0)), "length": np.float32(length)}


def scores(row: int, ahead: int, rope: Rope) -> np.ndarray:
    """[K, length] by the paper's formulas."""
    total, turning = rows.LENGTHS[row], int(rows.H * rope.fraction)
    omega = np.append(rope.frequencies(rows.H).astype(float), np.zeros(rows.H - turning))
    scale = np.append(np.full(turning // 2, rope.amplitude), np.ones(rows.H - turning))
    result = np.full((rows.K, total), -np.inf)
    for n in range(rows.N):
        h, at = n // rows.G, np.arange(total)
        score = np.zeros(total)
        turned = in_pairs(rows.KEYS[row, h, :total], turning)
        for f, (q, cached) in enumerate(zip(in_pairs(SAMPLES[:, n], turning), turned)):
            k = cached * np.exp(-1j * omega[f] * at) / scale[f]  # before RoPE
            centre, length = q.mean(), np.abs(q).mean()
            angle = np.angle(centre * np.conj(k))
            far = 1
            offsets = []
            while far <= ahead:
                offsets.append(far)
                far *= 2
            distance = total + np.asarray(offsets)[:, None] - at
            series = np.abs(centre) * np.abs(k) * np.cos(omega[f] * distance + angle)
            concentration = np.abs(centre) / length
            score += scale[f] ** 2 * (series.mean(axis=0) + (1 - concentration) * length * np.abs(k))
        deviation = max(score.std(), 1e-6)
        result[h] = np.maximum(result[h], (score - score.mean()) / deviation)
    return result


@pytest.mark.parametrize(
    ("ahead", "rope"),
    [(64, Rope(theta=THETA)), (5, PARTLY), (9, STRETCHED)],
    ids=["all", "half", "stretched"],
)
def test_score_is_the_series_at_later_distances_and_what_is_not_concentrated(ahead: int, rope: Rope) -> None:
    score = jax.jit(TriAttention(ahead).score_prompt)
    for padding in (9.0, np.nan):
        seen = dataclasses.replace(rows.prompts(padding), rotate=functools.partial(rotate, rope=rope))
        actual = np.asarray(score(centres(rope), seen))
        for row, length in enumerate(rows.LENGTHS[:3]):  # one token alone has no deviation
            right = scores(row, ahead, rope)
            np.testing.assert_allclose(actual[row, :, :length], right, rtol=2e-3, atol=2e-3)
        assert np.isfinite(actual).all()


def test_without_centres_there_is_no_score() -> None:
    nothing: Any = None
    with pytest.raises(PolicyError, match="has no centres"):
        TriAttention().score_prompt(nothing, rows.prompts())
