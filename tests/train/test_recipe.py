"""The embedded model's recipe, tiny: rows, splits, silenced heads, the look-ahead loss, exact resume."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from train import loop, rows, text
from train.embedded import checks, curve, data, pretrain, recall
from train.embedded.setup import initial, read, setup
from train.embedded.tasks import facts, logs, repeats, values, wordings

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = yaml.safe_load((ROOT / "configs" / "pretrain" / "embedded.yaml").read_text())


def tiny(folder: Path) -> dict:
    """The config with a small model, short rows and six steps."""
    config = copy.deepcopy(EMBEDDED)
    config["folder"], config["tokenizer"] = str(folder / "run"), str(folder / "tokenizer.json")
    config["model"] |= {"vocab_size": 512, "num_layers": 4, "mlp_dim": 32, "max_positions": 256}
    config["text"], config["devices"] = {"digits": 3, "tasks": 200}, 1
    config["optimizer"]["cycles"] = [{"until": 6, "peak": 1e-3, "final": 1e-5, "warmup": 1, "decay": 2}]
    level = config["mix"]["levels"][0] | {"lengths": [128, 192], "scored": 128, "ahead": 8}
    level["hush"] = {"rows": 0.5, "heads": [0.2, 0.4, 0.4, 0.4], "layer": 0.3}
    config["mix"] = {"tokens": 384, "levels": [level, level | {"kinds": {"repeats": 1.0}}]}
    config["plan"] = {"steps": 6, "log_every": 1, "check_every": 3, "save_every": 2}
    config["check"] |= {
        "count": 5,
        "lengths": [128, 256],
        "gates": [{"length": 128, "one": 0.0, "four": 0.0}],
    }
    config["check"]["asked"] = {"trained": {"length": 128, "count": 2}}
    config["check"]["gates"][0]["asked"] = {"trained": 0.0}
    return config


@pytest.fixture(scope="module")
def have(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("KVJAX_DATA", "/nowhere")  # the generated stand-in, on every machine
    yield setup(tiny(tmp_path_factory.mktemp("tiny")))
    patch.undo()


def records(config: dict) -> list[dict]:
    lines = (Path(config["folder"]) / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in loop.CLOCK} for line in lines]


def drawn(row, have, count=40, length=256, source=None):
    """Rows that fit, and how many of ``count`` did."""
    source = source or have.train
    rows = [row(np.random.default_rng(i), source, length) for i in range(count)]
    return [r for r in rows if r is not None]


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_bit(tmp_path, have):
    config = tiny(tmp_path / "stopped")
    config["tokenizer"] = have.config["tokenizer"]
    stop = copy.deepcopy(config)
    stop["plan"]["seconds"] = 0.0  # one step, then it saves and returns
    pretrain.run(dataclasses.replace(have, config=stop))
    assert records(config)[-1]["step"] == 1
    again = pretrain.run(dataclasses.replace(have, config=config))
    straight = tiny(tmp_path / "straight")
    whole = pretrain.run(dataclasses.replace(have, config=straight))
    jax.tree.map(np.testing.assert_array_equal, again, whole)
    of = lambda lines: [r for r in lines if "loss" in r]  # noqa: E731
    assert of(records(config)) == of(records(straight))
    assert {r["level"] for r in records(straight)} == {0, 1}
    step, params = pretrain.latest(dataclasses.replace(have, config=config))
    assert step == 6
    assert set(params) == {"embed", "final_norm", "layers"}  # what looks ahead stays behind


@pytest.mark.parametrize("row", [facts.row, repeats.row, logs.row], ids=["facts", "repeats", "logs"])
def test_rows_have_their_length_and_depend_on_their_generator_only(have, row):
    rows = drawn(row, have)
    assert len(rows) >= 36
    for ids, weight in rows:
        assert ids.shape == weight.shape == (256,)
        assert ids[0] == text.BOS
    first, second = (row(np.random.default_rng(5), have.train, 256) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_the_answer_of_a_fact_stands_in_the_text_behind_its_key(have):
    for group, source in (("trained", have.held), ("untrained", have.held)):
        for only, wording in enumerate(checks.GROUPS[group]):
            row = checks.Facts(group, keys=2, only=only)
            for ids, weight in drawn(row, have, count=4, source=source):
                answer = have.tokenizer.decode(ids[weight >= rows.ANSWER].tolist()).strip()
                before = have.tokenizer.decode(ids[weight < rows.ANSWER].tolist())
                key = wording.hide.split("{k}")
                assert answer
                assert answer in before
                assert before.count(key[-1].split("{v}")[0].strip(" .")) >= 2 or "{v}" in key[0]


def test_no_wording_of_evaluation_is_trained():
    trained, held = wordings.grammar(False), wordings.grammar(True)
    untrained = checks.GROUPS["untrained"]
    assert len(trained) > 1000
    assert len(untrained) == len(checks.GROUPS["trained"]) == 10
    assert set(checks.GROUPS["trained"]) <= set(trained)
    assert not {w.hide for w in trained} & ({w.hide for w in held} | {w.hide for w in untrained})
    asks = {ask for w in trained for ask in w.ask}
    assert not asks & {ask for w in untrained for ask in w.ask}
    # Not even a frame: with key and value taken out, no held-out statement is a trained one.
    bare = lambda w: tuple(w.hide.replace("{k}", "").replace("{v}", "").split())  # noqa: E731
    assert not {bare(w) for w in trained} & {bare(w) for w in untrained}
    assert (
        {w.kind for w in trained}
        == set(values.VALUES)
        == {w.kind for w in (*untrained, *checks.GROUPS["trained"])}
    )


def test_names_and_codes_of_training_and_evaluation_are_disjoint(have):
    def some(held):
        draw = values.Draw(np.random.default_rng(int(held)), lambda: "word", held)
        return {values.VALUES[kind](draw) for kind in ("code", "place") for _ in range(300)}

    places = [{draw.removesuffix(t) for draw in some(held) for t in values.TOWNS} for held in (True, False)]
    assert not some(True) & some(False)
    assert all(
        any(text.held_out_word(p) == held for p in parts) for held, parts in zip((True, False), places)
    )


def test_repeated_tokens_follow_what_they_repeat(have):
    """Behind its first three tokens a repeat is foretold by the three tokens before it."""
    for ids, weight in drawn(repeats.row, have, count=60):
        for at in np.flatnonzero(weight == repeats.COPY):
            past = ids[at - repeats.FREE : at]
            earlier = np.lib.stride_tricks.sliding_window_view(ids[: at - 1], repeats.FREE)
            follow = ids[repeats.FREE :][: len(earlier)][(earlier == past).all(-1)]
            assert ids[at] in follow


def test_a_sentence_asked_for_is_the_whole_tail(have):
    sentences = drawn(repeats.repeated, have, source=have.held)
    assert len(sentences) > 20
    for ids, weight in sentences:
        asks = np.flatnonzero(weight == rows.ANSWER)
        sentence = ids[asks[0] - repeats.FREE :]
        assert asks[-1] == len(ids) - 1
        assert len(asks) == len(sentence) - repeats.FREE
        windows = np.lib.stride_tricks.sliding_window_view(ids[: -len(sentence)], len(sentence))
        assert (windows == sentence).all(-1).any()


def test_looked_up_values_of_a_log_stand_earlier(have):
    for ids, weight in drawn(logs.row, have, count=10):
        written = have.tokenizer.decode(ids.tolist())
        again = np.flatnonzero(weight == logs.KNOWN)
        assert len(again) > 0
        for run in np.split(again, np.flatnonzero(np.diff(again) > 1) + 1)[:-1]:
            value = have.tokenizer.decode(ids[run].tolist()).strip()
            assert written.index(value) < len(have.tokenizer.decode(ids[: run[0]].tolist()))


def test_hushed_rows_and_layers_come_at_their_rates():
    hush = data.Hush(rows=0.3, heads=(0.0, 0.5, 0.2), layer=0.4)
    speak = hush.draw(np.random.default_rng(0), 20_000, 4)
    assert speak.shape == (20_000, 3, 4)
    assert speak[:, 0].all()
    silent = ~speak
    #  a KV head of layer 1: 0.3 of rows, there 0.5, or its layer (half of 0.4) and not already
    np.testing.assert_allclose(silent[:, 1].mean(), 0.3 * (0.2 + 0.8 * 0.5), atol=0.01)
    np.testing.assert_allclose(silent[:, 2].mean(), 0.3 * (0.2 + 0.8 * 0.2), atol=0.01)
    assert 0.25 < silent.any((1, 2)).mean() <= 0.31


def test_looking_ahead_is_from_the_query_over_the_answer_alone():
    weight = np.asarray([[1, 6, 6, 6, 6, 6, 1, 6, 6], [1, 1, 6, 1, 1, 6, 6, 6, 1]], float)
    tokens = np.arange(18, dtype=np.int32).reshape(2, 9)
    got = data.choose_ahead(tokens, weight, 6)
    np.testing.assert_array_equal(got["ahead_at"], [0, 6, 10, 13, 0, 0])
    np.testing.assert_array_equal(
        got["ahead_target"], [[2, 3, 4], [8, 0, 0], [0, 0, 0], [15, 16, 0], [0, 0, 0], [0, 0, 0]]
    )
    np.testing.assert_array_equal(got["ahead_real"].sum(1), [3, 1, 0, 2, 0, 0])


@pytest.mark.slow
def test_the_look_ahead_loss_adds_its_share_and_reaches_attention(have):
    params = initial(have.spec, 0, 0.05, "many", ahead=3)
    rng = np.random.default_rng(0)
    drawn = [facts.row(rng, have.train, 128) for _ in range(3)]
    tokens, weight = (np.stack(x) for x in zip(*(r for r in drawn if r is not None)))
    batch = {"tokens": tokens, **data.choose_scored(rng, tokens, weight, 64)}
    more = batch | data.choose_ahead(tokens, weight, 8)
    loss = pretrain.make_quick_loss(have.spec)
    plain, whole = (float(loss(params, b)[0]) for b in (batch, more))
    x = np.asarray(recall.forward.states(have.spec, params, tokens))
    nll = []
    for at, wanted, real in zip(more["ahead_at"], more["ahead_target"], more["ahead_real"]):
        for w, token, counts in zip(np.asarray(params["ahead"]), wanted, real):
            y = x[at] @ w
            z = (y / np.sqrt(np.mean(y * y) + 1e-6) * params["final_norm"]) @ np.asarray(params["embed"]).T
            nll += [float(jax.nn.logsumexp(z) - z[token])] if counts else []
    np.testing.assert_allclose(whole - plain, pretrain.AHEAD_SHARE * np.mean(nll), rtol=0.02)
    grad = jax.grad(lambda p: loss(p, more)[0] - loss(p, batch)[0])(params)
    assert float(jnp.abs(grad["layers"][1]["wv"]).max()) > 0


def test_numbers_are_cut_into_three_digits(have):
    pieces = have.tokenizer.encode(" is 1234567.").tokens
    assert max(sum(c.isdigit() for c in piece) for piece in pieces) <= 3
    assert have.tokenizer.decode(have.tokenizer.encode(" is 1234567.").ids) == " is 1234567."


def test_sentences_are_the_written_wordings_and_no_held_out_row_shows_one(have):
    """A held-out source takes the grammar's held-out frames instead."""
    hides = [one.hide for one in wordings.written("trained") if not one.hide.startswith("[")]
    frames = [re.split(r"{[kv]}", hide) for hide in hides]
    for source, held in ((have.train, False), (have.held, True)):
        drawn = [facts.sentence(np.random.default_rng(seed), source, 512) for seed in range(12)]
        said = [have.tokenizer.decode(row[0].tolist()) for row in drawn if row is not None]
        shown = [any(all(part in text for part in parts) for parts in frames) for text in said]
        assert len(said) >= 8
        assert sum(shown) == (0 if held else len(said))


