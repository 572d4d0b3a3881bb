"""The choice of an implementation is made once, aloud, and never behind an explicit name."""

from __future__ import annotations

import ast
import functools
import json
import logging
import pathlib
import sys
import types

import jax
import pytest

import pallas_kernels
from pallas_kernels import compat, dispatch, lowering, products, records
from pallas_kernels.dispatch import IMPLS, Unsupported, choose


def xla():
    return "xla"


def kernel(*, interpret):
    return f"kernel, interpret={interpret}"


@pytest.fixture
def on_tpu(monkeypatch, tmp_path):
    """A TPU for all that dispatch can see; a function that records that ``op`` has run on it."""
    monkeypatch.setattr(dispatch.jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(dispatch.jax, "devices", lambda: [types.SimpleNamespace(device_kind="TPU v5 lite")])
    monkeypatch.setattr(dispatch, "TUNED", tmp_path / "shipped")
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))

    def record(folder="shipped", **what):
        place = tmp_path / folder / "tpu-v5-lite"
        place.mkdir(parents=True, exist_ok=True)
        (place / "op.json").write_text(json.dumps(what))
        dispatch.record.cache_clear()

    for known in (dispatch._log_choice, dispatch._warn_unchecked, dispatch.record):
        known.cache_clear()
    yield record
    dispatch.record.cache_clear()


def said(caplog):
    return [r.getMessage() for r in caplog.records]


def test_none_picks_by_platform_and_says_so_once(caplog, on_tpu):
    with caplog.at_level(logging.INFO, logger="pallas_kernels.dispatch"):
        assert choose("op", None, {"xla": xla, "ref": print}) is xla
        assert choose("op", None, {"xla": xla, "ref": print}) is xla
        on_tpu(impl="mosaic_tpu", agrees=True)
        chosen = choose("op", None, {"xla": xla, "mosaic_tpu": kernel})
        assert chosen() == "kernel, interpret=False"
    assert said(caplog) == ["op: impl=None runs 'xla' on tpu", "op: impl=None runs 'mosaic_tpu' on tpu"]


@pytest.mark.parametrize("what", [{}, {"impl": "mosaic_tpu", "agrees": False}, {"impl": "x", "agrees": True}])
def test_a_body_without_a_good_record_on_the_device_is_left_out_aloud(caplog, on_tpu, what):
    on_tpu(**what)
    with caplog.at_level(logging.INFO, logger="pallas_kernels.dispatch"):
        assert choose("op", None, {"xla": xla, "mosaic_tpu": kernel}) is xla
        assert choose("other", None, {"xla": xla, "mosaic_tpu": kernel}) is xla
    lines = [line for line in said(caplog) if line.startswith("op:")]
    tried = what.get("impl") == "mosaic_tpu"
    assert ("did not agree" if tried else "no record of 'mosaic_tpu'") in lines[0]
    loud = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(loud) == 1, "a device that nobody has tried is said once, whatever the number of operations"
    assert "python -m kvjax.tune" in loud[0]


MINE = {"impl": "mosaic_tpu", "agrees": True, "jax": jax.__version__}


@pytest.mark.parametrize(
    ("changed", "why"),
    [({}, ""), ({"jax": "0.1"}, "was made with jax 0.1"), ({"sources": "x"}, "is of other bodies")],
)
def test_the_users_record_counts_for_the_bodies_and_the_jax_it_was_made_with(caplog, on_tpu, changed, why):
    on_tpu("kernels", **MINE | {"sources": records.sources("op")} | changed)
    offered = {"xla": xla, "mosaic_tpu": kernel}
    with caplog.at_level(logging.INFO, logger="pallas_kernels.dispatch"):
        chosen = choose("op", None, offered)
    assert (chosen is xla) == bool(why)
    if why:
        assert f"the record of 'mosaic_tpu' on this device {why}" in said(caplog)[-1]
        on_tpu(impl="mosaic_tpu", agrees=True)
        assert choose("op", None, offered) is not xla, "the package's record stands behind an old one"


def test_the_users_record_goes_before_the_packages(on_tpu):
    on_tpu(impl="mosaic_tpu", agrees=True)
    on_tpu("kernels", **MINE | {"sources": records.sources("op"), "agrees": False})
    assert choose("op", None, {"xla": xla, "mosaic_tpu": kernel}) is xla


def test_a_device_that_is_not_here_is_not_called_untried(caplog, on_tpu):
    with lowering.for_device("TPU v5 lite", 1, "tpu"), caplog.at_level(logging.WARNING):
        assert choose("op", None, {"xla": xla, "mosaic_tpu": kernel}) is xla
    assert said(caplog) == []


def test_a_body_that_cannot_run_these_arguments_makes_place_aloud_unless_asked_for(caplog, on_tpu):
    def odd(*, interpret):
        raise Unsupported("a page of 3 slots")

    offered = {"xla": xla, "mosaic_tpu": odd}
    on_tpu(impl="mosaic_tpu", agrees=True)
    with caplog.at_level(logging.INFO, logger="pallas_kernels.dispatch"):
        assert dispatch.call("op", None, offered, lambda f: f()) == "xla"
    assert said(caplog) == ["op: a page of 3 slots", "op: impl=None runs 'xla' on tpu"]
    with pytest.raises(Unsupported, match="3 slots"):
        dispatch.call("op", "mosaic_tpu", offered, lambda f: f())


