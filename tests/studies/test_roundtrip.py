"""The round-trip error against NumPy, and the command from end to end on a tiny random model."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.algebra import Native
from kvjax.storage.int4 import Int4
from kvjax.storage.int8 import Int8
from studies import roundtrip

K, V = np.random.default_rng(0).standard_normal((2, 2, 2, 70, 6)).astype(np.float32) * np.arange(1, 7)
AT_ONCE = [mode for mode in roundtrip.WRITE_MODES if not mode.grown]


def oracle(x: np.ndarray, most: int, page: int) -> float:
    """Every page of every stream rounded to its own scales."""
    back = np.zeros(x.shape)
    for begin in range(0, x.shape[2], page):
        piece = x[:, :, begin : begin + page].astype(np.float64)
        scale = np.abs(piece).max(axis=2, keepdims=True) / most
        back[:, :, begin : begin + page] = np.round(piece / scale) * scale
    return float(np.linalg.norm(back - x) / np.linalg.norm(x))


@pytest.mark.parametrize(("storage", "most"), [(Int8(), 127), (Int4(), 7)], ids=["int8", "int4"])
def test_errors_at_once_are_numpys_and_growing_costs_more(storage, most):
    errors = {e.way: e for e in roundtrip.errors([(jnp.asarray(K), jnp.asarray(V))], [storage])}
    for mode in AT_ONCE:
        page = mode.page or K.shape[2]
        np.testing.assert_allclose(errors[mode.name].k[0], oracle(K, most, page), rtol=1e-3)
        np.testing.assert_allclose(errors[mode.name].v[0], oracle(V, most, page), rtol=1e-3)
    paged, grown = (errors[w.name].mean for w in roundtrip.WRITE_MODES[:2])
    assert paged < grown < 1.5 * paged


def test_what_is_stored_exactly_comes_back():
    assert [e.mean for e in roundtrip.errors([(jnp.asarray(K), jnp.asarray(V))], [Native()])] == [0, 0, 0]


def test_the_command(tiny_folder, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KVJAX_DATA", str(tmp_path / "none"))
    words = ["--model", str(tiny_folder), "--lengths", "128", "--samples", "2"]
    assert roundtrip.main([*words, "--policy", "int8", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["rows"], tree["data"], tree["page"]) == (2, "generated", 64)
    assert 100 < tree["tokens"] <= 128
    assert [e["storage"] for e in tree["errors"]] == ["int8"] * 3
    assert all(0.002 < x < 0.015 for e in tree["errors"] for x in (*e["k"], *e["v"]))
    assert roundtrip.main([*words, "--policy", "int8"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 3
    assert f"{tree['errors'][0]['mean']:.2%}" in table[2]
    assert roundtrip.main([*words, "--lengths", "128,256"]) == 2
    assert "takes one of --lengths" in capsys.readouterr().err
