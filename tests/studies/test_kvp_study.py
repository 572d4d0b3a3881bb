"""KVP's studies: costs are sums over budgets, transfer and pages say what was measured, time counts FLOPs."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import yaml

import kvjax
from kvjax.models.spec import ModelSpec
from kvjax.policies.kvp import LearnedRanker
from kvjax.weights import save_weights
from studies.kvp import __main__ as study
from studies.kvp import costs, pages, timing
from train import traces
from train.ranker import batches, objective, settings

CONFIG = {
    "name": "tiny",
    "seed": 0,
    "traces": {
        "sequences": 12,
        "held": 5,
        "lengths": [160],
        "shares": [1],
        "shard": 4,
        "dtype": "float32",
        "data": {"kind": "rows", "mix": {"books": 1, "repeats": 1}},
    },
    "agent": {"inputs": ["key", "value", "log"], "hidden": 8, "sinks": 2, "recent": 6},
    "method": {"permutations": 4, "rows": 2, "queries": 12, "least_future": 16},
    "plan": {"steps": 2, "log_every": 1},
    "variants": {"books": {"only": ["books"]}, "surrogate": {"method": {"kind": "soft_rank"}}},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_folder):
    """(folder, config): traces of the tiny model and two files of untrained rankers."""
    home = tmp_path_factory.mktemp("kvp_study")
    tree = CONFIG | {"folder": str(home / "run"), "model": {"source": str(tiny_folder)}}
    tree["traces"] = CONFIG["traces"] | {"folder": str(home / "traces")}
    (home / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVJAX_DATA", "/nowhere")
        assert traces.main(["--config", str(home / "config.yaml")]) == 0
    model, part = kvjax.load(tiny_folder), LearnedRanker(2, 6)
    for seed, name in enumerate(("one", "two")):
        save_weights(home / f"{name}.safetensors", model, part, part.untrained(model, seed))
    return home, home / "config.yaml"


def test_costs_are_the_attention_that_each_budget_evicts(made):
    home, config = made
    chosen = settings.read(config)
    result = batches.Traces.open(home / "traces")
    agents = costs.stacked(kvjax.weights.read_weights(home / "one.safetensors").layers)
    got = costs.measured(result, chosen, {"one": agents})
    held = [batch for batch in batches.held(result, chosen) if "seen" in batch]
    assert len(got.tasks) == len(held) > 2
    task = objective.Task(agent=chosen.agent, method=chosen.method)
    for row, batch in enumerate(held):
        worth = np.asarray(objective.ranked(task, batch)[0][0], float)
        ranked = np.arange(2, int(batch["size"][0]) - 6)
        score = np.asarray(objective.scores(agents, {}, batch))[0]
        for at, (mine, values) in enumerate(zip(score, worth)):
            evicted = {}
            for name, order in (("one", np.argsort(-mine[ranked])), ("oracle", np.argsort(-values[ranked]))):
                # What every budget from one token on evicts, one after the other.
                left = [values[ranked][order[budget:]].sum() for budget in range(len(ranked) + 1)]
                evicted[name] = np.asarray(left)
            layer, head = divmod(at, result.manifest.kv_heads)
            for name, left in evicted.items():
                # Budgets from one token to all but one.
                area = left[1:-1].sum() / left[0] / (len(ranked) - 1)
                np.testing.assert_allclose(got.areas[name][row, layer, head], area, rtol=1e-4)
                budgets = np.round(np.asarray(costs.SHARES) * len(ranked)).astype(int)
                want = left[budgets] / left[0]
                np.testing.assert_allclose(got.curves[name][row, layer, head], want, atol=1e-5)
            assert (
                got.curves["oracle"][row, layer, head] <= got.curves["one"][row, layer, head] + 1e-6
            ).all()


def test_the_page_of_costs_names_layers_that_are_not_won(made, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    home, config = made
    files = [str(home / f"{name}.safetensors") for name in ("one", "two")]
    words = ["costs", "--config", str(config), "--rankers", *files, "--out", str(tmp_path)]
    assert study.main(words) == 0, capsys.readouterr().err
    tree = json.loads((tmp_path / "costs.json").read_text())
    assert tree["rankers"] == ["one", "two"]
    assert sum(kind["sequences"] for kind in tree["kinds"].values()) == len(tree["tasks"])
    every = pages.pooled(tree, list(tree["kinds"]), "areas")
    np.testing.assert_allclose(every["one"].mean(), np.mean(tree["each"]["one"]), rtol=1e-4)
    every = {name: x / every["oracle"] for name, x in every.items()}
    page = (tmp_path / "costs.md").read_text()
    assert f"| all | {every['one'].mean():.2f} | {every['two'].mean():.2f} |" in page
    # Untrained rankers lose somewhere; a ranking of the oracle's would not.
    assert "Not the lowest attention-free area" in page
    tree["kinds"] = {
        k: kind | {"areas": kind["areas"] | {"one": kind["areas"]["oracle"]}}
        for k, kind in tree["kinds"].items()
    }
    assert "On the mean of every layer" in pages.costs_page(tree, {"all": list(tree["kinds"])}, "")
    assert (tmp_path / "costs.png").stat().st_size > 5000


def test_ablations_train_each_variant_once_and_compare_with_the_base(made, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words = ["ablate", "--config", str(made[1]), "--out", str(tmp_path)]
    assert study.main(words) == 0, capsys.readouterr().err
    tree = json.loads((tmp_path / "ablate.json").read_text())
    runs = {run["name"]: run for run in tree["runs"]}
    assert list(runs) == ["base", "books", "surrogate"]
    assert runs["surrogate"]["method"]["kind"] == "soft_rank"
    assert runs["base"]["less_base"] == 0
    assert len({run["area"] for run in runs.values()}) == 3
    assert {"random", "knorm"} <= set(tree["untrained"])
    page = (tmp_path / "ablate.md").read_text()
    assert all(f"| {name} |" in page for name in runs)
    first = (tmp_path / "ablate.json").read_text()
    assert study.main(words) == 0
    assert json.loads((tmp_path / "ablate.json").read_text())["runs"] == json.loads(first)["runs"]
    assert study.main([*words, "--variants", "books"]) == 0
    chosen = json.loads((tmp_path / "ablate.json").read_text())["runs"]
    assert [run["name"] for run in chosen] == ["base", "books"]
    capsys.readouterr()
    assert study.main([*words, "--variants", "prose"]) == 2
    assert "has books, surrogate" in capsys.readouterr().err


def test_flops_are_those_of_the_matrices_and_of_causal_attention():
    spec = ModelSpec(
        family="qwen2", vocab_size=50, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
        model_dim=16, mlp_dim=24, max_positions=64,
    )  # fmt: skip
    length, token = 5, 0
    for wide, high in ((16, 4 * 8), (16, 2 * 8), (16, 2 * 8), (4 * 8, 16), (16, 24), (16, 24), (24, 16)):
        token += 2 * wide * high
    attention = sum(2 * 2 * 4 * 8 * (at + 1) for at in range(length))
    got = timing.flops(spec, 7, length)
    assert got["prefill"] == 3 * (length * token + attention) + 2 * 16 * 50
    assert got["ranking"] == length * 3 * 2 * 2 * 7
    layer = LearnedRanker().example_weights(
        jax.random.key(0), type("N", (), {"num_kv_heads": 2, "head_dim": 8, "num_layers": 1})
    )[0]
    # Three layers of 8: inputs 8 + 8 + 1, a bias, 8 x 8 and a bias, 8.
    assert timing.agent_parameters(layer) == 17 * 8 + 8 + 8 * 8 + 8 + 8


def test_a_study_without_rankers_says_what_to_give(made, capsys):
    assert study.main(["costs", "--config", str(made[1])]) == 2
    assert "costs needs trained rankers. Give --rankers FILE." in capsys.readouterr().err


def test_documents_are_whole_dialogues_of_the_training_split_and_none_twice():
    from studies.kvp import dialogues

    class Talks:
        def lines(self, name):
            assert name == "dialogue/sgd_train.jsonl.gz"
            return [[["U", f"a{i} b c"], ["S", f"d{i} e"]] for i in range(10)]

    texts = list(dialogues.documents(Talks(), 5, words=12))
    assert len(texts) == 5, "two dialogues of seven words each, with the speakers"
    lines = "\n".join(texts).split("\n")
    assert sorted(lines[::2]) == sorted(f"User: a{i} b c" for i in range(10))
    assert [line.replace("User: a", "Assistant: d")[: len("Assistant: d0")] for line in lines[::2]] == [
        line[: len("Assistant: d0")] for line in lines[1::2]
    ]
    assert len(list(dialogues.documents(Talks(), 9, words=12))) == 5, "the data ends"
