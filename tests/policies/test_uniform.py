"""Uniform's targets against exact fractions: tokens as written, ratios to the nearest, bytes down."""

from __future__ import annotations

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from policy_oracle import frame

from kvjax.algebra import Every, PolicyError
from kvjax.budgets.uniform import Uniform


def targets_of(budget: Uniform, seen: list[int], **where) -> list[int]:
    targets = np.asarray(budget.targets(frame(**where), jnp.asarray(seen), None))
    assert targets.shape == (len(seen), 1)
    assert targets.dtype == np.int32
    return targets[:, 0].tolist()


def test_tokens_are_tokens_whatever_was_seen():
    assert targets_of(Uniform(512), [1, 512, 100_000]) == [512] * 3
    assert (Uniform(512).least, Uniform(512).most) == (512, 512)


@pytest.mark.parametrize("ratio", ["0.1", "0.2", "0.25", "0.3", "0.33", "0.5", "0.7", "0.9", "1.0"])
def test_a_ratio_is_rounded_to_the_nearest_slot_halves_up(ratio):
    seen = [*range(2000), 4096, 10_000, 32_768, 131_072]
    right = [math.floor(Fraction(ratio) * n + Fraction(1, 2)) for n in seen]
    assert targets_of(Uniform(float(ratio)), seen) == right
    assert Uniform(float(ratio)).least is None
    assert Uniform(float(ratio)).most is None


def test_common_pairs_are_not_one_short():
    # What truncation in double precision gets wrong: 99, 19 and 1999.
    assert targets_of(Uniform(0.1), [1000]) == [100]
    assert targets_of(Uniform(0.2), [100, 10_000]) == [20, 2000]


@pytest.mark.parametrize("amount", ["1B", "1000B", "7KiB", "8MiB", "3GiB"])
@pytest.mark.parametrize(
    ("layers", "kv_heads", "slot_bytes"), [(1, 1, 64), (28, 8, 512), (36, 2, 272), (5, 3, 40)]
)
def test_bytes_are_what_a_whole_row_may_hold(amount, layers, kv_heads, slot_bytes):
    number = int("".join(c for c in amount if c.isdigit()))
    size = number * {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30}[amount.strip("0123456789")[0]]
    target = targets_of(Uniform(amount), [9, 99], layers=layers, kv_heads=kv_heads, slot_bytes=slot_bytes)
    right = size // (layers * kv_heads * slot_bytes)
    assert target == [right, right]


@pytest.mark.parametrize(
    ("amount", "words"),
    [
        (0, "not a valid amount"),
        (-3, "not a valid amount"),
        (0.0, "not a valid amount"),
        (True, "not a valid amount"),
        (None, "not a valid amount"),
        (1.5, "the share kept"),
        ("8MB", "not a valid size"),
        ("8 MiB", "not a valid size"),
        ("MiB", "not a valid size"),
        ("-1KiB", "not a valid size"),
    ],
)
def test_what_is_no_amount_is_refused(amount, words):
    with pytest.raises(PolicyError, match=words):
        Uniform(amount)


@pytest.mark.parametrize("when", ["sometimes", "every(4)", 4, None])
def test_what_is_no_time_is_refused(when):
    with pytest.raises(PolicyError, match="is not a valid time"):
        Uniform(8, when)


def test_times_that_are():
    assert [Uniform(8, when).when for when in ("after_prompt", "every_step", Every(4))][2].k == 4
    with pytest.raises(PolicyError, match="is not a valid period"):
        Every(0)
