"""A policy whose admission and eviction both learn: each has weights of its own, from saving to serving."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import by_layer  # noqa: F401

import kvjax
from kvjax.algebra import Eviction, PolicyError
from kvjax.catalogue import _discovery
from kvjax.eval.__main__ import main as evaluate
from kvjax.serve.__main__ import main as serve
from kvjax.weights import WeightsError, find, sources

TEXT = "The quick brown fox jumps over the lazy dog, which sleeps."
"""With the answer one page of tokens: pools of one size, whatever the weights keep."""


@dataclasses.dataclass(frozen=True, repr=False)
class ToyRank(Eviction):
    """Score = what a learned vector of each head says of the key."""

    name = "toy_rank"
    needs = frozenset({"k_pre"})
    keeps = ("score",)
    learns = "toy-rank"
    trained_by = "python -m train.toy"
    fitted = ("scale",)
    scale: float = 1.0

    def check_weights(self, weights, network):
        right = {"w": (network.num_kv_heads, network.head_dim)}
        if any({name: x.shape for name, x in layer.items()} != right for layer in weights):
            raise PolicyError(f"{self!r} needs {right} in every layer.")

    def example_weights(self, key, network):
        shape = (network.num_kv_heads, network.head_dim)
        return [
            {"w": jax.random.normal(of_layer, shape)}
            for of_layer in jax.random.split(key, network.num_layers)
        ]

    def arrive(self, params, observed):
        return {"score": self.scale * jnp.einsum("bkth,kh->bkt", observed.k_pre, params["w"])}

    def score(self, params, slots):
        return slots.meta["score"]


SPEC = "write_gate(0.5, window=16) + toy_rank + uniform(24, every_step) + sinks(2)"


@pytest.fixture(scope="module", autouse=True)
def discovered():
    """The one-string form knows the toy."""
    known = _discovery.parts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_discovery, "parts", lambda: known | {"toy_rank": ToyRank})
        yield


@pytest.fixture(scope="module")
def policy(discovered):
    made = kvjax.policy(SPEC)
    assert [part.name for part in made.learned] == ["write_gate", "toy_rank"]
    return made


@pytest.fixture(scope="module")
def home(tiny_folder, tmp_path_factory, policy) -> Path:
    """The tiny model with two files of weights for each of the two parts."""
    folder = tmp_path_factory.mktemp("two") / "model"
    shutil.copytree(tiny_folder, folder)
    model = kvjax.load(folder)
    for part in policy.learned:
        for name, seed in (("default", 0), ("other", 1)):
            layers = part.example_weights(jax.random.key(seed), model.network)
            kvjax.save_weights(folder / f"weights/{part.name}/{name}.safetensors", model, part, layers)
    return folder


@pytest.fixture(scope="module")
def model(home):
    return kvjax.load(home)


def drawn(policy, model, gate: int, rank: int) -> dict:
    """What was saved with these seeds."""
    seeds = {"admission": gate, "eviction": rank}
    parts = {part.place: part for part in policy.learned}
    return {
        place: parts[place].example_weights(jax.random.key(seed), model.network)
        for place, seed in seeds.items()
    }


def file(home: Path, part: str, name: str) -> Path:
    return home / f"weights/{part}/{name}.safetensors"


@pytest.mark.parametrize(
    ("choice", "gate", "rank"),
    [
        (None, 0, 0),
        ({}, 0, 0),
        ({"write_gate": "default", "toy_rank": "other"}, 0, 1),
        ({"toy_rank": "other"}, 0, 1),
        ({"write_gate": "other"}, 1, 0),
        ({"gates": "other"}, 1, 0),
        ({"gates": "other", "toy_rank": "other"}, 1, 1),
    ],
)
def test_each_part_has_a_source_of_its_own(home, model, policy, choice, gate, rank):
    weights = kvjax.weights_for(policy, model, choice)
    assert jax.tree.all(jax.tree.map(np.array_equal, weights, drawn(policy, model, gate, rank)))
    if choice:
        files = {name: file(home, "write_gate" if name == "gates" else name, x) for name, x in choice.items()}
        again = kvjax.weights_for(policy, model, files)
        assert jax.tree.all(jax.tree.map(np.array_equal, again, weights))


@pytest.mark.slow
def test_both_are_used_by_generation_and_by_the_command(home, model, policy, capsys):
    prompt = [model.text.encode(TEXT)]

    def written(weights=None) -> tuple:
        done = kvjax.generate(model, policy, prompt, max_new_tokens=4, weights=weights)
        layer = done.state.layers[0]
        kept = {tuple(sorted(set(np.asarray(layer.pages.pos)[layer.pages.pos >= 0].tolist())))}
        return done.tokens[0], kept

    def served(*words: str) -> list[int]:
        start = ["--model", str(home), "--prompt", TEXT, "--max-new-tokens", "4", "--json", "--policy", SPEC]
        assert serve([*start, *words]) == 0
        told = json.loads(capsys.readouterr().out)
        return told["tokens"], told["weights"]

    own, other = written(), written(kvjax.weights_for(policy, model, {"toy_rank": "other"}))
    assert own == written(drawn(policy, model, 0, 0))
    assert other == written(drawn(policy, model, 0, 1))
    assert own[1] != other[1] != written(drawn(policy, model, 1, 1))[1], "a part's weights change nothing"
    assert served() == (own[0], {"write_gate": "default", "toy_rank": "default"})
    both = {"write_gate": "default", "toy_rank": str(file(home, "toy_rank", "other"))}
    words = ",".join(f"{part}={source}" for part, source in both.items())
    assert served("--weights", words) == (other[0], both)
    assert served("--gates", "default", "--weights", "toy_rank=other")[0] == other[0]


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (
            "default",
            "'default' are given, and 2 parts of 'write_gate.* learn. Say whose they are: write_gate=",
        ),
        ({"toy_rankk": "default"}, "is called toy_rankk. Parts that learn: write_gate, toy_rank"),
        (
            {"uniform": "default"},
            r"uniform\(24, when=every_step\) learns nothing. Parts that learn: write_gate, toy_rank",
        ),
        ({"toy_rank": "bold"}, "toy_rank=bold: .* ships no 'bold' for toy_rank; it has default, other"),
        ({"toy_rank": "no.safetensors"}, "no.safetensors cannot be read"),
    ],
)
def test_combinations_that_are_refused(model, policy, choice, says):
    with pytest.raises(WeightsError, match=says):
        kvjax.weights_for(policy, model, choice)


def test_the_files_of_two_parts_cannot_be_swapped(home, model, policy):
    gate, rank = file(home, "write_gate", "default"), file(home, "toy_rank", "default")
    with pytest.raises(
        WeightsError, match="holds weights of 'toy-rank', write_gate.* reads those of 'wg-kv'"
    ):
        kvjax.weights_for(policy, model, {"write_gate": rank})
    with pytest.raises(WeightsError, match="holds weights of 'wg-kv', toy_rank.* reads those of 'toy-rank'"):
        kvjax.weights_for(policy, model, {"toy_rank": gate})


def test_a_part_that_is_not_shipped_says_what_trains_it(home, policy, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(home, folder)
    shutil.rmtree(folder / "weights/toy_rank")
    with pytest.raises(WeightsError, match=r"none for toy_rank.*To make one: python -m train\.toy\."):
        kvjax.generate(kvjax.load(folder), policy, [[1, 2]])
    assert serve(["--model", str(folder), "--prompt", "x", "--policy", SPEC]) == 2
    assert "--weights toy_rank=FILE" in capsys.readouterr().err
    words = ["--weights", f"toy_rank={file(home, 'toy_rank', 'default')}", "--max-new-tokens", "1"]
    assert serve(["--model", str(folder), "--prompt", "x", "--policy", SPEC, *words]) == 0


def test_remarks_name_the_part_and_labels_name_both(home, model, policy):
    other = kvjax.policy(SPEC.replace("toy_rank", "toy_rank(2.0)"))
    (remark,) = find(other, model).remarks
    assert "toy_rank(2.0): the weights of default.safetensors were trained with scale=1.0" in remark
    gate, rank = find(policy, model, {"toy_rank": "other"}).label.split(",")
    assert gate.startswith("write_gate=default@")
    assert rank.startswith("toy_rank=other@")
    assert len(gate.partition("@")[2]) == len(rank.partition("@")[2]) == 16
    assert find(kvjax.policy("full"), model).label == ""


def test_a_run_of_several_policies_takes_what_is_for_any_of_them(policy):
    full, gated = kvjax.policy("full"), kvjax.policy("wg-kv")
    choice, everyone = {"toy_rank": "other"}, (full, gated, policy)
    assert [sources(one, choice, others=everyone) for one in everyone] == [
        {},
        {"write_gate": "default"},
        {"write_gate": "default", "toy_rank": "other"},
    ]
    assert sources(gated, "other", others=(full, gated)) == {"write_gate": "other"}
    assert sources(full, "other", others=(full, gated)) == {}
    with pytest.raises(
        WeightsError, match="no part of any policy of the run is called kvp. Parts that learn: wr"
    ):
        sources(full, {"kvp": "x"}, others=everyone)
    with pytest.raises(
        WeightsError, match="--gates x is given, but nothing in any policy of the run is learned"
    ):
        sources(full, {"gates": "x"}, others=(full, kvjax.policy("int8")))


@pytest.mark.slow
def test_evaluation_measures_with_both_and_names_both(home, tmp_path, capsys):
    from kvjax.eval.measure import store
    from kvjax.eval.report import table

    start = ["run", "--task", "niah", "--model", str(home), "--lengths", "256", "--samples", "2"]
    start += ["--policy", SPEC, "--policy", "write_gate(0.5, window=16)", "--out", str(tmp_path / "out")]
    assert evaluate([*start, "--weights", "toy_rank=other"]) == 0
    full, both, gated = store.read(tmp_path / "out")
    assert full.cell.weights == ""
    assert gated.cell.weights.startswith("default@")
    assert table.name(gated) == "write_gate(0.5, window=16) [default]"
    assert table.name(both).endswith(" [write_gate=default,toy_rank=other]")
    capsys.readouterr()
    assert evaluate([*start, "--weights", "kvp=other"]) == 2
    assert "no part of any policy of the run is called kvp" in capsys.readouterr().err
