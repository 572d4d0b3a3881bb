"""The differences between jax 0.7.2 and 0.12 that Pallas bodies meet, all in one place.

* ``pl.load`` is gone after 0.7: masked loads of Triton bodies are ``triton.load`` on every version.
* Races found by the TPU interpreter: 0.7 and 0.10 record them (see ``tests/kernels/kernel_bodies.py``), 0.12
  raises. That of Mosaic GPU raises.
* Triton's lowering warns of its deprecation since 0.11: silenced by pytest's filter, shown to users. A jax
  without it raises ``Unsupported`` for ``impl="triton"``; ``impl=None`` takes ``xla`` and logs the reason.

What 0.7.2 cannot do, by operation:

* blockwise, gated, merge, phi: nothing; every body runs interpreted there and compiles for a TPU with the
  libtpu of Colab (0.0.21.1, older than jax asks for) and for an H200.
* decode_step, ragged_decode, vertical_slash: on a TPU only where what is copied has a last axis of whole 128
  lanes (``check_lanes``); other head dimensions and pages take ``xla``.
* ragged_decode: ``xla`` on a CPU converts bfloat16 pools to float32 before each product (XLA's doing), so
  their read takes temporary memory and time; results are the same.
* ``impl="mosaic_gpu"``: 0.7 has not the Mosaic GPU it is written in, 0.10 compiles it but has an interpreter
  without ``layout_cast``; what is not there raises ``Unsupported``. 0.12 has both.
* A TPU's compiler errors are no ``JaxRuntimeError`` (``COMPILER_ERRORS``), in any version.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Unsupported

try:  # deprecated since 0.11, to be removed: bodies for TPU do without
    from jax.experimental.pallas import triton as plt
except ImportError:
    plt = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from jaxtyping import Array

try:
    from jax._src.pallas.mosaic.error_handling import MosaicError
except ImportError:
    MosaicError = jax.errors.JaxRuntimeError  # type: ignore[assignment, misc]

COMPILER_ERRORS = (jax.errors.JaxRuntimeError, MosaicError, NotImplementedError)
"""What a compiler says of a body that it cannot build."""

LANES = 128
"""Of a TPU's vector."""

Axis = Literal["parallel", "arbitrary"]

VMEM_LIMIT = 48 << 20
"""Bytes of VMEM a TPU body may use: v5p and 7x have 64 MiB, and the default is 16."""


def tpu_params(axes: Sequence[Axis], *, bounds_checks: bool = True) -> Any:
    """Compiler parameters of a TPU body with these grid axes.

    ``bounds_checks=False`` saves about 15 bundles a DMA; only for bodies whose ids were made safe before.
    """
    return pltpu.CompilerParams(
        dimension_semantics=tuple(axes),
        vmem_limit_bytes=VMEM_LIMIT,
        disable_bounds_checks=not bounds_checks,
    )


def triton_params(*, warps: int, stages: int) -> Any:
    """Compiler parameters of a GPU body.

    Raises:
      ImportError: this jax has no Triton lowering any more; ``dispatch.lazily`` raises ``Unsupported``.
    """
    if plt is None:
        raise ImportError(f"jax {jax.__version__} has no jax.experimental.pallas.triton")
    return plt.CompilerParams(num_warps=warps, num_stages=stages)


def mosaic_gpu() -> Any:
    """Pallas' Mosaic GPU, which bodies for Hopper are written in.

    Raises:
      ImportError: this jax has none, or one of other words (0.7).
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if "out_type" not in inspect.signature(plgpu.kernel).parameters:
        raise ImportError(f"the Mosaic GPU of jax {jax.__version__} has no kernel(out_type=...)")
    return plgpu


def in_hbm(x: Array) -> Array:
    """x, which XLA may not bring to VMEM as a whole before a TPU body reads parts of it.

    0.7 may: there such an operand cannot be written in place, nor the grid's size be an argument.
    """
    return x if jax.__version_info__ < (0, 8) else pltpu.with_memory_space_constraint(x, pltpu.HBM)


def check_lanes(op: str, *widths: int) -> None:
    """The last axes of what a TPU body copies in parts: 0.7's compiler copies whole lanes alone.

    Raises:
      Unsupported: another width, where jax is older than 0.8.
    """
    for width in widths:
        if jax.__version_info__ < (0, 8) and width % LANES:
            raise Unsupported(
                f"{op}(impl='mosaic_tpu'): the TPU compiler of jax {jax.__version__} copies arrays of whole "
                f"{LANES} lanes, not of {width}. Use impl='xla' or None."
            )


def load(ref: Any, mask: Array, other: float = 0) -> Array:
    """A masked load in a GPU body. On an interpreter all indices of ``ref.at`` are arrays, or none is."""
    return plt.load(ref, mask=mask, other=other)


def store(ref: Any, value: Array, mask: Array) -> None:
    """A masked store in a GPU body; as in ``load``."""
    plt.store(ref, value, mask=mask)


def tpu_interpreter(**options: Any) -> Any:
    """Parameters of the TPU interpreter: NaN in fresh memory, DMAs that run only when waited for."""
    return pltpu.InterpretParams(**options)


def gpu_interpreter(**options: Any) -> Any:
    """Parameters of the Mosaic GPU interpreter: threads, barriers, and NaN in fresh memory.

    None where jax has none that knows what the bodies use (0.10 and before).
    """
    with contextlib.suppress(ImportError):
        params = getattr(mosaic_gpu(), "InterpretGPUParams", None)
        return None if params is None else params(**options)
    return None