@pytest.mark.slow
def test_gates_ask_for_wordings(have):
    config = copy.deepcopy(have.config)
    config["check"]["gates"][0]["asked"] = {"trained": 1.1}
    check = pretrain.make_check(dataclasses.replace(have, config=config))
    params = initial(have.spec, 0, 0.05, "many")
    assert check(params, 3, 0).level == 0
    assert pretrain.make_check(have)(params, 3, 0).level == 1


def test_quick_recall_agrees_with_the_decoders(have):
    params = initial(have.spec, 0, 0.05, "many")
    tokens = np.stack([rows.text_row(np.random.default_rng(i), have.held, 128)[0] for i in range(2)])
    at = np.arange(250)
    (a, hit), (b, want) = (f(have.spec, params, tokens, at) for f in (recall.quick_nll, recall.nll))
    np.testing.assert_allclose(a, b, atol=0.25)  # logits reach 20
    assert np.mean(np.asarray(hit) == np.asarray(want)) > 0.95


def test_a_config_is_changed_where_it_has_a_place(tmp_path):
    path = ROOT / "configs" / "pretrain" / "embedded.yaml"
    config = read(path, ["text.digits=1", "mix.levels.0.kinds={books: 1}"], tmp_path)
    assert config["text"]["digits"] == 1
    assert config["mix"]["levels"][0]["kinds"] == {"books": 1}
    assert config["folder"] == str(tmp_path)
    assert config["tokenizer"] == str(tmp_path / "tokenizer.json")
    assert config["mix"]["levels"][1] == EMBEDDED["mix"]["levels"][1]
    with pytest.raises(ValueError, match=r"nonsense.digits=1.*Write section.name=value"):
        read(path, ["nonsense.digits=1"])


