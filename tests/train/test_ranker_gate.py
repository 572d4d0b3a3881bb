"""Heads that rankers leave to chance: errors after W_o by NumPy, and what becomes of a file of rankers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from ranker_tiny import config_at, generated_text  # noqa: F401

import kvjax
from kvjax.policies import kvp
from kvjax.weights import read_weights, save_weights
from train import trace_rows
from train.ranker import gate, settings
from train.ranker.objective import Task

SIZE, T, A, G, H, D, F = 40, 52, 3, 2, 8, 5, 6
AT = np.asarray([40, 43, 44, 48, 50, 51], np.int32)


def numpy_error(q, k, v, wo, score, sinks: int, recent: int, softcap) -> float:
    """Of one KV head: a query and a budget at a time."""
    ranked = np.arange(sinks, SIZE - recent)
    best = ranked[np.argsort(-score[ranked], kind="stable")]
    total = []
    for share in gate.SHARES:
        gone = best[int(np.floor(share * len(ranked) + 0.5)) :]
        for f, at in enumerate(AT):
            moved = np.zeros(D)
            for g in range(G):
                s = k[: at + 1] @ q[g, f] / np.sqrt(H)
                s = s if softcap is None else softcap * np.tanh(s / softcap)
                for sign, dropped in ((-1, []), (1, gone)):
                    e = np.exp(s - s.max())
                    e[dropped] = 0
                    moved += sign * (e / e.sum()) @ v[: at + 1] @ wo[g]
            total.append(moved @ moved)
    return float(np.mean(total))


def drawn(seed: int) -> list[np.ndarray]:
    """k, v, q, W_o and scores of tokens."""
    rng = np.random.default_rng(seed)
    shapes = ((A, T, H), (A, T, H), (A, G, F, H), (A, G, H, D), (A, T))
    return [rng.normal(0, 1.5, shape).astype(np.float32).astype(float) for shape in shapes]


def batch_of(k, v, q) -> dict[str, np.ndarray]:
    batch = {name: x[None].astype(np.float32) for name, x in (("k", k), ("v", v), ("q", q))}
    return batch | {"at": AT[None], "size": np.asarray([SIZE], np.int32)}


def test_the_error_is_that_of_the_groups_output_after_the_projection():
    k, v, q, wo, score = drawn(0)
    batch = batch_of(k, v, q)
    for softcap in (None, 2.0):
        agent = settings.Agent(sinks=3, recent=5)
        task = Task(agent=agent, method=settings.Method(), softcap=softcap)
        scores = {"one": score[None], "other": -score[None]}
        actual = jax.jit(gate.errors, static_argnums=0)(task, batch, scores, wo.astype(np.float32))
        for name, sign in (("one", 1), ("other", -1)):
            right = [numpy_error(q[a], k[a], v[a], wo[a], sign * score[a], 3, 5, softcap) for a in range(A)]
            np.testing.assert_allclose(actual[name], right, rtol=1e-4)


def test_entropy_and_cost_of_a_head_are_numpys():
    k, v, q, wo, _ = drawn(1)
    agents = kvp.initial(jax.random.key(3), A, H, 1, hidden=8)[0]
    batch, task = batch_of(k, v, q), Task(agent=settings.Agent(sinks=3, recent=5), method=settings.Method())
    actual = gate.signals(task, agents, batch | {"seed": np.zeros(1, np.uint32)}, wo)
    scores = np.asarray(kvp.scores(agents, batch["k"], None, batch["v"], jnp.arange(T)[None]))[0]
    ranked = np.arange(3, SIZE - 5)
    for a in range(A):
        entropies, worth = [], np.zeros(T)
        for f, at in enumerate(AT):
            each = []
            for g in range(G):
                e = np.exp(k[a, : at + 1] @ q[a, g, f] / np.sqrt(H))
                each.append(e / e.sum())
                entropies.append(-(each[-1] * np.log(each[-1])).sum())
            worth[: at + 1] += np.max(each, axis=0)
        np.testing.assert_allclose(actual["entropy"][a], np.mean(entropies), rtol=1e-4)
        best = ranked[np.argsort(-scores[a, ranked], kind="stable")]
        lost = [worth[best[n:]].sum() / worth[ranked].sum() for n in range(1, len(ranked))]
        np.testing.assert_allclose(actual["cost"][a], np.mean(lost), rtol=1e-4)
        right = numpy_error(q[a], k[a], v[a], wo[a], scores[a], 3, 5, None)
        np.testing.assert_allclose(actual["learned"][a], right, rtol=1e-3)


def test_a_file_gets_its_gates_and_keeps_the_rest(tmp_path, tiny_folder, capsys, monkeypatch):
    monkeypatch.setattr(gate, "SEQUENCES", 3)
    monkeypatch.setattr(gate, "ENTROPY", 3.17)
    model, path = kvjax.load(tiny_folder), config_at(tmp_path, tiny_folder)
    layers = kvp.initial(jax.random.key(0), 2, 8, 2, hidden=16)
    file, out = tmp_path / "bare.safetensors", tmp_path / "gated.safetensors"
    save_weights(file, model, kvp.LearnedRanker(2, 6), layers, notes={"step": 7})
    assert gate.main(["--config", str(path), "--file", str(file), "--out", str(out)]) == 0
    before, after = read_weights(file), read_weights(out)
    heads = gate.measured(settings.read(path), model, before.layers, 3)
    on = heads["entropy"] <= 3.17
    assert 0 < on.sum() < 4
    off = " ".join(f"{layer}.{head}" for layer, head in np.argwhere(~on))
    assert f"leaves to chance: {off}" in capsys.readouterr().out
    assert (after.notes["chance"], after.notes["step"]) == (off, "7")
    for layer, (bare, gated) in enumerate(zip(before.layers, after.layers)):
        np.testing.assert_array_equal(gated.pop("gate"), on[layer])
        assert bare.keys() == gated.keys()
        assert all((bare[name] == gated[name]).all() for name in bare)
    assert gate.main(["--config", str(path), "--file", str(out)]) == 0, "gates are found again in place"
    assert read_weights(out).layers[0].keys() == after.layers[0].keys() | {"gate"}


def test_heads_are_judged_on_no_sequence_of_the_traces(tmp_path, tiny_folder):
    chosen, model = settings.read(config_at(tmp_path, tiny_folder)), kvjax.load(tiny_folder)
    drawn = trace_rows.sequences(chosen, model.text)
    stored = {drawn.draw(i)[1].tobytes() for i in range(13)}
    tokens = [drawn.draw(13 + i)[1] for i in range(3)]
    assert not stored & {one.tobytes() for one in tokens}
    for batch, ids in zip(gate.sequences(chosen, model, 3), tokens):
        assert batch["k"].shape == (1, 4, len(ids), 8)
        assert 0 < batch["q"].shape[3] <= chosen.method.queries
        assert (batch["at"][0] >= batch["size"][0]).all()
