"""The head pattern on a tiny model: what a mixed head is, the clip, a run, the file."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gates_tiny import config_at, records, written

from kvjax import load, weights_for
from kvjax.algebra import Policy
from kvjax.models import decoder
from kvjax.policies.duo import Duo
from train import distill, duo, gate_settings, gates, mesh

ROWS = {"needles": 1.0, "lengths": [256], "tokens": 256, "keys": [1]}


@pytest.fixture(autouse=True)
def generated_text(monkeypatch):
    monkeypatch.setenv("KVJAX_DATA", "/nowhere")


def test_a_mixed_head_is_alpha_of_full_attention_and_the_rest_of_streaming(tmp_path, tiny_folder):
    settings = gate_settings.parse(config_at(tmp_path, tiny_folder))
    model = load(tiny_folder)
    spec = model.spec
    net = gates.gated_model(settings, spec, mesh.layout(1, 1))
    tokens = np.random.default_rng(1).integers(0, 250, (1, 24)).astype(np.int32)
    alphas = [jnp.asarray([1.0, 0.25]), jnp.asarray([0.0, 0.7])]

    def attend(index, x, carry):
        b, t, n, h = x.q.shape
        q = x.q.reshape(b, t, spec.num_kv_heads, spec.groups, h)
        s = jnp.einsum("btkgh,bskh->bkgts", q, x.k) * h**-0.5
        i, j = jnp.arange(t)[:, None], jnp.arange(t)[None, :]
        full, near = i >= j, (i >= j) & ((i - j < net.window) | (j < 2))
        read = lambda seen: jnp.einsum(  # noqa: E731
            "bkgts,bskh->btkgh", jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1), x.v
        )
        a = alphas[index][:, None, None]
        return (a * read(full) + (1 - a) * read(near)).reshape(b, t, n, h), carry

    want, _ = decoder.forward(spec, model.params, tokens, jnp.arange(24)[None], attend, None)
    pattern = {"alpha": jnp.stack(alphas)}
    frozen = mesh.stacked(model.params, "float32")
    got, _ = distill.forward(net, frozen, pattern, tokens, duo.mixed_attention(net, sinks=2))
    np.testing.assert_allclose(got, want, atol=2e-4)
    all_full = {"alpha": jnp.ones((2, 2))}
    whole, _ = distill.forward(net, frozen, all_full, tokens, duo.mixed_attention(net, sinks=2))
    assert float(jnp.abs(whole - want).max()) > 1e-3


def test_only_where_answers_are_read_off_counts(tmp_path, tiny_folder):
    settings = gate_settings.parse(config_at(tmp_path, tiny_folder))
    model = load(tiny_folder)
    net = gates.gated_model(settings, model.spec, mesh.layout(1, 1))
    frozen = mesh.stacked(model.params, "float32")
    tokens = np.random.default_rng(2).integers(0, 250, (2, 24)).astype(np.int32)
    params = {"admission": [{"alpha": jnp.asarray([0.2, 0.6])}, {"alpha": jnp.asarray([0.4, 0.1])}]}
    # Row-major positions: scored are these five, answers are the first three.
    at = np.array([21, 22, 40, 15, 30])
    answer = np.array([True, True, True, False, False])
    loss, parts = duo.objective(net, 0.5, 2, frozen, params, {"tokens": tokens, "at": at, "answer": answer})
    goal = np.asarray(distill.teacher_states(net, frozen, tokens))
    pattern = {"alpha": jnp.stack([layer["alpha"] for layer in params["admission"]])}
    x, _ = distill.forward(net, frozen, pattern, tokens, duo.mixed_attention(net, sinks=2))
    error = ((np.asarray(distill.final_states(net, frozen, x)) - goal) ** 2).mean(-1).reshape(-1)
    np.testing.assert_allclose(parts["distill"], error[at[answer]].mean(), rtol=1e-4)
    np.testing.assert_allclose(loss, parts["distill"] + 0.5 * 0.325, rtol=1e-5)
    for others in (error.mean(), error[at].mean()):
        assert abs(float(parts["distill"]) / others - 1) > 0.02  # neither all tokens nor all scored ones


def test_updates_stay_between_nought_and_one():
    clip = duo.in_unit_interval()
    params = {"alpha": jnp.asarray([0.9, 0.1, 0.5])}
    update, _ = clip.update({"alpha": jnp.asarray([0.3, -0.3, 0.2])}, clip.init(params), params)
    np.testing.assert_allclose(params["alpha"] + update["alpha"], [1.0, 0.0, 0.7], atol=1e-6)


def test_a_run_goes_on_exactly_and_its_file_serves(tmp_path, tiny_folder, capsys):
    rate = {"peak": 0.1, "weight_decay": 0.0}
    plan = {"steps": 4, "check_every": 2}
    config = config_at(tmp_path, tiny_folder, data=ROWS, optimizer=rate, plan=plan)
    path = written(tmp_path, config)
    settings = gate_settings.read(path)
    short = gate_settings.dataclasses.replace(settings.plan, seconds=0.0)  # one step, then it stops
    duo.run(gate_settings.dataclasses.replace(settings, plan=short))
    assert records(tmp_path)[-1]["step"] == 1
    assert duo.main(["--config", str(path)]) == 0
    whole = tmp_path / "whole"
    straight = config_at(whole, tiny_folder, data=ROWS, optimizer=rate, plan=plan)
    assert duo.main(["--config", str(written(whole, straight))]) == 0
    stopped = [r for r in records(tmp_path) if not ("alpha_0_0" in r and r["step"] == 1)]
    assert stopped == records(whole)
    log = records(whole)
    assert log[0]["alpha"] == 1.0
    assert log[0]["distill"] == 0.0  # all heads full: the model itself
    assert log[-1]["alpha"] < 1.0
    file = tmp_path / "duo.safetensors"
    assert duo.main(["--config", str(path), "--export", str(file)]) == 0
    policy = Policy(admission=Duo(share=0.5, window=4), sinks=2)
    alphas = [layer["alpha"] for layer in weights_for(policy, load(tiny_folder), file)["admission"]]
    want = [[log[-1][f"alpha_{layer}_{head}"] for head in range(2)] for layer in range(2)]
    np.testing.assert_allclose(alphas, want, rtol=1e-6)
    capsys.readouterr()


def test_documents_have_no_answers(tmp_path, tiny_folder, capsys):
    config = config_at(tmp_path, tiny_folder, data={"kind": "documents"})
    assert duo.main(["--config", str(written(tmp_path, config))]) == 2
    assert "Use rows" in capsys.readouterr().err
