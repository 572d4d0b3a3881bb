"""phi_build, phi_subtract, phi_evaluate: a fixed-size stand-in for tokens a read leaves out.

All three have gradients in every float array. Pallas bodies are for serving: their backward pass is that of
``xla``, which it computes again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels import dispatch
from pallas_kernels.phi import ref, xla
from pallas_kernels.phi.ref import Summary

__all__ = ["FLOOR", "Summary", "phi_build", "phi_evaluate", "phi_subtract"]

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


OFFERED_BUILD = dispatch.offered("phi", "build", xla.build, ref.build, gradient=xla.build)
OFFERED_SUBTRACT = dispatch.offered("phi", "subtract", xla.subtract, ref.subtract, gradient=xla.subtract)
OFFERED_EVALUATE = dispatch.offered("phi", "evaluate", xla.evaluate, ref.evaluate, gradient=xla.evaluate)

FLOOR = 1e-6
"""About ten roundings of float32: below this part of itself a difference of sums is noise."""


def _check(
    op: str,
    log_k: Float[Array, "B K S F"],
    v: Float[Array, "B K S H"],
    there: Bool[Array, "B K S"],
    summary: Summary | None,
) -> None:
    if log_k.ndim != 4 or v.ndim != 4 or log_k.shape[:3] != v.shape[:3] or there.shape != v.shape[:3]:
        raise ValueError(
            f"{op}(log_k {log_k.shape}, v {v.shape}, there {there.shape}) needs log_k [B, K, S, F], "
            "v [B, K, S, H] and there [B, K, S]."
        )
    if summary is not None:
        wanted = (*log_k.shape[:2], log_k.shape[3], v.shape[3])
        if summary.values.shape != wanted:
            raise ValueError(f"{op}: the summary holds {summary.values.shape}, the tokens need {wanted}.")


def phi_build(
    log_k: Float[Array, "B K S F"],
    v: Float[Array, "B K S H"],
    *,
    there: Bool[Array, "B K S"],
    onto: Summary | None = None,
    impl: str | None = None,
) -> Summary:
    """The summary of a set of tokens, or of that set and what ``onto`` holds already.

    Args:
      log_k: log features of the keys, any float dtype; -inf is the feature 0.
      v: values.
      there: which tokens belong to the set; the others' log_k and v may hold anything.
      onto: the summary of tokens not among these.
      impl: see ``dispatch``.

    Returns:
      float32. Absorb what the cache stores (rounded or dequantised), else ``phi_subtract`` cannot cancel.

    Raises:
      ValueError: shapes that do not fit together.
      Unsupported: ``impl`` is not offered.
    """
    _check("phi_build", log_k, v, there, onto)
    return dispatch.call("phi_build", impl, OFFERED_BUILD, lambda f: f(log_k, v, there, onto))


def phi_subtract(
    summary: Summary,
    log_k: Float[Array, "B K S F"],
    v: Float[Array, "B K S H"],
    *,
    there: Bool[Array, "B K S"],
    floor: float = FLOOR,
    impl: str | None = None,
) -> Summary:
    """The summary without some of the tokens it holds: those that this read visits itself.

    Args:
      summary: of these tokens and others.
      log_k: log features exactly as they were absorbed.
      v: values exactly as they were absorbed.
      there: which tokens to subtract.
      floor: a feature's weight is clamped to at least this part of what it was.
      impl: see ``dispatch``.

    Returns:
      float32, under the shift of ``summary``. Subtracting every token leaves ``floor`` of its weight.

    Raises:
      ValueError: shapes that do not fit together, or a floor outside (0, 1).
      Unsupported: ``impl`` is not offered.
    """
    _check("phi_subtract", log_k, v, there, summary)
    if not 0 < floor < 1:
        raise ValueError(f"phi_subtract(floor={floor}) keeps part of a weight. Use a number in (0, 1).")
    return dispatch.call(
        "phi_subtract", impl, OFFERED_SUBTRACT, lambda f: f(summary, log_k, v, there, floor=floor)
    )


def phi_evaluate(
    summary: Summary, log_q: Float[Array, "B N T F"], *, impl: str | None = None
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """The partial attention of each query over the summarised tokens, whose scores are
    log sum_f exp(log_q[f] + log_k[f]).

    Args:
      summary: of each KV head.
      log_q: log features of the queries, any float dtype.
      impl: see ``dispatch``.

    Returns:
      ``(out, lse)``, float32, for ``merge``; ``(0, -inf)`` where nothing was absorbed.

    Raises:
      ValueError: shapes that do not fit together.
      Unsupported: ``impl`` is not offered.
    """
    b, heads, f, _ = summary.values.shape
    fits = log_q.ndim == 4 and log_q.shape[0] == b and log_q.shape[3] == f and log_q.shape[1] % heads == 0
    if not fits:
        raise ValueError(
            f"phi_evaluate(summary {summary.values.shape}, log_q {log_q.shape}) needs a summary [B, K, F, H] "
            "and log_q [B, N, T, F] with N a multiple of K."
        )
    return dispatch.call("phi_evaluate", impl, OFFERED_EVALUATE, lambda f: f(summary, log_q))
