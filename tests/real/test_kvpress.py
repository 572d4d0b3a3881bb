"""The real model's cache, cut by kvpress's words: the same slots, the same nats (``make_golden.py``)."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from real_prompts import BOOK, CONTEXT, FED, PRESSES, RATIOS

import kvjax
from kvjax import decode, metrics

pytestmark = pytest.mark.real

GOLDEN = np.load(Path(__file__).with_name("kvpress.npz"))
CASES = [(name, ratio) for name in PRESSES for ratio in RATIOS]
QUICK = [("keydiff", 0.5), ("snapkv(64)", 0.75), ("expected_attention", 0.9)]
NATS = 1e-3


@functools.cache
def read(model: kvjax.LanguageModel) -> tuple[list[int], decode.PromptActivations]:
    """The tokens of the book, and the context as full attention reads it."""
    ids = model.text.encode(BOOK, bos=False)[: CONTEXT + FED + 1]
    return ids, decode.read_full(model, [ids[:CONTEXT]], context=1024)


def held_and_nats(model: kvjax.LanguageModel, name: str, ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens are held [L, K, T], and the nats of the token after each fed one."""
    ids, reading = read(model)
    kept = int(CONTEXT * (1 - ratio))  # as kvpress rounds
    newest = " + recent(1)" if name == "tova" else ""  # which TOVA's press always keeps
    policy = kvjax.policy(f"{name} + uniform({kept}){newest}")
    if decode.cuts_after(policy):
        state, _ = decode.cut(model, policy, reading)
    else:
        state, _ = decode.prefill(model, policy, [ids[:CONTEXT]], context=1024)
    feed, target = ids[CONTEXT : CONTEXT + FED], ids[CONTEXT + 1 :]
    room = decode.reserve(policy, state, FED, 1)
    # Before a token is fed, the context's last one is still there, whether it is kept or not.
    after, logits = tiny.feed(policy, room, np.asarray([feed]), tiny=model)
    held = np.asarray(metrics.present(after))[:, 0, :, :CONTEXT]
    assert (held.sum(axis=-1) == kept).all()
    logprobs = jax.nn.log_softmax(logits[0].astype(np.float32))
    return held, -np.asarray(logprobs)[np.arange(FED), target]


def difference(model: kvjax.LanguageModel, name: str, ratio: float) -> tuple[int, float]:
    """How many slots of kvpress are not ours, and ours less its mean nats."""
    case = CASES.index((name, ratio))
    held, nats = held_and_nats(model, name, ratio)
    bits = np.unpackbits(GOLDEN[f"kept_{case}"])[: held.size].reshape(held.shape).astype(bool)
    assert (bits.sum(axis=-1) == held.sum(axis=-1)).all()
    return int((bits & ~held).sum()), float(nats.mean() + GOLDEN[f"logprobs_{case}"].mean())


@pytest.mark.parametrize(("name", "ratio"), QUICK)
def test_a_press_keeps_the_same_slots_and_costs_the_same_nats(smollm2, name, ratio):
    missing, nats = difference(smollm2, name, ratio)
    assert missing == 0
    assert abs(nats) <= NATS


@pytest.mark.slow
def test_six_presses_at_three_ratios(smollm2):
    """Prints the table."""
    found = {case: difference(smollm2, *case) for case in CASES}
    for (name, ratio), (missing, nats) in found.items():
        slots = int(CONTEXT * (1 - ratio)) * smollm2.spec.num_layers * smollm2.spec.num_kv_heads
        print(f"| {name} | {ratio} | {missing} of {slots} | {nats:+.1e} |")
    assert all(abs(nats) <= NATS for _, nats in found.values())
    assert sum(missing == 0 for missing, _ in found.values()) >= 15
