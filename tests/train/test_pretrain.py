"""Training of the embedded model, tiny: exact resume, pure batches, splits, the constructed start."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx

from kvjax.models import decoder, module
from train import loop, needles, rows, text
from train.embedded import data, heads, pretrain, recall, start
from train.embedded.setup import initial, model_spec, setup

ROOT = Path(__file__).resolve().parents[2]

CONFIG = {
    "name": "tiny",
    "seed": 0,
    "model": {
        "vocab_size": 384,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "model_dim": 128,
        "mlp_dim": 64,
        "max_positions": 256,
        "theta": 1e6,
        "dtype": "float32",
    },
    "optimizer": {
        "cycles": [
            {"until": 3, "peak": 1e-3, "final": 1e-5, "warmup": 1, "decay": 1},
            {"until": 6, "peak": 5e-4, "final": 0.0, "warmup": 1, "decay": 2},
        ],
        "b2": 0.95,
        "weight_decay": 0.05,
        "clip": 1.0,
    },
    "mix": {
        "tokens": 512,
        "levels": [
            {"lengths": [128], "shares": [1.0], "scored": 64},
            {
                "lengths": [128],
                "shares": [1.0],
                "scored": 64,
                "tokens": 256,
                "needles": 0.3,
                "tasks": 0.5,
                "magic": 0.5,
                "clash": 0.5,
                "bridge": 0.5,
                "silent": [[0.5, 0, 0, 0], [0, 0, 0, 0.5]],
                "families": {"pairs": 1},
            },
        ],
    },
    "plan": {"steps": 6, "log_every": 1, "check_every": 2, "save_every": 1},
    "check": {
        "count": 5,
        "gates": [{"length": 128, "one": 0.0, "four": 0.0}],
        "target": 1.1,
        "lengths": [128, 256],
    },
}


def config_at(folder: Path, **plan: int) -> dict:
    config = copy.deepcopy(CONFIG)
    config["folder"], config["tokenizer"] = str(folder / "run"), str(folder / "tokenizer.json")
    config["plan"] |= plan
    return config


@pytest.fixture(scope="module")
def have(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("KVJAX_DATA", "/nowhere")  # the generated stand-in, on every machine
    yield setup(config_at(tmp_path_factory.mktemp("tiny")))
    patch.undo()


def mix() -> data.Mix:
    short = data.Level(lengths=(128,), shares=(1.0,), scored=128)
    mixed = data.Level(lengths=(128, 256), shares=(0.5, 0.5), scored=128, magic=0.5)
    return data.Mix(seed=0, tokens=512, levels=(short, mixed))


def records(folder: Path) -> list[dict]:
    lines = (folder / "run" / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in loop.CLOCK} for line in lines]


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_losses(tmp_path, have):
    config = config_at(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    environment = os.environ | {"KVJAX_DATA": "/nowhere", "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # as ``quick_compiles`` has it in this process
    command = [sys.executable, "-m", "train.embedded.pretrain", "--config", str(tmp_path / "config.yaml")]
    victim = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "log.jsonl"
    while victim.poll() is None:
        if log.exists() and '"step": 3' in log.read_text():
            victim.send_signal(signal.SIGKILL)
            break
    assert victim.wait(60) == -signal.SIGKILL, victim.stderr.read()
    before = records(tmp_path)
    assert before[-1]["step"] < 6

    pretrain.run(dataclasses.replace(have, config=config))
    straight = config_at(tmp_path) | {"folder": str(tmp_path / "straight" / "run")}
    pretrain.run(dataclasses.replace(have, config=straight))
    whole = records(tmp_path / "straight")
    assert records(tmp_path) == whole  # losses, checks and levels, to the last bit
    assert [r["step"] for r in whole if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert {r["level"] for r in whole} == {0, 1}


def test_a_batch_depends_on_seed_level_and_index_only(have):
    first, second = (data.batches(have.train, mix(), 1, 50) for _ in range(2))
    [second[i] for i in range(7)]
    for a, b in zip(jax.tree.leaves(first[7]), jax.tree.leaves(second[7])):
        np.testing.assert_array_equal(a, b)
    other = data.batches(have.train, mix(), 0, 50)[7]["tokens"]
    assert not np.array_equal(first[8]["tokens"].ravel()[:128], first[7]["tokens"].ravel()[:128])
    assert not np.array_equal(other.ravel()[:128], first[7]["tokens"].ravel()[:128])


def test_key_words_of_training_and_evaluation_are_disjoint(have):
    trained = set(have.train.short + have.train.long)
    held = set(have.held.short + have.held.long)
    assert trained
    assert held
    assert not trained & held
    assert 0.1 < len(held) / len(held | trained) < 0.3


def test_the_loss_marks_exactly_the_answers(have):
    rng = np.random.default_rng(0)
    tokens, weight = rows.needle_row(rng, have.train, 256, keys=3, questions=2)
    assert tokens.shape == weight.shape == (256,)
    assert tokens[0] == text.BOS
    written = have.tokenizer.decode(tokens.tolist())
    numbers = have.tokenizer.decode(tokens[weight == rows.ANSWER].tolist()).split()
    assert len(numbers) == 2
    for number in numbers:
        assert number.isdigit()
        assert len(number) == rows.DIGITS
        assert written.count(f"is {number}") == 2  # once where it hides, once where it is asked for
    scored = data.choose_scored(rng, tokens[None], weight[None], 64)
    answers = scored["target"][scored["answer"]]
    np.testing.assert_array_equal(np.sort(answers), np.sort(tokens[weight == rows.ANSWER]))
    np.testing.assert_array_equal(scored["target"], tokens[scored["at"] + 1])
    np.testing.assert_allclose(scored["weight"].sum(), weight[1:].sum(), rtol=1e-5)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_stands_where_it_is_told(have, depth):
    rng = np.random.default_rng(1)
    tokens, _ = rows.needle_row(rng, have.train, 256, keys=1, depth=depth, snap=False)
    match = re.search(r"number for (\S+) is (\d+)\.", have.tokenizer.decode(tokens.tolist()))
    key, value = match.groups()
    needle = have.train.encode(f" The secret number for {key} is {value}.")
    tail = have.train.encode(f" What is the secret number for {key}? The secret number for {key} is {value}")
    at = 1 + int(depth * (256 - 1 - len(needle) - len(tail)))
    assert tokens[at : at + len(needle)].tolist() == needle
    assert tokens[-len(tail) :].tolist() == tail


@pytest.mark.slow
def test_the_constructed_start_looks_one_back_and_copies(have):
    spec = have.spec
    params = start.construct(spec, module.leaves(module.Decoder(spec, rngs=nnx.Rngs(params=0))), 0)
    block = np.random.default_rng(2).integers(3, spec.vocab_size, 40)
    tokens = jnp.asarray(np.concatenate([[text.BOS], block, block]))[None]
    positions = jnp.arange(tokens.shape[1])[None]
    attend = decoder.dense_attend(spec)
    weights = []

    def look(index, heads, carry):
        s = jnp.einsum("th,sh->ts", heads.q[0, :, 0], heads.k[0, :, 0]) * spec.head_dim**-0.5
        causal = jnp.tril(jnp.ones(s.shape, bool))
        weights.append(jax.nn.softmax(jnp.where(causal, s, -jnp.inf), axis=-1))
        return attend(index, heads, carry)

    decoder.forward(spec, params, tokens, positions, look, None)
    assert float(jnp.diagonal(weights[0], offset=-1).mean()) > 0.6  # the biases alone: 0.72
    # Layer 1: the second time a token of the block is met, what followed it the first time stands out.
    #   <bos> a b c ... a b c ...      query at the second a, key at the first b: 39 back
    to_successor = jnp.diagonal(weights[1], offset=-39)[2:40].mean()
    elsewhere = 1 / 60
    assert float(to_successor) > 5 * elsewhere


def test_recall_refuses_rows_too_short_for_their_needles(have):
    with pytest.raises(ValueError, match="fewer keys"):
        needles.needle_recall(lambda tokens, at: None, have.held, length=64, keys=4, count=5, seed=0)


def test_the_start_refuses_a_model_it_does_not_fit(have):
    spec = model_spec(CONFIG["model"] | {"num_layers": 1})
    with pytest.raises(ValueError, match="num_layers >= 2"):
        start.construct(spec, module.leaves(module.Decoder(spec, rngs=nnx.Rngs(params=0))), 0)


@pytest.mark.slow
def test_the_module_has_the_decoders_tree(have):
    model = module.Decoder(have.spec, rngs=nnx.Rngs(params=3))
    got = jax.tree.map(jnp.shape, module.leaves(model), is_leaf=lambda x: hasattr(x, "shape"))
    assert got == decoder.shapes(have.spec)
    tokens = jnp.asarray([[1, 5, 9, 7]])
    want = decoder.dense_logits(have.spec, module.leaves(model), tokens)
    np.testing.assert_array_equal(model(tokens), want)


def test_blocked_attention_is_dense_attention(have):
    params = initial(have.spec, 0)
    tokens = jnp.asarray(np.random.default_rng(4).integers(3, have.spec.vocab_size, (2, 131)))
    got = recall.scored_logits(have.spec, params, tokens, jnp.arange(2 * 131)).reshape(2, 131, -1)
    want = decoder.dense_logits(have.spec, params, tokens)
    np.testing.assert_allclose(got, want, atol=1e-5 * float(jnp.abs(want).max()))  # order of sums differs


def test_rates_rise_stay_and_fall_in_every_cycle():
    cycles = [
        {"until": 10, "peak": 1.0, "final": 0.1, "warmup": 2, "decay": 4},
        {"until": 20, "peak": 0.5, "final": 0.0, "warmup": 5, "decay": 5},
    ]
    rate = [float(pretrain.schedule(cycles)(step)) for step in range(21)]
    # step      0    1     2 .. 6      7      8     9      10
    want = [
        0.1,
        0.55,
        *[1.0] * 5,
        0.775,
        0.55,
        0.325,
        0.1,
        0.18,
        0.26,
        0.34,
        0.42,
        0.5,
        0.4,
        0.3,
        0.2,
        0.1,
        0.0,
    ]
    np.testing.assert_allclose(rate, want, atol=1e-6)


@pytest.mark.slow
def test_worker_processes_make_the_same_batches(have):
    ahead = loop._prefetched(data.batches(have.train, mix(), 1, 50), 3, 2)
    in_process = data.batches(have.train, mix(), 1, 50)
    for step in range(3, 6):
        jax.tree.map(np.testing.assert_array_equal, next(ahead), in_process[step])


def test_numbers_of_few_figures(have):
    rng = np.random.default_rng(3)
    tokens, weight = rows.needle_row(rng, have.train, 512, keys=4, questions=4, figures=2)
    numbers = have.tokenizer.decode(tokens[weight == rows.ANSWER].tolist()).split()
    assert len(set("".join(numbers))) <= 2


def test_an_answer_counts_only_whole():
    #                 "a  b" " c"      "d"
    answer = np.array([0, 1, 1, 1, 0, 0, 1], bool)
    begins = np.array([1, 1, 0, 1, 0, 0, 0], bool)
    right = np.array([0, 1, 0, 1, 0, 0, 1], bool)
    assert recall._share_right(answer, right, begins) == pytest.approx(2 / 3)
    assert recall._share_right(answer, right, np.zeros(7, bool)) == pytest.approx(1 / 2)


@pytest.mark.slow
def test_recall_of_a_task_is_that_of_greedy_decoding(have):
    params = initial(have.spec, 0)

    def row(rng, source, length):
        """Random ids that end in what the model says next, or (half of the rows) in another id."""
        tokens = rng.integers(3, 384, length).astype(np.int32)
        says = int(decoder.dense_logits(have.spec, params, tokens[None])[0, -2].argmax())
        tokens[-1] = says if rng.random() < 0.5 else 3 + (says - 2) % 381
        said.append(int(tokens[-1]) == says)
        weight = np.where(np.arange(length) == length - 1, rows.ANSWER, 0.1).astype(np.float32)
        return tokens, weight

    said: list[bool] = []
    score = functools.partial(recall.nll, have.spec, params)
    got = recall.task_recall(score, row, have.held, length=128, count=8, seed=0)
    assert got == np.mean(said)
    assert 0 < got < 1


@pytest.mark.slow
def test_recomputed_blocks_give_the_same_gradients(have):
    params = initial(have.spec, 0, 0.05)
    batch = data.batches(have.train, mix(), 0, 50)[0]
    losses = [
        pretrain.make_loss(have.spec, "float32", block=b, remat=r) for b, r in ((128, False), (64, True))
    ]
    (a, ga), (b, gb) = (jax.value_and_grad(lambda p, f=f: f(p, batch)[0])(params) for f in losses)
    np.testing.assert_allclose(a, b, rtol=1e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4 * float(jnp.abs(x).max() + 1e-6)), ga, gb
    )
    query = np.asarray(ga["layers"][1]["wq"])
    assert not np.allclose(query[0], query[1])  # the constructed heads of a group may part


@pytest.mark.slow
def test_a_silenced_head_writes_nothing_in_its_row_only(have):
    params = initial(have.spec, 0, 0.05)
    tokens = np.stack([rows.text_row(np.random.default_rng(i), have.train, 128)[0] for i in range(2)])
    speak = np.ones((2, 2, 4), bool)
    speak[0, 1, 2] = False
    at = np.arange(2 * 128)
    got = recall.scored_logits(have.spec, params, tokens, at, speak=speak).reshape(2, 128, -1)
    lame = heads.without_heads(have.spec, params, ((1, 2),))
    for row, like in ((0, lame), (1, params)):
        want = recall.scored_logits(have.spec, like, tokens[row : row + 1], np.arange(128))
        np.testing.assert_allclose(got[row], want, atol=1e-4)
    assert np.abs(got[0] - recall.scored_logits(have.spec, params, tokens[:1], np.arange(128))).max() > 1e-2


def test_levels_silence_heads_by_their_chances(have):
    level = pretrain.make_level(CONFIG["mix"]["levels"][1])
    batches = data.Batches(have.train, data.Mix(seed=0, tokens=256, levels=(level,)), 0, 200)
    spoken = np.concatenate([batches[i]["speak"] for i in range(100)])
    share = spoken.mean(0)
    assert spoken.shape[1:] == (2, 4)
    assert 0.35 < share[0, 0] < 0.65
    assert 0.35 < share[1, 3] < 0.65
    assert np.all(np.delete(share, [0, 7]) == 1)


def test_bridges_shorten_the_question_and_nothing_else():
    rng = np.random.default_rng(0)
    drawn = {rows.shortened(rng).ask for _ in range(100)}
    assert len(drawn) == 5
    assert rows.MAGIC.ask not in drawn
    assert rows.MAGIC.ask.replace(" mentioned in the provided text", "") in drawn
    assert all(ask.endswith(" is") and ask.count("{key}") == 2 for ask in drawn)
    assert rows.shortened(rng).hide == rows.MAGIC.hide


@pytest.mark.slow
def test_measured_heads_against_numpy(have, monkeypatch):
    monkeypatch.setattr(heads, "LENGTH", 256)
    params = initial(have.spec, 0, 0.05)
    got = heads.measure(have.spec, params, have.held, count=2)
    rng, by_sort = np.random.default_rng(7), {"text": [], "answers": []}
    sorts = {"text": heads._text, "answers": heads._answers}
    for sort, draw in sorts.items():
        for row, asks, wanted in (draw(rng, have.held) for _ in range(2)):
            queries, weights = np.flatnonzero(asks), _weights(have.spec, params, row)
            for i in queries:
                p = weights[:, :, i, : i + 1].astype(np.float64)
                entropy = -(p * np.log(np.maximum(p, 1e-30))).sum(-1)
                copied = p[:, :, wanted[i]] if wanted[i] >= 0 else 0 * entropy
                if wanted[i] >= 0:
                    assert row[wanted[i]] == row[i + 1]
                    assert wanted[i] < i - 5
                by_sort[sort].append((entropy, p[:, :, :4].sum(-1), copied, p[:, :, -16:].sum(-1)))
    for sort, queries in by_sort.items():
        entropy, sink, copied, near = np.mean(queries, axis=0)
        np.testing.assert_allclose(got[sort]["effective"], np.exp(entropy), rtol=0.01, atol=0.02)
        np.testing.assert_allclose(got[sort]["sink"], sink, atol=2e-4)
        np.testing.assert_allclose(got[sort]["copied"], copied, atol=2e-4)
        np.testing.assert_allclose(np.sum(got[sort]["distance"], axis=-1), 1, atol=1e-3)
        np.testing.assert_allclose(np.array(got[sort]["distance"])[..., :5].sum(-1), near, atol=1e-3)
    assert got["kinds"][0][0] == "local"  # the constructed previous-token head


def _weights(spec, params, row) -> np.ndarray:
    """[L, N, T, T] attention of one row."""
    attend, probabilities = decoder.dense_attend(spec), []

    def look(index, x, carry):
        t = x.q.shape[1]
        k = np.repeat(np.asarray(x.k[0]), spec.groups, axis=1)
        s = np.einsum("tnh,snh->nts", np.asarray(x.q[0]), k) / np.sqrt(spec.head_dim)
        s = np.where(np.tri(t, dtype=bool), s, -np.inf)
        e = np.exp(s - s.max(-1, keepdims=True))
        probabilities.append(e / e.sum(-1, keepdims=True))
        return attend(index, x, carry)

    decoder.forward(spec, params, row[None], np.arange(len(row))[None], look, None)
    return np.stack(probabilities)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "pretrain").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_can_be_read(path):
    config = yaml.safe_load(path.read_text())
    spec = model_spec(config["model"])
    pretrain.make_optimizer(config["optimizer"])
    levels = [pretrain.make_level(level) for level in config["mix"]["levels"]]
    plan = loop.Cadence(**config["plan"])
    assert plan.steps == config["optimizer"]["cycles"][-1]["until"]
    assert len(config["check"]["gates"]) == len(levels) - 1
    assert max(max(level.lengths) for level in levels) <= spec.max_positions
