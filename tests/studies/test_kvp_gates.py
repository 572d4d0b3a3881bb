"""Criteria for heads left to chance, and what they lose: figures by NumPy, losses by the model itself."""

from __future__ import annotations

import json

import numpy as np
import tiny

import kvjax
from kvjax.eval.tasks.sample import Sample
from kvjax.policies import kvp
from studies.kvp import gates


def test_what_each_criterion_leaves_to_chance():
    heads = {
        "error": np.asarray([[0.5, 1.2], [1.0, 0.9]]),
        "entropy": np.asarray([[5.0, 1.0], [1.2, 1.0]]),
        "cost": np.asarray([[0.1, 0.2], [0.4, 0.3]]),
    }
    chosen = {name: on.tolist() for name, on in gates.choices(heads).items()}
    assert chosen == {
        "all ranked": [[True, True], [True, True]],
        "by entropy": [[False, True], [False, True]],
        "by error": [[True, False], [True, True]],
        "by trained cost": [[True, True], [False, False]],
        "all by chance": [[False, False], [False, False]],
    }


def test_losses_are_those_of_the_models_own_answers_under_each_policy(monkeypatch):
    """With every token kept the loss is the model's own; with few it is that of what is left."""
    monkeypatch.setattr(gates, "LENGTH", 80)
    monkeypatch.setattr(gates, "ENDING", 12)
    model, texts = tiny.model(), [tiny.prompt(80, seed) for seed in (0, 1, 2)]
    samples = [(Sample(context="", answer=""), gates._ending(ids)) for ids in texts]
    layers = kvp.LearnedRanker().untrained(model, 0)
    weights = {"eviction": gates.gate.with_gate(layers, np.asarray([[True, False], [False, True]]))}
    policies = {
        ("whole", 80): ("kvp(2, recent=4) + uniform(80)", weights),
        ("cut", 20): ("kvp(2, recent=4) + uniform(20)", weights),
    }
    lost = gates.losses(model, samples, policies)
    for at, ids in enumerate(texts):
        state, logits = kvjax.prefill(model, kvjax.policy("full"), [ids[:68]], context=96)
        own = []
        for token in ids[68:]:
            z = np.asarray(logits, np.float64).reshape(-1)
            own.append(np.log(np.exp(z - z.max()).sum()) + z.max() - z[token])
            state, logits = tiny.feed(kvjax.policy("full"), state, np.asarray([[token]]))
        np.testing.assert_allclose(lost["whole", 80][0][at], np.mean(own), rtol=1e-3)
    assert lost["whole", 80][1] == [12, 12, 12]
    assert not np.allclose(lost["cut", 20][0], lost["whole", 80][0], rtol=1e-2)


def test_the_page_shows_the_difference_from_all_heads_ranked():
    tree = {
        "sequences": 3,
        "heads": {"entropy": [[1.0]], "cost": [[0.25]], "error": [[2.0]]},
        "by_chance": {"all ranked": [], "by error": ["0.0"]},
        "lost": [
            {"set": "books", "slots": 64, "n": 2, "criterion": name, "nats": nats, "less_all_ranked": less}
            for name, nats, less in (("all ranked", 4.0, [0, 0, 0]), ("by error", 3.5, [-0.5, -1, 0.1]))
        ],
    }
    shown = gates.page(json.loads(json.dumps(tree)), "COMMAND")
    assert "| books | 64 | 2 | 4.000 | -0.500 (-1.000 … +0.100) |" in shown
    assert "| 0.0 | 1.00 | 0.50 | 2.00 |" in shown
    assert "* by error: 0.0. Mean change -0.500; worse by more than its interval: none." in shown
    tree["lost"][1]["less_all_ranked"] = [0.5, 0.1, 1]
    assert "+0.500; worse by more than its interval: books 64." in gates.page(tree, "COMMAND")