def test_a_curve_counts_the_tokens_that_were_drawn(have):
    levels = tuple(pretrain.make_level(level) for level in have.config["mix"]["levels"])
    mix = data.Mix(seed=0, tokens=384, levels=levels, kv_heads=4)
    drawn = [
        data.batches(have.train, mix, level, 10)[i]["tokens"].size for i, level in enumerate([0, 0, 1, 1])
    ]
    records = [
        {"step": 2, "level": 0, "time": 10.0, "user": 1.0, "loss": 2.0},
        {"step": 2, "level": 0, "time": 11.0, "user": 2.0, "trained": 0.5},
        {"step": 3, "level": 1, "time": 12.0, "user": 3.0, "loss": 1.0},
        {"step": 4, "level": 1, "time": 16.0, "user": 5.0, "loss": 1.0},
    ]
    report = curve.curve(have.config, records)
    assert report["tokens"] == sum(drawn)
    assert report["levels"] == {"0": 1, "1": 3}
    assert report["checks"] == [{"step": 2, "tokens": sum(drawn[:2]), "level": 0, "trained": 0.5}]
    # only the last two lines follow each other without a check between
    assert report["speed"] == {"1": {"tokens_a_second": drawn[3] / 4, "tokens_a_user_second": drawn[3] / 2}}