def test_what_a_version_of_jax_lacks_makes_place_aloud_unless_asked_for(caplog, on_tpu):
    offered = {"xla": xla, "mosaic_tpu": dispatch.lazily("pallas_kernels.of_a_later_jax:run")}
    on_tpu(impl="mosaic_tpu", agrees=True)
    with caplog.at_level(logging.INFO, logger="pallas_kernels.dispatch"):
        assert dispatch.call("op", None, offered, lambda f: f()) == "xla"
    assert f"needs what jax {jax.__version__} does not have" in said(caplog)[0]
    with pytest.raises(Unsupported, match="of_a_later_jax"):
        dispatch.call("op", "mosaic_tpu", offered, lambda f: f())


def test_an_old_compiler_is_spared_what_it_cannot_copy(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    compat.check_lanes("op", 64)
    monkeypatch.setattr(jax, "__version_info__", (0, 7, 2))
    compat.check_lanes("op", 256)
    with pytest.raises(Unsupported, match=r"op\(.* whole 128 lanes, not of 64\. Use impl='xla'"):
        compat.check_lanes("op", 128, 64)


def test_a_jax_without_triton_says_so(monkeypatch):
    monkeypatch.setattr(compat, "plt", None)
    q = jax.numpy.ones((1, 1, 3, 24))
    pos = jax.numpy.arange(3)[None]
    with dispatch.interpreted(), pytest.raises(Unsupported, match=r"no jax\.experimental\.pallas\.triton"):
        pallas_kernels.blockwise(q, q, q, q_pos=pos, k_pos=pos, impl="triton")


def test_an_explicit_name_runs_or_raises():
    assert choose("op", "ref", {"xla": xla, "ref": print}) is print
    with pytest.raises(Unsupported, match="TPU has been written"):
        choose("op", "mosaic_tpu", {"xla": xla})
    with pytest.raises(ValueError, match="names no implementation"):
        choose("op", "gpu", {"xla": xla})
    if jax.default_backend() != "tpu":
        with pytest.raises(Unsupported, match="its body is for tpu"):
            choose("op", "mosaic_tpu", {"xla": xla, "mosaic_tpu": kernel})


def test_bodies_run_interpreted_where_that_is_asked_for():
    with dispatch.interpreted():
        assert choose("op", "triton", {"triton": kernel})() == "kernel, interpret=True"
        assert "InterpretParams" in choose("op", "mosaic_tpu", {"mosaic_tpu": kernel})()


@pytest.mark.parametrize(
    ("device", "platform"),
    [(("TPU v6 lite", 1), "tpu"), (("TPU v5", 2), "tpu"), (("NVIDIA H200", 132), "gpu")],
)
def test_a_device_that_is_not_here_is_lowered_for(device, platform):
    with lowering.for_device(*device, platform):
        assert lowering.platform() == platform
        assert choose("op", "mosaic_tpu" if platform == "tpu" else "triton", dict.fromkeys(IMPLS, kernel))
    assert lowering.platform() == jax.default_backend()


def test_a_record_of_a_device_that_is_not_here_counts(monkeypatch):
    """Traced on a CPU for a TPU that is known to run it, ``impl=None`` takes the body; for others not."""
    monkeypatch.setattr(dispatch, "record", lambda op, kind: RAN if kind == "TPU v5 lite" else {})
    offered = {"xla": xla, "mosaic_tpu": kernel, "triton": kernel}
    assert choose("op", None, offered) is xla
    with lowering.for_device("TPU v5 lite", 1, "tpu"):
        assert choose("op", None, offered)() == "kernel, interpret=False"
        assert dispatch.call("op", None, offered, lambda run: run()) == "kernel, interpret=False"
    with lowering.for_device("TPU v6 lite", 1, "tpu"):
        assert choose("op", None, offered) is xla


RAN = {"impl": "mosaic_tpu", "agrees": True}


@pytest.mark.parametrize(
    ("run", "shapes", "dtype", "on_cpu"),
    [
        (functools.partial(products.scores, scale=0.5), ((1, 64), (128, 64)), "bfloat16", "2x64xbf16"),
        (products.mix, ((1, 128), (128, 64)), "bfloat16", "2x128xbf16"),
        (functools.partial(products.scores, scale=0.5), ((4, 64), (128, 64)), "float32", "128x4xf32"),
    ],
)
def test_a_cpus_forms_are_compiled_for_cpus_alone(run, shapes, dtype, on_cpu):
    """By the platform that is lowered for, on whichever one traces."""
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    texts = {
        platform: jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "tpu", "cuda")
    }
    assert {platform for platform, text in texts.items() if on_cpu in text} == {"cpu"}


def test_the_package_stands_alone():
    """Nothing but jax, NumPy, the standard library and itself (jaxtyping for the type checker only)."""
    root = pathlib.Path(pallas_kernels.__file__).parent
    files = sorted(root.rglob("*.py"))
    assert len(files) > 15
    allowed = {"jax", "numpy", "pallas_kernels", "jaxtyping"}
    allowed |= set(sys.stdlib_module_names)
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, path
