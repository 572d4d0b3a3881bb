"""The frontier: budgets in 16-bit bytes, who comes near it, its plan; and what ``auto`` makes of all that."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
from pathlib import Path

import eval_rows
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import decode, metrics
from kvjax.algebra import PolicyError
from kvjax.eval import frontier
from kvjax.eval.errors import EvalError
from kvjax.eval.measure.store import SCHEMA, Store
from kvjax.eval.report import front
from kvjax.eval.report.table import Results
from kvjax.weights import _auto as auto
from kvjax.weights import chosen, fingerprint, is_auto
from kvjax.weights._bytes import live_bytes

DIM = 64
STORED = Path(__file__).parents[2] / "results" / "frontier"


@pytest.mark.parametrize(
    ("template", "share", "slots"),
    [
        ("snapkv + uniform({n})", 0.25, 128),
        ("window({n}) + sinks(4)", 0.5, 256),
        # A code is half of 16 bits, its page's scales 1/32 more; the newest 32 are exact.
        ("snapkv + ada({n}) + int8(32)", 0.25, 32 + round(96 / (0.5 + 1 / 32))),
        ("snapkv + ada({n}) + int4(32)", 0.25, 32 + round(96 / (0.25 + 1 / 32))),
        ("int8(32) + uniform({n})", 0.05, 26),
    ],
)
def test_a_budget_is_a_share_of_the_bytes_at_16_bits(template, share, slots):
    assert frontier.slots(template, share, 512, DIM) == slots


def test_numbers_of_a_template_are_written_in():
    assert frontier.filled("conf_kv(recent=16) + confidence({n/2}, {n}) + {n*2}", 65).endswith(
        "(32, 65) + 130"
    )
    assert frontier.filled("gvote(0.9)", 7) == "gvote(0.9)"


def rows(*cells: tuple[str, float, list[float]]) -> Results:
    """(policy, kept fraction, scores) of one task; what learns has its default weights, behind "|" others."""
    every = []
    for spec, kept, scores in cells:
        policy, _, named = spec.partition("|")
        every.append(
            dataclasses.replace(
                eval_rows.row(policy, scores, protocol="agnostic" if policy != "full" else "either"),
                kept_fraction=kept,
            )
        )
        weights = f"{named or 'default'}@{'0' * 16}" if kvjax.policy(policy).learned else ""
        every[-1] = dataclasses.replace(every[-1], cell=dataclasses.replace(every[-1].cell, weights=weights))
    return Results(tuple(every))


FOUND = rows(
    ("full", 1.0, [1.0, 1.0, 1.0, 1.0]),
    ("snapkv(32) + uniform(128)", 0.25, [1.0, 1.0, 0.0, 0.0]),
    ("knorm + uniform(128)", 0.25, [0.0, 0.0, 0.0, 0.0]),
    ("gvote(0.95)", 0.4, [1.0, 1.0, 1.0, 0.0]),
    ("snapkv(32) + uniform(256)", 0.5, [1.0, 1.0, 0.0, 0.0]),
    ("snapkv(32) + int8(32) + ada(454)", 0.9, [1.0, 1.0, 1.0, 1.0]),
)


def test_the_front_is_what_no_fewer_bytes_beat():
    (there,) = front.points(FOUND, DIM).values()
    assert [p.policy for p in front.front(there)] == [
        "snapkv(32) + uniform(128)",
        "gvote(0.95)",
        "snapkv(32) + int8(32) + ada(454)",
    ]
    int8 = next(p for p in there if "int8" in p.policy)
    assert int8.share == pytest.approx((32 + (0.9 * 512 - 32) * (0.5 + 1 / 32)) / 512)
    assert front.best_below(there, 0.3) == 50.0


def test_near_the_front_are_those_within_so_many_points():
    named = {(512, row.cell.policy): row.cell.policy for row in FOUND.rows}
    near = frontier.near_the_front(FOUND, named, DIM, 5)
    assert "knorm + uniform(128)" not in near
    assert "snapkv(32) + uniform(256)" not in near, "gvote is better for less"
    assert {"snapkv(32) + uniform(128)", "gvote(0.95)"} <= near
    assert "snapkv(32) + uniform(256)" in frontier.near_the_front(FOUND, named, DIM, 50)
    assert "snapkv(32) + uniform(128)" not in frontier.near_the_front(FOUND, named, DIM, 5, least=51)


def test_the_tables_of_the_page_say_the_same():
    text = front.table_of(FOUND, DIM)
    assert "| 512 | `snapkv(32) + uniform(128)` | 25.0 % | 1 | 50.0 (" in text
    assert "| 512 | `snapkv(32) + int8(32) + ada(454)`" in text
    assert "knorm" not in text, "another policy is better for no more"
    needs = front.needs(FOUND, DIM, [0.25])
    assert "| 30 % of the bytes | `snapkv(32) + uniform(128)` | 50.0 | 100.0 |" in needs
    gates = ("write_gate(0.2)|aggressive", 0.2, [1.0, 1.0]), ("write_gate(0.2)", 0.2, [0.0, 0.0])
    whole = front.page(rows(("full", 1.0, [1.0, 1.0]), *gates), DIM, [0.25], "it")
    assert f"| 30 % of the bytes | `{kvjax.policy('write_gate(0.2)')!r} [aggressive]` | 100.0 |" in whole
    assert f"| `{kvjax.policy('write_gate(0.2)')!r} [aggressive]` | 20.0 % |" in whole


def test_the_table_has_at_most_25_rows():
    many = [
        (f"snapkv(32) + uniform({n})", n / 512, [1.0] * (n // 4) + [0.0] * (100 - n // 4))
        for n in range(40, 400, 8)
    ]
    text = front.table_of(rows(("full", 1.0, [1.0] * 100), *many), DIM)
    assert 5 < text.count("\n| 512 |") <= front.MOST


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert front.draw(FOUND, DIM, tmp_path / "front.png").stat().st_size > 10_000


def test_the_shipped_plan_is_one_and_its_templates_are_written_well():
    plan = frontier.read(frontier.EXAMPLE)
    assert [stage.samples for stage in plan.stages] == [25, 200, 50, 25]
    assert len(plan.shares) == 3
    assert 2048 in plan.stages[2].lengths
    for template in (*plan.policies, *plan.stages[3].policies):
        if "phi" not in template:  # maps may be there or not
            kvjax.policy(frontier.filled(template, 200))


def test_a_stage_may_have_policies_of_its_own(tmp_path):
    stage = "{tasks: [niah_word], lengths: [256], samples: 1, seed: 0"
    (tmp_path / "plan.yaml").write_text(
        f"budgets: [0.5]\nprotocols: [aware]\nstages:\n  - {stage}}}\n  - {stage}, policies: [int8, "
        "{policy: 'write_gate(0.2)', weights: {write_gate: aggressive}}]}\npolicies: ['knorm + uniform({n})']"
    )
    plan = frontier.read(tmp_path / "plan.yaml")
    assert [*plan.policies] == ["knorm + uniform({n})"]
    first, second = plan.stages
    assert first.policies is None
    assert second.policies == {"int8": None, "write_gate(0.2)": {"write_gate": "aggressive"}}


def test_no_stage_measures_nothing(tmp_path):
    """Pages are made again from what is there."""
    store = Store.open(tmp_path, {"schema": SCHEMA})
    for row in FOUND.rows:
        store.append(row)
    plan = frontier.read(frontier.EXAMPLE)
    assert frontier.run(plan, None, None, store, last=0).rows == FOUND.rows


@pytest.mark.slow
def test_the_pages_of_the_front_are_those_of_its_rows():
    found = Results(tuple(Store(STORED).done().values()))
    facts, plan = json.loads((STORED / "about.json").read_text()), frontier.read(frontier.EXAMPLE)
    command = f"python -m kvjax.eval frontier --config {frontier.EXAMPLE}"
    assert front.page(found, DIM, plan.shares, command) == (STORED / "front.md").read_text()
    assert front.as_json(found, DIM, facts, command) == (STORED / "front.json").read_text()
    assert (auto.SHIPPED[-1] / "front.json").read_text() == (STORED / "front.json").read_text()


def test_codes_whose_bytes_hold_every_token_have_no_budget_to_set():
    model = types.SimpleNamespace(network=types.SimpleNamespace(head_dim=DIM))
    plan = dataclasses.replace(
        frontier.read(frontier.EXAMPLE), policies={"snapkv + int4(32) + uniform({n})": None}
    )
    usable, missing = frontier.policies(plan, 512, model)
    assert missing == []
    assert [name.partition(" @ ")[2] for name in usable] == ["0.15", "0.3"]


def test_a_picture_names_at_most_twelve_families():
    many = [
        (f"snapkv({n}) + uniform({4 * n})", n / 128, [1.0] * n + [0.0] * (128 - n)) for n in range(66, 96, 2)
    ]
    groups = [*front.points(rows(("full", 1.0, [1.0] * 128), *many), DIM).values()]
    named = front._worth_naming(groups)
    assert len(named) == front.MOST_NAMED < len({p.family for p in groups[0]})


@pytest.mark.parametrize(
    "text", ["budgets: [2]\nprotocols: [aware]\nstages: []\npolicies: []", "- 1", "a: ["]
)
def test_a_plan_that_is_none_is_refused(text, tmp_path):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(EvalError, match="plan.yaml"):
        frontier.read(tmp_path / "plan.yaml")


# --- auto ----------------------------------------------------------------------------------------


@pytest.fixture
def model(tiny_folder, tmp_path, monkeypatch):
    """The tiny model, with the front above in its folder."""
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    loaded = kvjax.load(folder)
    whose = {"model": "tiny", "fingerprint": fingerprint(loaded)}
    (folder / "front.json").write_text(front.as_json(FOUND, DIM, whose, "python -m it"))
    monkeypatch.setattr(auto, "SHIPPED", ())
    return loaded


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("auto(0.25)", "snapkv(32) + uniform(0.25)"),
        ("auto(0.4)", "gvote(0.95)"),
    ],
)
def test_auto_is_the_fronts_choice(spec, policy, model):
    assert is_auto(spec)
    best, note = chosen(spec, model)
    assert best == kvjax.policy(policy)
    assert note.startswith(f"{spec} is {policy}")
    assert "measured on this model (python -m it)" in note


def test_a_budget_counts_by_its_share_of_the_prompt(model):
    """What came behind the prompt was held beside it: 128 of 512 slots are a quarter."""
    results = rows(("full", 1.0, [1.0]), ("knorm + uniform(128)", 0.29, [1.0]), ("gvote(0.95)", 0.29, [1.0]))
    text = front.as_json(results, DIM, {"model": "", "fingerprint": fingerprint(model)}, "it")
    (model.folder / "front.json").write_text(text)
    assert chosen("auto(0.25)", model)[0] == kvjax.policy("knorm + uniform(0.25)")
    with pytest.raises(PolicyError, match="nothing that small"):
        chosen("auto(0.24)", model)


KIB = 1024


@pytest.mark.parametrize(
    ("spec", "prompt", "answer", "policy", "words"),
    [
        # A slot of a KV head (two layers of two) takes 2 * 8 float32 numbers, and a bit or a position.
        ("auto(1MiB)", 60, 12, "full", "takes 18.28 KiB whole"),
        ("auto(19KiB)", 60, 12, "full", "whole"),
        ("auto(18KiB)", 60, 12, "snapkv(32) + int8(32) + ada(0.8867)", "100 %"),
        # 0.4 of the prompt and the answer; int8's scales take more than they save at this length.
        ("auto(10KiB)", 60, 12, "gvote(0.95)", "75 %"),
        ("auto(1MiB)", None, 0, "full", "whole"),
    ],
)
def test_bytes_are_those_of_the_requests_own_context(spec, prompt, answer, policy, words, model):
    best, note = chosen(spec, model, prompt=prompt, answer=answer)
    assert best == kvjax.policy(policy)
    assert note.startswith(f"{spec} is {policy}: ")
    assert words in note


def test_below_the_smallest_measured_it_says_what_that_is(model):
    with pytest.raises(
        PolicyError, match=r"takes 18.28 KiB whole, the smallest measured policy .* KiB\. Give"
    ):
        chosen("auto(2KiB)", model, prompt=60, answer=12)


SHIPPED = auto.SHIPPED[-1]
embedded = functools.cache(lambda: kvjax.load(SHIPPED))


@pytest.mark.parametrize("size", ["1KiB", "700KiB", "1MiB", "1300KiB", "2MiB", "4MiB", "6MiB", "64MiB"])
@pytest.mark.parametrize("tokens", [(60, 18), (480, 32), (1000, 24), (1900, 100)])
def test_no_measured_policy_that_fits_is_better_than_the_choice(size, tokens):
    """On the shipped table, learned parts included: nothing of no more bytes scores more."""
    model, prompt = embedded(), sum(tokens)
    most = int(size[:-3]) * (KIB if size.endswith("KiB") else KIB**2)
    dtype = model.params["embed"].dtype
    entries = json.loads((SHIPPED / "front.json").read_text())["front"]
    near = auto._nearest(entries, prompt)
    fitting = []
    for entry in near:
        policy = auto._as_measured(entry)
        held = live_bytes(policy, model.network, dtype, prompt, auto._slots(policy, entry, *tokens))
        fitting += [(entry["score"], policy)] * (held <= most)
    if live_bytes(kvjax.policy("full"), model.network, dtype, prompt, prompt) <= most:
        assert chosen(f"auto({size})", model, prompt=tokens[0], answer=tokens[1])[0] == kvjax.policy("full")
    elif fitting:
        policy, _ = chosen(f"auto({size})", model, prompt=tokens[0], answer=tokens[1])
        assert dict((p, s) for s, p in fitting)[policy] == max(fitting, key=lambda x: x[0])[0]
    else:
        with pytest.raises(PolicyError, match="the smallest measured policy"):
            chosen(f"auto({size})", model, prompt=tokens[0], answer=tokens[1])


def test_what_auto_offers_was_measured_with_the_weights_that_ship():
    """Weights trained anew leave measurements of the old ones behind: then measure those policies again."""
    offered = json.loads((SHIPPED / "front.json").read_text())["front"]
    measured = {label for entry in offered for label in entry["weights"].split(",") if label}
    files = (SHIPPED / "weights").glob("*/default.safetensors")
    shipped = {hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}
    assert measured
    assert {label.rpartition("@")[2] for label in measured} <= shipped


def test_a_point_behind_a_plain_window_or_with_a_second_pass_is_never_the_choice():
    results = rows(("full", 1.0, [1.0]), ("window(64) + sinks(4)", 0.2, [1.0, 1.0, 0.0, 0.0]),
                   ("knorm + uniform(64)", 0.18, [1.0, 0.0, 0.0, 0.0]),
                   ("kvzip + uniform(64)", 0.19, [1.0, 1.0, 1.0, 0.0]),
                   ("snapkv(32) + uniform(64)", 0.19, [1.0, 1.0, 0.0, 0.0]))  # fmt: skip
    assert "kvzip" in front.table_of(results, DIM)
    tree = json.loads(front.as_json(results, DIM, {"model": "", "fingerprint": ""}, "it"))
    assert [entry["policy"] for entry in tree["front"]] == ["snapkv(32) + uniform(64)"]


@pytest.mark.parametrize(
    "spec",
    [
        "full",
        "window(16) + sinks(4)",
        "snapkv(8) + uniform(24)",
        "int8(16)",
        "quest(2, chunk=4, dense=1, recent=8)",
        "kvp(2, recent=6) + uniform(28, every_step)",
    ],
)
def test_live_bytes_are_the_states_own(spec):
    policy, model = kvjax.policy(spec), tiny.model()
    prompt = tiny.prompt(60)
    state, _ = kvjax.prefill(
        model, policy, [prompt], context=tiny.CONTEXT, weights=tiny.weights(policy), page=64
    )
    slots = float(np.asarray(metrics.live_slots(state)).mean())
    # The ring is as long as the context allows, and the prompt is shorter.
    right = live_bytes(policy, model.network, "float32", 60, slots)
    assert right == pytest.approx(metrics.nbytes(state).total["live"], rel=0.03)


@pytest.mark.slow
def test_auto_answers_and_says_what_it_is(model):
    with pytest.warns(decode.Remark, match=r"auto\(0.25\) is snapkv"):
        out = kvjax.generate(model, "auto(0.25)", [list(range(5, 75))], max_new_tokens=2)
    assert out.state.structure == "snapkv + uniform"


def test_another_model_takes_no_learned_part(model, monkeypatch):
    learned = "kvp(4) + uniform(128)"
    results = rows(("full", 1.0, [1.0, 1.0]), (learned, 0.2, [1.0, 1.0]), ("gvote(0.9)", 0.2, [1.0, 0.0]))
    whose = {"model": "other", "fingerprint": "0"}
    (model.folder / "front.json").write_text(front.as_json(results, DIM, whose, "it"))
    monkeypatch.setattr(auto, "SHIPPED", (model.folder,))
    policy, note = chosen("auto(0.3)", model)
    assert repr(policy) == "gvote(0.9)"
    assert "measured on other, for want of figures of this model's own" in note


def test_a_model_without_measurements_rests_on_those_shipped(model, monkeypatch):
    """On SmolLM2's; the embedded model has its own."""
    monkeypatch.undo()
    (model.folder / "front.json").unlink()
    policy, note = chosen("auto(0.35)", model)
    assert not policy.learned
    assert "measured on SmolLM2-135M-Instruct, for want of figures of this model's own" in note
    assert "measured on this model" in chosen("auto(0.35)", embedded())[1]


