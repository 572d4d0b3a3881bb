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


# --- penalties, biases, least lengths ---------------------------------------------------------------


def shaped_oracle(logits, prompt, written, frequency, presence, repetition, bias, held_back):
    """One row, token by token, in float64."""
    out = logits.astype(np.float64).copy()
    for token in held_back:
        out[token] = -np.inf
    for token, value in bias.items():
        out[token] += value
    for token in {*prompt, *written}:
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(written):
        out[token] -= frequency * written.count(token) + presence
    return out


def test_logits_are_shaped_as_the_oracles():
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 2, (4, V)).astype(np.float32)
    prompts, written = [[1, 1, 2], [3], [4, 5], [6]], [[2, 7, 7, 7], [3, 3], [], [8, 9, 8]]
    options = {
        "frequency_penalty": [0.7, 0.0, -0.5, 1.1],
        "presence_penalty": [0.0, 1.5, 0.3, -0.4],
        "repetition_penalty": [1.3, 1.0, 0.8, 2.0],
        "min_tokens": [4, 3, 1, 0],
    }
    bias = [{0: 5.0}, {}, {3: -100.0, 5: 2.5}, {11: 1.0}]
    how = sampling(4, **options, logit_bias=bias, prompts=prompts, stops=[10, 11], context=16)
    for row, tokens in enumerate(written):
        for at, token in enumerate(tokens):
            active = np.arange(4) == row
            how = how.after(np.full(4, token, np.int32), np.full(4, len(prompts[row]) + at, np.int32), active)
    position = np.asarray([len(a) + len(b) for a, b in zip(prompts, written)], np.int32)
    shaped = np.asarray(jax.jit(how.shaping.shaped)(logits, position))
    for row in range(4):
        numbers = [options[name][row] for name in list(options)[:3]]
        early = len(written[row]) < options["min_tokens"][row]
        expected = shaped_oracle(
            logits[row], prompts[row], written[row], *numbers, bias[row], [10, 11] if early else []
        )
        np.testing.assert_allclose(shaped[row], expected, rtol=1e-5)
    greedy = np.asarray(draw(logits, how, position))
    assert greedy.tolist() == shaped.argmax(-1).tolist()


def test_min_p_drops_what_is_less_likely_than_its_share_of_the_best():
    rows, temperature = 2000, 0.8
    logits = np.random.default_rng(3).permutation(np.linspace(0, 3, V)).astype(np.float32)
    how = sampling(rows, temperature=temperature, min_p=0.2)
    tokens = np.asarray(draw(np.tile(logits, (rows, 1)), how, np.zeros(rows, np.int32)))
    p = np.exp(logits / temperature)
    kept = p >= 0.2 * p.max()
    assert 1 < kept.sum() < V
    assert set(tokens.tolist()) == set(np.flatnonzero(kept).tolist())


def test_rows_that_shape_nothing_draw_as_without_the_others():
    logits = np.random.default_rng(4).normal(size=(8, V)).astype(np.float32)
    position, plain = np.arange(8, dtype=np.int32), {"temperature": 1.0, "top_p": 0.9, "seed": 5}
    assert sampling(8, **plain).shaping is None
    mixed = sampling(8, **plain, logit_bias=[{0: 50.0}, *[{}] * 7])
    tokens, alone = (np.asarray(draw(logits, how, position)) for how in (mixed, sampling(8, **plain)))
    assert tokens[0] == 0
    assert tokens[1:].tolist() == alone[1:].tolist()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "above 0"),
        ({"frequency_penalty": float("nan")}, "finite"),
        ({"logit_bias": {-1: 1.0}}, "by token id"),
        ({"logit_bias": [{}]}, "each of the 2"),
        ({"presence_penalty": 1.0}, "lacks prompts"),
    ],
)
def test_shaping_that_does_not_fit_is_refused(bad, words):
    with pytest.raises(ValueError, match=words):
        sampling(2, **bad)
