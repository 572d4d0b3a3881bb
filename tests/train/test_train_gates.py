"""Gates on a tiny model: what the loss is, what learns, exact resume, one device or eight, bad input."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from gates_tiny import config_at, records, written

from kvjax import load, weights_for
from kvjax.algebra import Policy
from kvjax.models import decoder
from kvjax.policies.duo import Duo
from kvjax.policies.wg_kv import WriteGate, gate_logits
from kvjax.weights import load_weights, read_weights
from train import distill, gate_rows, gate_settings, gates, mesh
from train.embedded import gate_card

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"KVJAX_DATA": "/nowhere", "JAX_PLATFORMS": "cpu"}
# As ``quick_compiles`` has it in this process: losses are compared to the last bit.
ENVIRONMENT |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
FOUR = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"


@pytest.fixture(autouse=True)
def generated_text(monkeypatch):
    monkeypatch.setenv("KVJAX_DATA", "/nowhere")


@pytest.fixture
def tiny(tmp_path, tiny_folder):
    """(settings, net, frozen weights, first gates, a batch)."""
    settings = gate_settings.parse(config_at(tmp_path, tiny_folder))
    model = gate_settings.backbone(settings)
    net = gates.gated_model(settings, model.spec, mesh.layout(1, 1))
    tokens = np.random.default_rng(0).integers(0, 250, (2, 40)).astype(np.int32)
    params = gates.initial_gates(settings, model.spec)
    return settings, net, mesh.stacked(model.params, "float32"), params, {"tokens": tokens}


def numpy_states(model, tokens, log_gates, window):
    """Hidden states after the final norm, by dense attention with the bias written out."""
    spec = model.spec

    def attend(index, x, carry):
        b, t, n, h = x.q.shape
        q = x.q.reshape(b, t, spec.num_kv_heads, spec.groups, h)
        s = jnp.einsum("btkgh,bskh->bkgts", q, x.k) * h**-0.5
        age = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
        z = gate_logits(log_gates[index], jnp.swapaxes(x.k_pre, 1, 2), jnp.swapaxes(x.k, 1, 2))
        bias = jnp.log(jax.nn.sigmoid(z) + 1e-6)[:, :, None, None, :]
        s = jnp.where(age >= 0, s + jnp.where(age >= window, bias, 0.0), -jnp.inf)
        out = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(s, axis=-1), x.v)
        return out.reshape(b, t, n, h), carry

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, _ = decoder.forward(spec, model.params, tokens, positions, attend, None)
    return np.asarray(decoder.norm(spec, model.params, "final_norm", x))


def test_the_student_is_dense_attention_with_the_bias_and_the_teacher_the_model(tiny, tiny_folder):
    settings, net, frozen, params, batch = tiny
    model, tokens = load(tiny_folder), batch["tokens"]
    got, z = gates._student(net, frozen, params, tokens)
    want = numpy_states(model, tokens, params["admission"], net.window)
    np.testing.assert_allclose(distill.final_states(net, frozen, got), want, atol=2e-4)
    assert z.shape == (2, 2, 2, 40)
    whole = distill.teacher_states(net, frozen, tokens)
    logits = np.asarray(whole) @ np.asarray(model.params["embed"]).T
    np.testing.assert_allclose(logits, decoder.dense_logits(model.spec, model.params, tokens), atol=2e-3)
    assert float(jnp.abs(whole - distill.final_states(net, frozen, got)).max()) > 1e-3
    # The metrics are those of the two forward passes.
    loss, parts = gates.objective(net, 0.5, "paper", frozen, params, batch)
    g = np.asarray(jax.nn.sigmoid(z))
    np.testing.assert_allclose(parts["distill"], ((want - np.asarray(whole)) ** 2).mean(), rtol=1e-3)
    np.testing.assert_allclose(parts["cost"], (g + g * (1 - g)).mean(), rtol=1e-5)
    np.testing.assert_allclose(loss, parts["distill"] + 0.5 * parts["cost"], rtol=1e-6)


def test_a_closed_gate_leaves_eps(tiny, tiny_folder):
    """log(g + eps): with every gate shut, an old key is still read at eps of its weight, not at g of it."""
    _, net, frozen, params, batch = tiny
    net = distill.dataclasses.replace(net, eps=1e-2)
    z = jnp.asarray([-40.0, -3.0, 0.0, 5.0])
    want = np.log(1 / (1 + np.exp(-np.asarray(z, np.float64))) + net.eps)
    np.testing.assert_allclose(distill.log_gate(z, net.eps), want, rtol=1e-5, atol=1e-6)

    model, tokens = load(tiny_folder), batch["tokens"]
    spec = model.spec
    shut = distill.gated_layer(net, lambda _, k_pre, k: jnp.full(k.shape[:3], -40.0))

    def attend(index, x, carry):
        b, t, n, h = x.q.shape
        q = x.q.reshape(b, t, spec.num_kv_heads, spec.groups, h)
        age = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
        e = jnp.exp(jnp.einsum("btkgh,bskh->bkgts", q, x.k) * h**-0.5)
        e = jnp.where(age >= 0, jnp.where(age >= net.window, net.eps * e, e), 0.0)
        out = jnp.einsum("bkgts,bskh->btkgh", e / e.sum(-1, keepdims=True), x.v)
        return out.reshape(b, t, n, h), carry

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    want, _ = decoder.forward(spec, model.params, tokens, positions, attend, None)
    got, _ = distill.forward(net, frozen, distill.stack_layers(params["admission"]), tokens, shut)
    np.testing.assert_allclose(got, want, atol=2e-4)
    without = distill.gated_layer(
        distill.dataclasses.replace(net, eps=1e-30), lambda _, k_pre, k: jnp.full(k.shape[:3], -40.0)
    )
    other, _ = distill.forward(net, frozen, distill.stack_layers(params["admission"]), tokens, without)
    assert float(jnp.abs(other - want).max()) > 1e-2  # eps can be told in the states


def test_the_hard_check_keeps_the_sinks_that_are_served(tiny):
    """With every gate shut, thresholded attention is that to the window and the first ``sinks`` tokens."""
    settings, net, frozen, params, batch = tiny
    assert net.sinks == settings.sinks == 4
    first = lambda _, k_pre, k: jnp.where(jnp.arange(k.shape[2]) < 4, 9.0, jnp.full(k.shape[:3], -9.0))  # noqa: E731
    shut = lambda _, k_pre, k: jnp.full(k.shape[:3], -9.0)  # noqa: E731
    leaves, tokens = distill.stack_layers(params["admission"]), batch["tokens"]
    none = distill.dataclasses.replace(net, sinks=0)
    want, _ = distill.forward(none, frozen, leaves, tokens, distill.gated_layer(none, first, 0.5))
    got, _ = distill.forward(net, frozen, leaves, tokens, distill.gated_layer(net, shut, 0.5))
    without, _ = distill.forward(none, frozen, leaves, tokens, distill.gated_layer(none, shut, 0.5))
    np.testing.assert_array_equal(got, want)
    assert float(jnp.abs(without - want).max()) > 1e-3
    soft = [distill.forward(n, frozen, leaves, tokens, distill.gated_layer(n, shut))[0] for n in (net, none)]
    np.testing.assert_array_equal(*soft)  # training is as it was


def test_open_gates_cost_nothing_and_thresholded_ones_are_a_mask(tiny):
    _, net, frozen, params, batch = tiny
    for layer in params["admission"]:
        layer["w2"], layer["b2"] = 0 * layer["w2"], 0 * layer["b2"] + 30.0
    shares = gates._measure(net, 0.1, frozen, params, batch["tokens"])
    assert float(shares["hard"]) == 0.0
    assert float(shares["soft"]) < 1e-8
    assert float(shares["kept"]) == 1.0
    for layer in params["admission"]:
        layer["b2"] = layer["b2"] * 0 - 3.0  # sigmoid(-3) = 0.047
    closed = gates._measure(net, 0.1, frozen, params, batch["tokens"])
    ajar = gates._measure(net, 0.04, frozen, params, batch["tokens"])
    assert float(closed["kept"]) == 0.0
    assert float(closed["hard"]) > 1e-3
    assert float(ajar["kept"]) == 1.0
    assert float(ajar["hard"]) == 0.0
    np.testing.assert_allclose(closed["gate"], 1 / (1 + np.exp(3.0)), rtol=1e-5)


def test_drawn_gates_are_hard_concrete_and_the_loss_knows_their_probability(tiny):
    """Section 2.2 of arXiv 1712.01312 in NumPy, with the noise that the key gives."""
    _, net, frozen, params, batch = tiny
    z, key = jnp.linspace(-6.0, 6.0, 4001), jax.random.key(3)
    noise = np.asarray(jax.random.logistic(key, z.shape), np.float64)
    s = 1 / (1 + np.exp(-(np.asarray(z, np.float64) + noise) / (2 / 3)))
    drawn = np.asarray(distill.concrete_gate(z, key))
    np.testing.assert_allclose(drawn, np.clip(s * 1.2 - 0.1, 0, 1), atol=2e-6)
    for at in (-1.0, 0.0, 2.0):
        sample = distill.concrete_gate(jnp.full(20000, at), key)
        np.testing.assert_allclose(np.mean(sample > 0), distill.open_probability(at), atol=0.01)

    net = distill.dataclasses.replace(net, concrete=True)
    loss, parts = gates.objective(net, 0.5, "paper", frozen, params, batch)
    _, z = gates._student(net, frozen, params, batch["tokens"], draw=True)
    np.testing.assert_allclose(parts["cost"], np.mean(distill.open_probability(z)), rtol=1e-5)
    again, _ = gates.objective(net, 0.5, "paper", frozen, params, batch)
    assert float(loss) == float(again)  # the draw follows from the batch alone
    soft, _ = gates._student(net, frozen, params, batch["tokens"])
    other = distill.final_states(net, frozen, soft) - distill.teacher_states(net, frozen, batch["tokens"])
    assert abs(float(parts["distill"]) - float(jnp.mean(other**2))) > 1e-6  # gates are really drawn


def test_a_slot_of_the_window_is_paid_for_anyway():
    z = jnp.asarray([[[[-30.0, 0.0, 30.0, -30.0]]]])
    #   t     0     1     2     3      window 2, N = 4: o = 1/2, 2/3, 1, 1
    #   c     0    .75    1     0
    want = np.mean([0.5 + 0.5 * 0, 2 / 3 + 1 / 3 * 0.75, 1, 1])
    np.testing.assert_allclose(distill.gate_cost(distill.soft_slots(z), 2, "window"), want, rtol=1e-6)
    np.testing.assert_allclose(
        distill.gate_cost(distill.soft_slots(z), 2, "paper"), np.mean([0, 0.75, 1, 0]), atol=1e-6
    )
    mean, over = distill.kept_shares(z, 2, 0.1)
    np.testing.assert_allclose([mean, over], [0.25, 0.5], atol=1e-6)


def test_training_lowers_the_loss_moves_only_gates_and_exports(tmp_path, tiny_folder, capsys):
    config = written(tmp_path, config_at(tmp_path, tiny_folder, plan={"steps": 20, "log_every": 1}))
    before = (tiny_folder / "model.safetensors").read_bytes()
    assert gates.main(["--config", str(config)]) == 0
    log = [r for r in records(tmp_path) if "loss" in r]
    assert np.mean([r["loss"] for r in log[-3:]]) < 0.9 * np.mean([r["loss"] for r in log[:3]])
    assert log[-1]["gate"] < log[0]["gate"]
    checks = [r for r in records(tmp_path) if "kept_64" in r]
    assert set(checks[0]) == {"step", "level", "soft_64", "hard_64", "gate_64", "kept_64"}
    file = tmp_path / "out" / "default.safetensors"
    assert gates.main(["--config", str(config), "--export", str(file)]) == 0
    assert (tiny_folder / "model.safetensors").read_bytes() == before
    model = load(tiny_folder)
    layers = load_weights(file, model).layers
    first = gates.initial_gates(gate_settings.read(config), model.spec)
    assert not np.allclose(layers[0]["w1"], first["admission"][0]["w1"])
    policy = Policy(admission=WriteGate(tau=0.1, window=4))
    assert weights_for(policy, model, file)["admission"][1]["b2"].shape == (2,)
    assert file.with_suffix(".jsonl").read_text().count("\n") == len(records(tmp_path))
    if importlib.util.find_spec("matplotlib"):
        assert file.with_suffix(".png").stat().st_size > 1000
    else:
        assert "pip install -e '.[plot]'" in capsys.readouterr().out
    capsys.readouterr()


@pytest.mark.slow  # the loop is that of test_pretrain and test_train_duo, which kill it too
def test_a_killed_run_goes_on_with_the_same_losses(tmp_path, tiny_folder):
    config = written(tmp_path, config_at(tmp_path, tiny_folder, optimizer={"accumulate": 2}))
    command = [sys.executable, "-m", "train.gates", "--config", str(config)]
    victim = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "default" / "log.jsonl"
    while victim.poll() is None:
        if log.exists() and '"step": 3' in log.read_text():
            victim.send_signal(signal.SIGKILL)
            break
    assert victim.wait(60) == -signal.SIGKILL, victim.stderr.read()
    assert records(tmp_path)[-1]["step"] < 6
    assert gates.main(["--config", str(config)]) == 0

    straight = tmp_path / "straight"
    whole = written(straight, config_at(straight, tiny_folder, optimizer={"accumulate": 2}))
    assert gates.main(["--config", str(whole)]) == 0
    assert records(tmp_path) == records(straight)  # losses and checks, to the last bit
    assert [r["step"] for r in records(tmp_path) if "loss" in r] == [1, 2, 3, 4, 5, 6]


MESHES = """
import jax, numpy as np, sys
from kvjax import load
from train import gates, gate_settings, mesh
settings = gate_settings.read(gate_settings.Path(sys.argv[1]))
model, found = gate_settings.backbone(settings), []
for data, tensor in ((2, 2), (1, 1)):
    layout = mesh.layout(data, tensor)
    net = gates.gated_model(settings, model.spec, layout)
    frozen, params = layout.frozen(model.params, "float32"), gates.initial_gates(settings, model.spec)
    tokens = np.random.default_rng(0).integers(0, 250, (2, 16)).astype(np.int32)
    run = jax.jit(jax.value_and_grad(gates.make_loss(net, settings, frozen), has_aux=True))
    placed = jax.device_put(params, layout.gates(params))
    assert len(placed["admission"][0]["w1"].sharding.device_set) == data * tensor
    found.append(jax.device_get(run(placed, layout.batch({"tokens": tokens}))))
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), *found)
"""


@pytest.mark.slow
def test_four_devices_give_the_loss_and_gradients_of_one(tmp_path, tiny_folder):
    words = [sys.executable, "-c", MESHES, str(written(tmp_path, config_at(tmp_path, tiny_folder)))]
    subprocess.run(words, cwd=ROOT, env=ENVIRONMENT | {"XLA_FLAGS": FOUR}, check=True)


@pytest.mark.slow
def test_a_run_over_four_devices_has_the_losses_of_one_device(tmp_path, tiny_folder):
    flags, paths = {"XLA_FLAGS": FOUR}, []
    for data, tensor in ((2, 2), (1, 1)):
        folder = tmp_path / f"{data}x{tensor}"
        parts = {"mesh": {"data": data, "tensor": tensor}, "plan": {"steps": 2}}
        config = config_at(folder, tiny_folder, **parts)
        config["model"]["remat"] = data > 1
        paths.append(str(written(folder, config)))
    both = f"from train import gates\nassert not any(gates.main(['--config', p]) for p in {paths})"
    subprocess.run(
        [sys.executable, "-c", both], cwd=ROOT, env=ENVIRONMENT | flags, check=True, capture_output=True
    )
    steps = [r["step"] for r in records(tmp_path / "2x2") if "loss" in r]
    assert steps == [1, 2]
    for many, one in zip(records(tmp_path / "2x2"), records(tmp_path / "1x1"), strict=True):
        assert many.keys() == one.keys()
        for name in one:
            np.testing.assert_allclose(many[name], one[name], rtol=2e-4, atol=1e-6, err_msg=name)


def test_weights_and_batches_are_cut_as_the_mesh_says(tiny_folder):
    shapes = mesh.stacked_shapes(load(tiny_folder).spec, "bfloat16")
    stacked = mesh.stacked(load(tiny_folder).params, "bfloat16")
    assert jax.tree.map(lambda x: (x.shape, x.dtype), stacked) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    where = mesh.layout(1, 1).backbone(shapes)
    for name, leaf in where["layers"].items():
        cut = [axis for axis in leaf.spec if axis is not None]
        assert bool(cut) == (not name.endswith("norm")), name


def test_rows_may_be_of_the_second_models_kinds(tmp_path, tiny_folder):
    config = config_at(tmp_path, tiny_folder, data={"lengths": [384], "tokens": 768})
    for kind, asks in (("facts", True), ("books", False)):
        config["data"]["kinds"] = {kind: 1.0}
        have = gate_rows.read_data(gate_settings.parse(config), tiny_folder)
        assert have.train[0]["tokens"].shape == (2, 384)
        assert have.train[0]["answer"].any() == asks
    config["data"]["kinds"] = {"fact": 1.0}
    with pytest.raises(gate_settings.ConfigError, match=r"data.kinds: .*names no kind of row: fact\."):
        gate_rows.read_data(gate_settings.parse(config), tiny_folder)


def test_a_run_knows_its_text_and_goes_on_with_no_other(tmp_path, tiny_folder, monkeypatch):
    settings = gate_settings.parse(config_at(tmp_path, tiny_folder))
    assert gate_rows.recorded_text(settings) == "unknown"
    monkeypatch.setenv("KVJAX_DATA", str(tmp_path))
    assert gate_rows.record_text(settings) == gate_rows.recorded_text(settings) == "stand-in"
    (tmp_path / "books" / "train").mkdir(parents=True)
    with pytest.raises(gate_settings.ConfigError, match="began with the text 'stand-in'; here is 'books'"):
        gate_rows.record_text(settings)
    assert gate_rows.recorded_text(settings) == "stand-in"


def test_documents_come_long_enough_behind_the_instruction(tmp_path, tiny_folder):
    texts = tmp_path / "texts"
    texts.mkdir()
    lines = [json.dumps({"text": chr(97 + i % 26) * (10 + 9 * i)}) for i in range(60)]
    (texts / "a.jsonl").write_text("\n".join(lines))
    data = {
        "kind": "documents",
        "folder": str(texts),
        "instruction": "Read:\n",
        "lengths": [64, 128],
        "shares": [1, 1],
    }
    settings = gate_settings.parse(
        config_at(tmp_path, tiny_folder, data=data, check={"lengths": [128], "rows": 3})
    )
    have = gate_rows.read_data(settings, tiny_folder)
    head = settings.data["instruction"].encode()
    seen = set()
    for i in range(6):
        tokens = have.train[i]["tokens"]
        assert tokens.shape in ((4, 64), (2, 128))
        seen.add(tokens.shape)
        np.testing.assert_array_equal(have.train[i]["tokens"], tokens)
        for row in tokens:
            assert len(set(row[len(head) :].tolist())) == 1  # one document, whole
            assert len(set(row[: len(head)].tolist())) > 3
    assert len(seen) == 2
    assert have.check[128].shape == (3, 128)
    trained = {int(row[-1]) for i in range(6) for row in have.train[i]["tokens"]}
    assert trained
    settings.data["lengths"] = [4096]
    with pytest.raises(gate_settings.ConfigError, match="no document"):
        gate_rows.read_data(settings, tiny_folder)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"loss": {"lambdas": {"default": -0.1}}}, ["loss.lambdas.default", "-0.1", "0 or more"]),
        ({"loss": {"lambdas": {"default": "much"}}}, ["loss.lambdas.default", "'much'", "not a number"]),
        ({"loss": {"cost": "free"}}, ["loss.cost", "'free'", "paper, window"]),
        ({"gate": {"tau": 1.0}}, ["gate.tau", "1.0", "below 1"]),
        ({"gate": {"tau": 0}}, ["gate.tau", "above 0"]),
        ({"gate": {"window": 0}}, ["gate.window", "0", "1 or more"]),
        ({"gate": {"windows": 4}}, ["windows"]),
        ({"gate": {"eps": 0}}, ["gate.eps"]),
        ({"optimizer": {"accumulate": 0}}, ["optimizer.accumulate"]),
        ({"data": {"kind": "web"}}, ["data.kind", "'web'"]),
        ({"data": {"shares": [1, 2]}}, ["data.lengths"]),
        (
            {"data": {"kind": "documents", "folder": "/nowhere", "instruction": ""}},
            ["data.folder", "/nowhere"],
        ),
        ({"mesh": {"data": 3}}, ["data.tokens", "4 rows", "mesh.data 3"]),
        ({"mesh": {"data": 4, "tensor": 2}}, ["needs 8 devices", "xla_force_host_platform_device_count"]),
        ({"model": {"source": "/nowhere/model"}}, ["/nowhere/model"]),
        ({"plan": {"steps": 0}}, ["plan.steps"]),
    ],
)
def test_bad_input_is_one_sentence_and_code_two(tmp_path, tiny_folder, capsys, sections, says):
    tree = config_at(tmp_path, tiny_folder)
    for name, section in sections.items():
        tree[name] = tree[name] | section
    config = written(tmp_path, tree)
    assert gates.main(["--config", str(config)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for words in says:
        assert words in err
    assert not (tmp_path / "run").exists()


def test_other_bad_calls(tmp_path, tiny_folder, capsys):
    config = written(tmp_path, config_at(tmp_path, tiny_folder))
    calls = {
        ("--config", str(tmp_path / "no.yaml")): "cannot be read",
        ("--config", str(config), "--strength", "huge"): "none of the config's: default, none",
        ("--config", str(config), "--export", str(tmp_path / "x.safetensors")): "Train first",
        ("--config", str(config), "--compile", "v1e:9x9"): "none of v5e",
    }
    for words, says in calls.items():
        assert gates.main(list(words)) == 2
        assert says in capsys.readouterr().err
    bare = written(tmp_path / "bare", {"name": "x", "loss": {"cost": "paper", "lambdas": {"default": 1}}})
    assert gates.main(["--config", str(bare)]) == 2
    assert "lacks" in capsys.readouterr().err


def test_sliding_layers_and_heads_that_do_not_divide_are_refused(tiny_folder):
    spec = load(tiny_folder).spec
    with pytest.raises(ValueError, match="sliding-window"):
        distill.check_model(dataclasses.replace(spec, windows=(8, None)), 1)
    with pytest.raises(ValueError, match="2 KV heads"):
        distill.check_model(spec, 4)


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "configs" / "gates").glob("*.yaml")))
def test_every_config_parses_for_every_lambda(name):
    path = ROOT / "configs" / "gates" / name
    for strength in yaml.safe_load(path.read_text())["loss"]["lambdas"]:
        settings = gate_settings.read(path, strength)
        assert settings.lam > 0
        if settings.spec is not None:
            distill.check_model(settings.spec, settings.mesh[1])
            held = jax.eval_shape(lambda s=settings: gates.initial_gates(s, s.spec))
            count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(held))
            backbone = sum(
                int(np.prod(x.shape)) for x in jax.tree.leaves(mesh.stacked_shapes(settings.spec, "bfloat16"))
            )
            assert 0.001 < count / backbone < 0.02


def test_shipped_gates_are_the_embedded_models_and_the_card_is_their_logs(monkeypatch):
    monkeypatch.chdir(ROOT)
    model, folder = load(), Path("kvjax/assets/embedded/weights")
    config = yaml.safe_load((ROOT / "configs/gates/embedded.yaml").read_text())
    kept = []
    for name, lam in config["loss"]["lambdas"].items():
        notes = read_weights(ROOT / folder / f"write_gate/{name}.safetensors").notes
        assert (float(notes["lambda"]), int(notes["step"])) == (lam, config["plan"]["steps"])
        assert int(notes["window"]) == config["gate"]["window"]
        weights_for(Policy(admission=WriteGate(tau=0.1, window=32)), model, name)
        kept.append(
            gate_card.last_check(gate_card.records(ROOT / folder / f"write_gate/{name}.jsonl"))["kept_1024"]
        )
    assert kept == sorted(kept, reverse=True)
    weights_for(Policy(admission=Duo(share=0.5, window=32), sinks=4), model)
    configs = Path("configs/gates")
    text = gate_card.card(configs / "embedded.yaml", configs / "duo-embedded.yaml", folder)
    assert text == (ROOT / folder / "README.md").read_text()


@pytest.mark.parametrize("trainer", ["gates", "duo", "ranker.__main__", "phi.__main__", "traces"])
def test_a_trainer_imports_nothing_of_the_embedded_models_recipe(trainer):
    code = f"import sys, train.{trainer}; print(*[name for name in sys.modules if name.startswith('train')])"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True, text=True
    )
    modules = run.stdout.split()
    assert f"train.{trainer}" in modules
    assert not [name for name in modules if name.startswith("train.embedded")]