def test_what_the_first_shipped_table_is_too_large_for_the_next_one_has(model, tmp_path, monkeypatch):
    (model.folder / "front.json").unlink()
    for name, policy, share in (("large", "gvote(0.95)", 0.4), ("small", "knorm + uniform(0.2)", 0.2)):
        results = rows(("full", 1.0, [1.0]), (policy, share, [1.0]))
        (tmp_path / name).mkdir()
        (tmp_path / name / "front.json").write_text(
            front.as_json(results, DIM, {"model": name, "fingerprint": ""}, "it")
        )
    monkeypatch.setattr(auto, "SHIPPED", (tmp_path / "large", tmp_path / "small"))
    assert chosen("auto(0.5)", model)[0] == kvjax.policy("gvote(0.95)")
    for spec, tokens in (("auto(0.3)", {}), ("auto(8KiB)", {"prompt": 60, "answer": 12})):
        policy, note = chosen(spec, model, **tokens)
        assert repr(policy).startswith("knorm")
        assert "measured on small, for want" in note


def test_weights_that_are_not_the_default_are_never_the_choice():
    results = rows(("full", 1.0, [1.0, 1.0]), ("write_gate(0.2)|aggressive", 0.2, [1.0, 1.0]),
                 ("write_gate(0.1)", 0.3, [1.0, 0.0]))  # fmt: skip
    tree = json.loads(front.as_json(results, DIM, {"model": "", "fingerprint": ""}, "it"))
    assert [entry["policy"] for entry in tree["front"]] == [repr(kvjax.policy("write_gate(0.1)"))]


@pytest.mark.parametrize("spec", ["auto()", "auto(0)", "auto(1.5)", "auto(lots)", "auto(0.01)"])
def test_what_auto_cannot_be_is_refused(spec, model):
    with pytest.raises(PolicyError, match=r"auto\("):
        chosen(spec, model)


def test_without_measurements_it_says_how_to_make_them(model):
    (model.folder / "front.json").unlink()
    with pytest.raises(PolicyError, match="kvjax.eval frontier --out DIR"):
        chosen("auto(0.2)", model)
