"""The choice of an implementation is made once, aloud, and never behind an explicit name."""

from __future__ import annotations

import ast
import logging
import pathlib

import pytest

import pallas_kernels
from pallas_kernels import dispatch
from pallas_kernels.dispatch import Unsupported, choose


def xla():
    return "xla"


def test_none_picks_by_platform_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch.jax, "default_backend", lambda: "tpu")
    dispatch._announce.cache_clear()
    with caplog.at_level(logging.INFO, logger="pallas_kernels.dispatch"):
        assert choose("op", None, {"xla": xla, "ref": print}) is xla
        assert choose("op", None, {"xla": xla, "ref": print}) is xla
        assert choose("op", None, {"xla": xla, "mosaic_tpu": print}) is print
    assert [r.getMessage() for r in caplog.records] == [
        "op: impl=None runs 'xla' on tpu",
        "op: impl=None runs 'mosaic_tpu' on tpu",
    ]


def test_an_explicit_name_runs_or_raises():
    assert choose("op", "ref", {"xla": xla, "ref": print}) is print
    with pytest.raises(Unsupported, match="TPU has been written"):
        choose("op", "mosaic_tpu", {"xla": xla})
    with pytest.raises(ValueError, match="names no implementation"):
        choose("op", "gpu", {"xla": xla})


def test_the_package_stands_alone():
    """Nothing but jax, NumPy, the standard library and itself (jaxtyping for the type checker only)."""
    root = pathlib.Path(pallas_kernels.__file__).parent
    files = sorted(root.rglob("*.py"))
    assert len(files) > 15
    allowed = {"jax", "numpy", "pallas_kernels", "jaxtyping", "__future__", "collections", "typing"}
    allowed |= {"functools", "logging", "time", "argparse"}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, path
