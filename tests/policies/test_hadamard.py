"""Keys and values that are turned before they are coded: against NumPy, and beside codes of plain ones."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from policy_oracle import ALL, append, contents, entry, remove, room

import kvjax
from kvjax.algebra import PolicyError
from kvjax.models import decoder
from kvjax.storage.int4 import Int4
from kvjax.storage.int8 import Int8

H, SIZE, T = 32, 8, 16
DRAWN = np.random.default_rng(0).standard_normal((2, 1, 2, T, H)).astype(np.float32)


def hadamard(h: int) -> np.ndarray:
    """By Sylvester's construction."""
    matrix = np.ones((1, 1))
    while len(matrix) < h:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(h)


@pytest.mark.parametrize(("kind", "most"), [(Int8, 127), (Int4, 7)])
def test_codes_are_those_of_the_turned_vectors_and_reads_turn_back(kind, most):
    codec = kind(recent=1, hadamard=True)
    pages = room(1, 2, H, entries=2, size=SIZE, codec=codec)
    pages = append(pages, codec, ALL, entry(*DRAWN), jnp.zeros((1, 2, T), jnp.int32))
    assert pages.turned
    for h in range(2):
        _, *stored = contents(pages, 0, h, codec)
        for which, actual in enumerate(stored):
            x = (DRAWN[which, 0, h].astype(np.float64) @ hadamard(H)).reshape(2, SIZE, H)
            scale = np.abs(x).max(axis=1, keepdims=True) / most
            right = (np.rint(x / scale) * scale).reshape(T, H) @ hadamard(H)
            off = np.abs(actual - right).max(axis=-1)
            assert (off > 1e-4).sum() <= 1  # a tie may round the other way
    moved = remove(pages, codec, ALL, jnp.asarray([[0, -1]]))
    np.testing.assert_allclose(
        contents(moved, 0, 0, codec)[1][0],
        contents(pages, 0, 0, codec)[1][-1],
        atol=0.5 if most == 7 else 0.05,
    )


def test_an_outlier_in_one_token_costs_less_when_it_is_spread():
    """A value of 30 in a channel takes the codes of its page's other tokens there; turned, a bit of each."""
    x = DRAWN[:, :, :, :SIZE].copy()
    x[..., 0, 5] = 30
    errors = []
    for turned in (False, True):
        codec = Int4(recent=1, hadamard=turned)
        pages = room(1, 2, H, entries=1, size=SIZE, codec=codec)
        pages = append(pages, codec, ALL, entry(*x), jnp.zeros((1, 2, SIZE), jnp.int32))
        errors.append(np.abs(contents(pages, 0, 0, codec)[1] - x[0, 0, 0])[1:, 5].mean())
    print(f"of the other tokens' channel: {errors[0]:.2f} as it is, {errors[1]:.2f} turned")
    assert 2 * errors[1] < errors[0]


SELECTIONS = (
    "topk(6, sinks=2, tail=8) + int8(8{})",
    "magicpig(3, tables=12, sinks=2, tail=8) + int8(8{})",
    pytest.param("int8(8{})", marks=pytest.mark.slow),
    pytest.param("quest(2, chunk=4, dense=0, recent=8) + int8(8{})", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("spec", SELECTIONS)
def test_every_read_turns_its_queries(spec):
    """Selections choose and estimate as over pages that are not turned."""
    logits = []
    for more in ("", ", hadamard=True"):
        policy = kvjax.policy(spec.format(more))
        state, _ = tiny.read(policy, [tiny.prompt(52, 3)], 16)
        logits.append(tiny.feed(policy, state, np.asarray([tiny.prompt(4, 9)]))[1])
    gap = np.abs(logits[1] - logits[0]).max()
    print(f"{spec}: {gap:.3f}")
    assert 0 < gap < 0.1


def test_refusals():
    with pytest.raises(PolicyError, match=r"phi.*hadamard=True.*turned. Leave hadamard out"):
        kvjax.policy("write_gate(0.5) + int8(hadamard=True) + phi(4)")
    with pytest.raises(PolicyError, match="hadamard=1 is not a valid switch"):
        Int8(hadamard=1)
    whole = tiny.model()
    odd = tiny.Tiny(decoder.Decoder(dataclasses.replace(whole.network.spec, head_dim=7)), whole.params)
    with pytest.raises(PolicyError, match=r"turns pairs of channels.*have 7 channels. Leave hadamard out"):
        kvjax.prefill(odd, kvjax.policy("int8(8, hadamard=True)"), [tiny.prompt(20)], context=64)


def test_the_text_gives_it_back_and_structures_differ():
    turned, plain = (kvjax.policy(x) for x in ("int4(16, hadamard=True)", "int4(16)"))
    assert kvjax.policy(repr(turned)) == turned
    assert turned.structure != plain.structure
