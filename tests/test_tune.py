"""``python -m kvjax.tune``: the whole program on interpreted bodies, what it says, what it refuses."""

from __future__ import annotations

import json

import jax
import pytest
from tiny import quick_compiles  # noqa: F401

from kvjax import tune
from pallas_kernels import dispatch, records
from pallas_kernels.measure.work import OPERATIONS, work


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    dispatch.record.cache_clear()
    yield tmp_path / "kernels"
    dispatch.record.cache_clear()


def test_a_short_run_checks_chooses_blocks_and_is_one_file(home, tmp_path, monkeypatch, capsys):
    """On a CPU, interpreted: in the place and form in which ``impl=None`` looks for it on a device."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    words = ["--tiny", "triton", "--only", "phi", "--minutes", "8", "--out", str(home)]
    assert tune.main(words) == 0
    out = capsys.readouterr().out
    assert "phi             on: triton agrees in" in out
    slug = records.slug(jax.devices()[0].device_kind)
    whole = json.loads((home / f"{slug}.json").read_text())
    alone = json.loads((home / slug / "phi.json").read_text())
    assert whole["operations"] == {"phi": alone}
    assert set(alone["blocks"]) <= {f"{x.tunes}/{x.key[0]}/{x.key[1]}" for x in work("phi").searches(True)}
    assert alone["blocks"]
    assert alone["cases"] == alone["compared"] == {}
    assert dispatch.record("phi_build", jax.devices()[0].device_kind) == alone


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"agrees": True, "checks": {"a": {"agrees": True}}}, "on: triton agrees in 1 checks"),
        (
            {"checks": {"long": {"agrees": False, "worst": 3.0}, "odd": {"agrees": False, "why": "spills"}}},
            "off: long (disagrees); odd (spills)",
        ),
        ({"problems": {"numerics": {"lost": "the process ended with code 1: x"}}}, "off: the process ended"),
        (
            {"problems": {"numerics": {"lost": "the time was over"}}},
            "off: no time was left to check it. Run again with more --minutes.",
        ),
    ],
)
def test_an_operation_is_on_or_says_why_it_is_off(record, line):
    empty = {"impl": "triton", "agrees": False, "checks": {}, "blocks": {}, "problems": {}}
    assert tune.state(empty | record).startswith(line)


def test_it_ends_with_1_where_a_kernel_stays_off(home, capsys, monkeypatch):
    from pallas_kernels.measure import device

    records = device.measure(0, folder=home, tiny="triton", only=("phi",))
    monkeypatch.setattr(device, "measure", lambda *_, **__: records)
    assert tune.main([]) == 1
    assert "off: no time was left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ([], {}, "tune needs a GPU or TPU, and JAX finds none"),
        ([], {"KVJAX_CACHE": "off"}, "Set KVJAX_CACHE=DIR"),
        (["--tiny", "triton"], {}, "Name a folder of its own with --out"),
        (["--minutes", "0"], {}, "--minutes 0 is out of range"),
        (["--only", "merge"], {}, f"choose from {', '.join(map(repr, OPERATIONS))}"),
    ],
)
def test_refusals(home, capsys, monkeypatch, words, environment, message):
    if jax.default_backend() != "cpu":
        pytest.skip("this is not a CPU")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tune.main(words) == 2
    assert message.replace("'", "") in capsys.readouterr().err.replace("'", "")
    assert not home.exists()
