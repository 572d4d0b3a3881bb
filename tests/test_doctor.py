"""``python -m kvjax.doctor``: what it says of software, devices and records, and what it refuses."""

from __future__ import annotations

import json
import platform
import re
from importlib import metadata

import jax
import pytest

from kvjax import doctor
from kvjax.cli import InputError
from pallas_kernels import records


def test_one_block_names_versions_devices_and_kernels(capsys):
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("```text\nkvjax ")
    assert out.endswith("\n```\n")
    assert f"Python {platform.python_version()}" in out
    for name in ("jax", "jaxlib", "flax", "numpy"):
        assert f"{name} {metadata.version(name)}" in out
    here = jax.devices()
    assert f"devices: {len(here)} x {here[0].device_kind} ({here[0].platform})" in out
    assert "kernels: XLA's, as on every cpu" in out
    assert "MISSING" not in out
    assert "TOO OLD" not in out
    assert not re.search(r"/home|/root|/tmp|/Users", out)  # a block that can be pasted


def test_a_requirement_that_is_not_met_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setattr(
        metadata, "requires", lambda name: ["jax>=99.1", "nothing-here>=1", 'x; extra == "y"']
    )
    lines = list(doctor.software())
    assert f"TOO OLD jax {jax.__version__}: pip install 'jax>=99.1'" in lines
    assert "MISSING nothing-here>=1: pip install 'nothing-here>=1'" in lines


def test_extras_that_are_absent_are_listed(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name in ("pyarrow", "gguf") else object())
    assert list(doctor.software())[-1].startswith("extras not installed: suites, gguf (")


def test_an_extra_that_is_not_here_is_refused_with_the_way_out(monkeypatch):
    doctor.need()
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs matplotlib, .* pip install 'kvjax\[plot\]'"):
        doctor.need("plot")


class Card:
    """A device of a kind that is not here."""

    platform, device_kind = "gpu", "Some Card"

    def memory_stats(self):
        return {"bytes_limit": 3 * 2**30}


def test_bodies_on_record_are_told_from_old_and_absent_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(jax, "devices", lambda: [Card(), Card()])
    assert list(doctor.devices())[0] == "devices: 2 x Some Card (gpu), 3.00 GiB each"
    folder = tmp_path / "kernels" / "some-card"
    folder.mkdir(parents=True)
    made = {"jax": jax.__version__, "impl": "triton", "agrees": True}
    for name, record in {
        "phi": made | {"sources": records.sources("phi")},
        "gated": made | {"sources": records.sources("gated"), "agrees": False},
        "blockwise": made | {"sources": "others"},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(record))
    told = {line.split()[1]: line for line in doctor.kernels() if line.startswith("kernels:")}
    assert told["phi"].endswith(f"triton, checked with jax {jax.__version__}")
    assert told["gated"].endswith("XLA's: a check disagrees")
    assert told["blockwise"].endswith("XLA's: the record is of other bodies")
    assert told["ragged_decode"].endswith("XLA's: nothing on record")


def test_a_device_that_cannot_be_used_is_one_sentence(monkeypatch, capsys):
    def taken():
        raise RuntimeError("Unable to initialize backend 'tpu': in use\nmore")

    monkeypatch.setattr(jax, "devices", taken)
    assert doctor.main([]) == 2
    both = capsys.readouterr()
    assert "JAX cannot use this machine's devices (Unable to initialize backend 'tpu': in use)." in both.err
    assert both.out.endswith("```\n")


def test_tuning_needs_a_device(capsys):
    assert doctor.main(["--tune"]) == 2
    assert "tune needs a GPU or TPU" in capsys.readouterr().err


def test_a_wrong_answer_is_in_the_block_and_in_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "answers", lambda: iter([("float32 WRONG ' 17'", False)]))
    assert doctor.main(["--check"]) == 1
    assert "WRONG ' 17'" in capsys.readouterr().out


@pytest.mark.slow
def test_the_check_finds_the_number_in_every_dtype():
    told = list(doctor.answers())
    assert len(told) == len(doctor.DTYPES) * len(doctor.POLICIES)
    assert all(good for _, good in told), told


def test_the_check_of_one_policy():
    ((line, good),) = doctor.answers(["float32"], ["full"])
    assert good
    assert "right" in line
    ((line, good),) = doctor.answers(["nonsense"], ["full"])
    assert not good
    assert line.startswith("nonsense  FAILED ")
