"""LU-KV against plain Python: how many slots a table gives every head by kvpress's rule, and what stays."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from policy_oracle import frame
from test_kvzip import LENGTHS, PROMPTS, kept, layers

import kvjax
from kvjax.algebra import PolicyError
from kvjax.budgets.lu_kv import LUKV, SHARES
from kvjax.weights import WeightsError
from kvjax.weights.published import lu_kv_layers

random = np.random.default_rng(4)
TABLE = np.sort(random.random((2, 3, SHARES)), axis=-1).astype(np.float32)
TABLE[0, 0] = 1.0  # a head that keeps nothing
TABLE[0, 1, 50:] = 1.2  # beyond what can be removed
TABLE[1, :2] = np.float32(0.3)  # equal heads


def slots(table: np.ndarray, share: float, seen: int) -> list[int]:
    """Of the heads [K, 99] of a layer of a row, of which this share stays."""
    if share >= 1:
        return [seen] * len(table)
    column = max(0, min(98, round((1 - share) * 100) - 1))
    ideal = [np.float32(min(max(1 - float(row[column]), 0.0), 1.0)) * np.float32(seen) for row in table]
    total = round(float(sum(ideal)))
    counts = [int(x) for x in ideal]
    most_cut = sorted(range(len(table)), key=lambda head: (-(ideal[head] - counts[head]), head))
    for head in most_cut[: total - sum(counts)]:
        counts[head] += 1
    return [min(max(n, 1), seen) for n in counts]


@pytest.mark.parametrize("amount", [0.01, 0.2, 0.333, 0.6, 0.99, 1.0, 12, 200])
def test_each_head_keeps_its_share_and_the_layer_its_sum(amount):
    seen = np.array([160, 37, 5])
    for table in TABLE:
        place = dataclasses.replace(frame(kv_heads=3), weights={"removed": jnp.asarray(table)})
        got = np.asarray(LUKV(amount).targets(place, jnp.asarray(seen), None))
        for row, n in enumerate(seen):
            share = amount if isinstance(amount, float) else amount / n
            assert got[row].tolist() == slots(table, share, n)


def test_what_stays_of_prompts_is_each_heads_best():
    weights = {"budget": [{"removed": jnp.asarray(table[1:])} for table in TABLE]}
    bits = kept("knorm + lu_kv(0.4) + sinks(2) + recent(1)", weights)
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS)):
        for index, seen in enumerate(layers(prompt)):
            score = -np.linalg.norm(seen["k"], axis=-1).T
            score[:, :2] = score[:, -1:] = np.inf
            for head, count in enumerate(slots(TABLE[index][1:], 0.4, length)):
                order = np.argsort(-score[head], kind="stable")[: max(count, 3)]
                assert np.flatnonzero(bits[index, row, head]).tolist() == sorted(order.tolist())


def test_published_tables_are_read_and_others_refused():
    network = tiny.model().network
    saved = random.random((SHARES, 2, 2))
    for index, layer in enumerate(lu_kv_layers(saved, network, "curve.npy")):
        np.testing.assert_array_equal(layer["removed"], saved[:, index].T.astype(np.float32))
    for wrong in (saved[:98], saved[:, :1], saved[..., None], saved * 3, np.full_like(saved, np.nan)):
        with pytest.raises(WeightsError, match=r"curve\.npy .* \(99, 2, 2\)"):
            lu_kv_layers(wrong, network, "curve.npy")


def test_without_its_table_it_says_how_to_make_one():
    with pytest.raises(kvjax.weights.WeightsError, match=r"train\.utility"):
        kvjax.prefill(tiny.model(), "knorm + lu_kv(0.4)", [tiny.prompt(9)])
    with pytest.raises(PolicyError, match="has no table"):
        jax.eval_shape(lambda n: LUKV().targets(frame(), n, None), jnp.ones(1, jnp.int32))
