"""Planning runs of gates and rankers for a TPU slice that is not here. Compiles with libtpu: ``-m aot``."""

from __future__ import annotations

import dataclasses
import re

import pytest
from gates_tiny import config_at, written

from train import aot, gates
from train.ranker import __main__ as ranker

pytest.importorskip("libtpu", reason="the TPU compiler is not installed")
pytestmark = pytest.mark.aot

SIZES = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}


@pytest.fixture
def config(tmp_path):
    """A small Llama that exists as a config alone, over four chips."""
    parts = {
        "mesh": {"data": 2, "tensor": 2},
        "data": {"kind": "documents", "tokens": 2048, "lengths": [1024], "folder": "x", "instruction": ""},
        "gate": {"window": 256},
    }
    tree = config_at(tmp_path, tmp_path, **parts)
    tree["model"] = {"source": "nobody/nothing", "dtype": "bfloat16", "remat": True, "config": SIZES}
    return written(tmp_path, tree)


def test_the_step_compiles_for_four_chips_and_says_what_each_needs(config, capsys, monkeypatch):
    words = ["--config", str(config), "--compile", "v5e:2x2"]
    assert gates.main(words) == 0
    out = capsys.readouterr().out
    sizes = {name: float(value) for name, value in re.findall(r"(\w+) +([\d.]+) GiB a chip", out)}
    assert set(sizes) == {"arguments", "outputs", "temporary", "code", "total", "limit"}
    assert 0 < sizes["arguments"] < sizes["total"] < sizes["limit"] == 15.75
    monkeypatch.setitem(aot.CHIPS, "v5e", dataclasses.replace(aot.CHIPS["v5e"], memory=2**20))
    assert gates.main(words) == 2
    assert "does not fit" in capsys.readouterr().out


def test_topologies_that_do_not_agree(config, capsys):
    for topology, says in (("v5e:2x4", "8 devices"), ("v5e:9x9", "--compile v5e:9x9")):
        assert gates.main(["--config", str(config), "--compile", topology]) == 2
        assert says in capsys.readouterr().err


def test_a_rankers_step_compiles_for_four_chips(tmp_path, capsys):
    tree = {
        "name": "tiny",
        "seed": 0,
        "folder": str(tmp_path / "run"),
        "model": {"source": "nobody/nothing", "dtype": "bfloat16", "config": SIZES},
        "traces": {"folder": str(tmp_path), "sequences": 2, "held": 1, "lengths": [256], "shares": [1]},
        "agent": {"inputs": ["key", "value", "log"], "hidden": 16, "layers": 2},
        "method": {"kind": "rloo", "permutations": 2, "rows": 1, "queries": 8},
        "devices": 4,
        "plan": {"steps": 10},
    }
    path = written(tmp_path, tree)
    assert ranker.main(["--config", str(path), "--compile", "v5e:2x2"]) == 0
    out = capsys.readouterr().out
    assert "12 agents of" in out
    assert "one step of 1 x 256 tokens on v5e:2x2, 4 devices" in out
    path = written(tmp_path, tree | {"devices": 8})
    assert ranker.main(["--config", str(path), "--compile", "v5e:2x4"]) == 2
    assert "8 does not divide 12 agents" in capsys.readouterr().err
