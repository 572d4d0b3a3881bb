"""What tests of several operations share: running a Pallas body on a CPU, and refusals."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import pytest

from pallas_kernels import compat

BODIES = ("mosaic_tpu", "triton")


def body(op: str, impl: str, name: str, **options: Any) -> Callable[..., Any]:
    """``pallas_kernels/<op>/<impl>.py``'s function, on an interpreter: races looked for, fresh memory NaN."""
    module = importlib.import_module(f"pallas_kernels.{op}.{impl}")
    interpret = compat.tpu_interpreter(detect_races=True) if impl == "mosaic_tpu" else True
    return functools.partial(getattr(module, name), interpret=interpret, **options)


def small_blocks(impl: str) -> tuple[int, int]:
    """Tiles so small that a short prompt has several."""
    return (128, 128) if impl == "mosaic_tpu" else (16, 32)


def check_no_race(impl: str) -> None:
    """That the last interpreted TPU body had no race."""
    assert impl != "mosaic_tpu" or not races_found()


def check_refusals(
    run: Callable[..., Any], q: Any, k: Any, v: Any, keyed: Any, lengths: Any, each: str
) -> None:
    """What ``gated`` and ``vertical_slash`` refuse alike; ``keyed`` has one entry a key, ``each``."""
    with pytest.raises(ValueError, match=r"needs q \[B, N, T, H\]"):
        run(q, k[:, :, 1:], v, keyed, window=3)
    with pytest.raises(ValueError, match="do not divide"):
        run(q[:, :1], k, v, keyed, window=3)
    with pytest.raises(ValueError, match=each):
        run(q, k, v, keyed[:, :1], window=3)
    with pytest.raises(ValueError, match="counts positions"):
        run(q, k, v, keyed, window=-1)
    with pytest.raises(ValueError, match="one length a row"):
        run(q, k, v, keyed, window=3, lengths=lengths[:1])
    with pytest.raises(ValueError, match="softcap=0"):
        run(q, k, v, keyed, window=3, softcap=0)
    with pytest.raises(ValueError, match="names no implementation"):
        run(q, k, v, keyed, window=3, impl="gpu")


def races_found() -> bool:
    """Whether the last interpreted TPU body had a race (0.12 raises RuntimeError instead)."""
    for name in ("interpret.interpret_pallas_call", "interpret"):
        try:
            module = importlib.import_module(f"jax._src.pallas.mosaic.{name}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, "races"):
            if module.races is None:
                raise ValueError("races_found() before any body has run on the TPU interpreter. Run one.")
            return bool(module.races.races_found)
    raise NotImplementedError(f"jax {jax.__version__} keeps its race detector somewhere else.")
