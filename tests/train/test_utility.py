"""The calibration of LU-KV on a tiny model: utilities, convex losses and the greedy choice against NumPy."""

from __future__ import annotations

import heapq

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from ranker_tiny import config_at, generated_text  # noqa: F401

import kvjax
from kvjax.models import decoder
from kvjax.weights import read_weights
from train import utility

random = np.random.default_rng(2)


def test_losses_are_the_lower_convex_hull():
    for size in (1, 2, 7, 40):
        values = np.round(random.random(size), 1)
        drop = np.concatenate([[0], np.cumsum(values[::-1])])  # the loss when the last n tokens have gone
        hull = [
            min(
                drop[a] + (drop[b] - drop[a]) * ((n - a) / (b - a) if b > a else 0)
                for a in range(n + 1)
                for b in range(n, size + 1)
            )
            for n in range(size + 1)
        ]
        np.testing.assert_allclose(utility.non_increasing(values)[::-1], np.diff(hull), atol=1e-12)


def test_the_least_useful_tokens_of_all_heads_go_first():
    shape, t = (2, 3), 230
    worth, scores = random.random((*shape, t)), random.random((*shape, t))
    worth[0, 0] *= 5
    worth[1, 2] /= 100  # loses nearly all
    scores[..., :4] = scores[..., -1:] = np.inf
    scores[1, 2, 1:4] = 0.5  # a head that protects two: two of a hundred stay
    heap, kept = [], {}
    for at in np.ndindex(shape):
        free = [p for p in range(t) if scores[at][p] < np.inf]
        ranked = sorted(free, key=lambda p: (-scores[at][p], p))
        gains = utility.non_increasing(np.array([worth[at][p] for p in ranked])).tolist()
        kept[at] = t
        heapq.heappush(heap, (gains.pop(), at, gains))
    table, gone = [], 0
    for percent in range(1, 100):
        while gone < round(percent / 100 * 6 * t) and heap:
            _, at, gains = heapq.heappop(heap)
            if kept[at] > 2:
                kept[at] -= 1
                gone += 1
                if gains:
                    heapq.heappush(heap, (gains.pop(), at, gains))
        table.append([[1 - kept[i, j] / t for j in range(3)] for i in range(2)])
    np.testing.assert_allclose(utility.removed(worth, scores), table, atol=1e-12)


def test_a_tokens_utility_is_the_most_that_it_gives_to_the_answer():
    """Query by query in float64."""
    model, context, answer = tiny.model(), tiny.prompt(41), tiny.prompt(20, 5)
    spec, t = model.network.spec, len(context)
    policy = kvjax.policy("knorm + overall(0.5) + sinks(2) + recent(3)")
    got, scores = utility.measured(model, policy, {}, np.asarray(context), answer)
    seen = []

    def attend(layer, x, carry):
        seen.append([np.asarray(part[0], np.float64) for part in (x.q, x.k, x.v)])
        return decoder.dense_attend(spec)(layer, x, carry)

    tokens = jnp.asarray([*context, *answer])[None]
    decoder.forward(spec, model.params, tokens, jnp.arange(tokens.shape[1])[None], attend, None)
    for index, (q, k, v) in enumerate(seen):
        wo = np.asarray(model.params["layers"][index]["wo"], np.float64)
        norms = [np.linalg.norm(v[:t, n // spec.groups] @ wo[:, n].T, axis=-1) for n in range(spec.num_heads)]
        right = np.zeros(got[index].shape)
        for n in range(spec.num_heads):
            for at in range(t, t + len(answer)):
                s = k[: at + 1, n // spec.groups] @ q[at, n] / np.sqrt(spec.head_dim)
                worth = (np.exp(s) / np.exp(s).sum())[:t] * norms[n] / np.sum(norms)
                right[n // spec.groups] = np.maximum(right[n // spec.groups], worth)
        np.testing.assert_allclose(got[index], right, rtol=1e-4)
        np.testing.assert_allclose(
            scores[index][:, 2:-3], -np.linalg.norm(k[2 : t - 3], axis=-1).T, rtol=1e-4
        )
        assert np.isinf(scores[index][:, :2]).all()
        assert np.isinf(scores[index][:, -3:]).all()


def calibrate(tmp_path, folder, *words: str) -> tuple[int, str]:
    file = tmp_path / "table.safetensors"
    config = str(config_at(tmp_path, folder, traces={"sequences": 2}))
    return utility.main(["--config", config, "--export", str(file), "--new", "8", *words]), str(file)


def test_the_command_writes_a_table_that_serves(tmp_path, tiny_folder):
    code, file = calibrate(tmp_path, tiny_folder, "--eviction", "snapkv(8)", "--recent", "8")
    assert code == 0
    learned = read_weights(file)
    assert learned.notes["eviction"] == "snapkv(8)"
    table = np.stack([layer["removed"] for layer in learned.layers])
    assert table.shape == (2, 2, 99)
    assert (np.diff(table, axis=-1) >= 0).all()
    np.testing.assert_allclose(table[..., 29].mean(), 0.3, atol=0.01)
    policy = "snapkv(8) + lu_kv(0.4) + sinks(4)"
    model = kvjax.load(tiny_folder)
    said = kvjax.generate(model, policy, [tiny.prompt(40)], weights=kvjax.weights_for(policy, model, file))
    assert said.tokens[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--eviction", "kvzip"], "reads a prompt twice"),
        (["--eviction", "nosuch"], "nosuch"),
        (["--eviction", "qfilter"], "qfilter"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, tiny_folder, capsys, words, says):
    assert calibrate(tmp_path, tiny_folder, *words)[0] == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert says in error
