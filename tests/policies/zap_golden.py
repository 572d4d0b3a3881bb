"""What kvpress keeps by KVzap and Fast KVzip (tests/make_zap_golden.py), and what we keep."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks.parity import _layer_keeps, compared
from kvjax import decode
from kvjax.algebra import Policy

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDER = GOLDEN / "zap"
PROMPT, FED, WINDOW, THRESHOLD = 160, 12, 16, -5.0
RATIOS = (0.25, 0.5, 0.75)


@functools.cache
def answers() -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / "answers.npz"))


@functools.cache
def model() -> kvjax.LanguageModel:
    return kvjax.load(GOLDEN / "llama3", dtype="float32")


@functools.cache
def reading() -> Any:
    return decode.read_full(model(), [answers()["tokens"].tolist()[:PROMPT]])


def keeps(policy: Policy, weights: list[dict]) -> np.ndarray:
    """Bits [L, K, T] of the prompt."""
    network, read = model().network.at(reading().context), reading()
    bits = [
        _layer_keeps(
            network,
            0,
            policy,
            {"eviction": weights[index]},
            jnp.asarray(index),
            model().params["layers"][index],
            read.inputs[index],
            jnp.asarray([PROMPT]),
            read.lse[index],
        )
        for index in range(network.num_layers)
    ]
    return np.stack([np.asarray(x)[0, :, :PROMPT] for x in bits])


def check_same(ours: np.ndarray, theirs: np.ndarray, score: np.ndarray) -> None:
    """The same tokens, but for equal scores: in the first layer a token that recurs has the same again."""
    assert ours.sum() == theirs.sum()
    assert compared(ours, theirs, score)["verdict"] in ("equal", "rounding")
