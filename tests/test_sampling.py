"""Drawing the next token: truncation against a NumPy oracle, randomness owned by request and position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.sampling import sample, sampling

V = 12
draw = jax.jit(sample)


def allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> set[int]:
    """The smallest set of best tokens with probability top_p, among the top_k best."""
    p = np.exp(logits / temperature - (logits / temperature).max())
    p /= p.sum()
    order, kept, mass = np.argsort(-p), set(), 0.0
    for token in order[: top_k or V]:
        if mass >= top_p:
            break
        kept.add(int(token))
        mass += p[token]
    return kept


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (5, 0.6), (1, 1.0), (0, 1e-6)])
def test_truncation_is_the_oracles(top_k, top_p):
    rows = 2000
    logits = np.random.default_rng(0).normal(0, 1.5, V).astype(np.float32)
    how = sampling(rows, temperature=0.8, top_k=top_k, top_p=top_p)
    tokens = np.asarray(draw(np.tile(logits, (rows, 1)), how, np.zeros(rows, np.int32)))
    right = allowed(logits.astype(np.float64), 0.8, top_k, top_p)
    assert set(tokens.tolist()) <= right
    p = np.exp(logits / 0.8) * np.isin(np.arange(V), list(right))
    p /= p.sum()
    share = np.bincount(tokens, minlength=V) / rows
    assert np.abs(share - p).max() < 5 * np.sqrt(0.25 / rows)


def test_greedy_rows_stay_greedy_beside_warm_ones():
    logits = np.random.default_rng(1).normal(size=(64, V)).astype(np.float32)
    how = sampling(64, temperature=[0.0, 2.0] * 32)
    tokens = np.asarray(draw(logits, how, np.arange(64, dtype=np.int32)))
    assert (tokens[::2] == logits.argmax(-1)[::2]).all()
    assert (tokens[1::2] != logits.argmax(-1)[1::2]).any()


def test_a_draw_belongs_to_its_request_and_position():
    logits = np.zeros((4, V), np.float32)
    position = np.asarray([7, 7, 8, 7], np.int32)
    tokens = np.asarray(draw(logits, sampling(4, temperature=1.0, requests=[3, 5, 3, 3]), position))
    assert tokens[0] == tokens[3]
    many = np.zeros((200, V), np.float32)
    at = np.arange(200, dtype=np.int32)
    one = sampling(200, temperature=1.0, requests=[3] * 200)
    other = sampling(200, temperature=1.0, requests=[5] * 200)
    reseeded = sampling(200, temperature=1.0, requests=[3] * 200, seed=1)
    base = np.asarray(draw(many, one, at))
    assert len(set(base.tolist())) == V
    for how in (other, reseeded):
        assert (np.asarray(draw(many, how, at)) == base).mean() < 0.3
    order = np.random.default_rng(0).permutation(200)
    assert (np.asarray(draw(many, one, at[order])) == base[order]).all()


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_parameters_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        sampling(2, **bad)


def test_ties_at_the_cut_stay_in():
    logits = jnp.asarray([[1.0, 1.0, 0.0]] * 300)
    tokens = np.asarray(draw(logits, sampling(300, temperature=1.0, top_k=1), np.zeros(300, np.int32)))
    assert set(tokens.tolist()) == {0, 1}
