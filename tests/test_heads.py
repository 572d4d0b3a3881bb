"""KV heads in another order: the model is the same function, caches are the same sets, devices hold alike."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import decode, metrics
from kvjax.decode import _placement
from kvjax.models import decoder, hf
from kvjax.sharding.head_order import balanced, in_order, permuted, read_order
from kvjax.sharding.mesh import Mesh, sizes_of
from kvjax.sharding.specs import AXES

GOLDEN = Path(__file__).parent / "golden"


def shuffled(layers: int, heads: int) -> np.ndarray:
    draw = np.random.default_rng(2)
    orders = [order for order in itertools.permutations(range(heads)) if order != tuple(range(heads))]
    return np.asarray([orders[draw.integers(len(orders))] for _ in range(layers)])


# Biases of queries, keys and values; norms of heads; as many KV heads as query heads.
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt2"])
def test_the_model_is_the_same_function(name):
    model = hf.load(GOLDEN / name, dtype="float32")
    spec, draw = model.spec, np.random.default_rng(0)
    # Biases of a fresh checkpoint may all be nought.
    params = jax.tree.map(lambda x: x + 0.05 * draw.standard_normal(x.shape, np.float32), model.params)
    order = shuffled(spec.num_layers, spec.num_kv_heads)
    other = permuted(model.network.letters, params, order)
    moved = [not np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (params, other)))]
    assert sum(moved) >= 4 * spec.num_layers
    tokens = draw.integers(0, spec.vocab_size, (2, 9)).astype(np.int32)
    logits = jax.jit(decoder.dense_logits, static_argnums=0)
    np.testing.assert_allclose(logits(spec, other, tokens), logits(spec, params, tokens), atol=2e-4)


@pytest.mark.slow
def test_learned_weights_follow_and_streams_hold_the_same():
    model = kvjax.load()
    network = model.network
    order = shuffled(network.num_layers, network.num_kv_heads)
    other = kvjax.load(heads=order)
    policy = kvjax.policy("write_gate(0.1, window=32)")
    prompt = np.random.default_rng(1).integers(5, 500, 300).tolist()
    runs = []
    for one in (model, other):
        weights = kvjax.weights_for(policy, one)
        state, logits = kvjax.prefill(one, policy, [prompt], weights=weights, chunk_size=64)
        runs.append((np.asarray(metrics.present(state)), np.asarray(logits)))
    (kept, logits), (moved, others) = runs
    # Gates sit on a threshold: rounding in another order may turn one.
    back = np.stack([layer[:, new] for layer, new in zip(kept, order)])
    assert (moved != back).mean() < 1e-3 < (moved != kept).mean()
    np.testing.assert_allclose(others, logits, atol=2e-2 if (moved != back).any() else 1e-3)


def test_a_state_of_another_order_is_of_another_model(tmp_path):
    model = kvjax.load()
    state, _ = kvjax.prefill(model, "full", [[5, 6, 7]])
    kvjax.save(state, tmp_path / "state", model=model, policy="full")
    other = kvjax.load(heads=[[1, 0, 2, 3]] * model.network.num_layers)
    with pytest.raises(kvjax.StateError, match="of another model"):
        kvjax.open(tmp_path / "state", model=other)


@pytest.mark.parametrize("order", [[[0, 1]], [[0, 0], [0, 1]], [[0, 1], [1, 2]], [[0], [0, 1]], "heads"])
def test_what_is_no_order_is_refused(order):
    said = r"load\(heads=...\) is not an order of the KV heads. Give each of 2 layers the numbers 0 to 1"
    with pytest.raises(ValueError, match=said):
        read_order("load(heads=...)", order, 2, 2)


def test_query_heads_go_with_their_kv_head():
    heads = np.arange(6)[:, None] * np.ones((1, 2), int)
    assert in_order(heads, [2, 0, 1])[:, 0].tolist() == [4, 5, 0, 1, 2, 3]
    assert in_order(heads.T, [2, 0, 1], axis=1)[0].tolist() == [4, 5, 0, 1, 2, 3]


def shares(held: np.ndarray, devices: int) -> np.ndarray:
    return held.reshape(devices, -1).sum(axis=1)


def test_devices_get_about_as_much():
    # By hand: 8 with 1, 7 with 2; a layer that is even stays.
    order = balanced(np.asarray([[8, 7, 2, 1], [3, 3, 3, 3]]), 2)
    assert sorted(shares(np.asarray([8, 7, 2, 1])[order[0]], 2)) == [9, 9]
    assert order[1].tolist() == [0, 1, 2, 3]
    draw = np.random.default_rng(4)
    for _ in range(50):
        held = draw.integers(0, 100, 6)
        [order] = balanced(held[None], 3)
        assert sorted(order) == list(range(6))
        best = min(shares(held[list(every)], 3).max() for every in itertools.permutations(range(6)))
        # Fullest first into the least share: near the best of all orders, and never worse than none.
        assert best <= shares(held[order], 3).max() <= min(4 / 3 * best + 1e-9, shares(held, 3).max())


def test_imbalance_is_the_fullest_device_over_the_mean():
    grid = tuple({"data": 2, "tensor": 2}.get(axis, 1) for axis in AXES)
    mesh = Mesh(jax.sharding.AbstractMesh(grid, AXES))  # type: ignore[arg-type]
    # Rows over data, heads over tensor: devices hold 4, 2, 1, 1, and 2 each.
    held = np.asarray([[[4, 2], [1, 1]], [[2, 2], [2, 2]]])
    assert metrics.uneven(held, mesh) == pytest.approx((4 + 2) / (2 + 2))
    skewed = np.random.default_rng(5).integers(1, 400, (3, 2, 8)) * np.arange(1, 9)
    order = balanced(skewed.sum(axis=1), 2)
    even = np.stack([layer[:, new] for layer, new in zip(skewed, order)])
    assert metrics.uneven(even, mesh) < 0.8 * metrics.uneven(skewed, mesh)
    state, _ = kvjax.prefill(tiny.model(), "full", [tiny.prompt(9), tiny.prompt(5)])
    assert metrics.imbalance(state) == 1.0
    np.testing.assert_array_equal(metrics.held_by_head(state), metrics.live_slots(state))
    # Nine tokens on one device and five on the other, of a state that says it lies so.
    apart = dataclasses.replace(state, mesh=sizes_of("data=2"))
    with pytest.warns(decode.Remark, match=r"on data=2,.* the fullest device holds 1\.3 times the slots"):
        _placement.warn_of_imbalance(apart)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _placement.warn_of_imbalance(dataclasses.replace(state, mesh=sizes_of("tensor=2")))