def test_parts_share_the_rows_and_the_scored_tokens(have):
    levels = tuple(pretrain.make_level(level) for level in have.config["mix"]["levels"])
    mix = data.Mix(seed=0, tokens=512, levels=levels, kv_heads=4)
    one = data.batches(have.train, mix, 1, 4)[3]
    two = data.batches(have.train, dataclasses.replace(mix, parts=2), 1, 4)[3]
    assert set(one) == set(two)
    for name, leaf in one.items():
        assert two[name].shape == (2, leaf.shape[0] // 2, *leaf.shape[1:])
    for tokens, at, target in zip(two["tokens"], two["at"], two["target"]):
        assert (tokens.ravel()[at + 1] == target).all()


@pytest.mark.slow
def test_every_number_of_up_to_three_digits_is_a_token(tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_DATA", "/nowhere")
    config = tiny(tmp_path)
    config["model"]["vocab_size"] = 1600
    config["text"] = EMBEDDED["text"] | {"tasks": 50, "numbers": 400}
    tokenizer = setup(config).tokenizer
    assert all(len(tokenizer.encode(f"{n:0{size}}").ids) == 1 for size in (1, 2, 3) for n in range(10**size))


def test_text_that_is_no_book_says_so(capsys):
    assert text.corpus(None).train
    assert "KVJAX_DATA names no data pack" in capsys.readouterr().err
