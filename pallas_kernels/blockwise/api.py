"""blockwise: T queries over S dense keys. column_mass: what attention each key received."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from pallas_kernels import dispatch, reverse
from pallas_kernels.blockwise import grad, ref, xla, xla_grad
from pallas_kernels.blockwise.sight import Partial, Sight, Where
from pallas_kernels.tuning import Tuned

if TYPE_CHECKING:
    from jax.typing import DTypeLike
    from jaxtyping import Array, Bool, Float, Int


def _body(module: str, backward: Any = None) -> Any:
    """A Pallas body with its backward pass, or with another's."""
    forward = dispatch.lazily(f"pallas_kernels.blockwise.{module}:blockwise")
    own = dispatch.lazily(f"pallas_kernels.blockwise.{module}_grad:backward")

    def run(
        q: Array, k: Array, v: Array, where: Where, *, sight: Sight, interpret: Any, blocks: Tuned = ()
    ) -> Partial:
        first, back = (functools.partial(f, interpret=interpret, blocks=blocks) for f in (forward, own))
        return grad.differentiable(first, backward or back, sight, q, k, v, where)

    return run


OFFERED: dispatch.Offered = {
    "mosaic_tpu": _body("mosaic_tpu"),
    "triton": _body("triton"),
    "mosaic_gpu": _body("mosaic_gpu", xla_grad.backward),
    "xla": xla.blockwise,
    "ref": ref.blockwise,
}
OFFERED_MASS = dispatch.offered(
    "blockwise",
    "column_mass",
    reverse.borrowing(xla.column_mass, ref.column_mass),
    ref.column_mass,
    gradient=ref.column_mass,
)


def _check(
    op: str,
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    q_pos: Int[Array, "B T"],
    k_pos: Int[Array, "B S"],
    window: int | None,
    admit: Bool[Array, "B K S"] | None,
    softcap: float | None,
) -> None:
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{op}(q {q.shape}, k {k.shape}) needs q [B, N, T, H] and k [B, K, S, H].")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{op}: {q.shape[1]} query heads do not divide over {k.shape[1]} KV heads.")
    if q_pos.shape != (q.shape[0], q.shape[2]) or k_pos.shape != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"{op}(q_pos {q_pos.shape}, k_pos {k_pos.shape}) needs [B, T] = {(q.shape[0], q.shape[2])} and "
            f"[B, S] = {(k.shape[0], k.shape[2])}."
        )
    if window is not None and window < 0:
        raise ValueError(f"{op}(window={window}) counts positions. Use 0 or more, or None for no window.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}(softcap={softcap}) bounds the scores. Use a number above 0, or None.")
    if admit is not None and admit.shape != k.shape[:3]:
        raise ValueError(
            f"{op}(admit {admit.shape}) needs one bit a key and KV head: [B, K, S] = {k.shape[:3]}."
        )


def blockwise(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    *,
    q_pos: Int[Array, "B T"],
    k_pos: Int[Array, "B S"],
    window: int | None = None,
    admit: Bool[Array, "B K S"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dtype: DTypeLike = jnp.float32,
    impl: str | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """Causal attention by position, within a window or to admitted keys.

    Key j is visible to query i of KV head h iff both positions are >= 0, ``k_pos[j] <= q_pos[i]``
    and (``window is None`` or ``q_pos[i] - k_pos[j] < window`` or ``admit[h, j]``). Positions need
    no order, so a ring is read as it lies.

    A NaN in a query or a key it sees makes that query's out and lse NaN; one in a value the out of all
    queries it is multiplied with, weights of 0 included. Queries that see nothing, and keys that are padding,
    later than every query of their row or before all windows and not admitted by any head, may hold
    anything: neither results nor gradients know of it.

    Args:
      q: queries, any float dtype.
      k: keys; products run in the keys' dtype with float32 sums.
      v: values, of the keys' dtype.
      q_pos: position of each query; negative is padding and gets (0, -inf).
      k_pos: position of each key; negative is padding (a NaN there costs ``xla`` a second pass when T is
        small).
      window: how many latest positions a query sees, its own included.
      admit: keys visible beyond the window, per KV head; of no effect without a window.
      scale: of the scores; H ** -0.5 by default.
      softcap: c in c tanh(score / c), taken of the scaled scores before masking; None for plain scores.
      dtype: of ``out``; sums are float32 whatever it is. A backward pass starts from ``out`` as it was
        rounded.
      impl: see ``dispatch``; "mosaic_gpu" takes bfloat16 of head dim 64 or 128 on Hopper, and its backward
        pass is that of "xla".

    Returns:
      ``(out, lse)``, of ``dtype`` and float32. Both have gradients in q, k and v, in every implementation.
      All but ``ref`` keep no [T, S] array beyond one block once T * S is large, forward or backward, and have
      no second derivative.

    Raises:
      ValueError: shapes that do not fit together, or a negative window.
      Unsupported: ``impl`` is not offered.
    """
    _check("blockwise", q, k, q_pos, k_pos, window, admit, softcap)
    if v.shape != k.shape:
        raise ValueError(f"blockwise(k {k.shape}, v {v.shape}) needs keys and values of one shape.")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    sight, where = Sight(window, scale, softcap, jnp.dtype(dtype)), Where(q_pos, k_pos, admit)
    return dispatch.call("blockwise", impl, OFFERED, lambda run: run(q, k, v, where, sight=sight))


def column_mass(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    lse: Float[Array, "B N T"],
    weights: Float[Array, "B T"],
    *,
    q_pos: Int[Array, "B T"],
    k_pos: Int[Array, "B S"],
    window: int | None = None,
    admit: Bool[Array, "B K S"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    impl: str | None = None,
) -> Float[Array, "B N S"]:
    """Weighted attention each key received: sum over queries of weights_i exp(s_ij - lse_i).

    All-one weights give H2O's column sums, a one at the last query TOVA's row, ones over the last
    queries SnapKV's observation window. Blocks of queries whose weights are all 0 cost nothing.

    Args:
      q, k, q_pos, k_pos, window, admit, scale, softcap, impl: as in ``blockwise``.
      lse: what ``blockwise`` returned, or the lse of a larger attention these keys are part of.
      weights: of each query, float32.

    Returns:
      float32; 0 for keys that no query sees. Gradients of q, k, lse and weights are those of ``ref``
      whatever ran forward: exact, and as large as all scores at once.

    Raises:
      ValueError: shapes that do not fit together, or a negative window.
      Unsupported: ``impl`` is not offered.
    """
    _check("column_mass", q, k, q_pos, k_pos, window, admit, softcap)
    if lse.shape != q.shape[:3] or weights.shape != q_pos.shape:
        raise ValueError(
            f"column_mass(lse {lse.shape}, weights {weights.shape}) needs [B, N, T] = {q.shape[:3]} and "
            f"[B, T] = {q_pos.shape}."
        )
    sight = Sight(window, q.shape[-1] ** -0.5 if scale is None else scale, softcap)
    where = Where(q_pos, k_pos, admit)
    return dispatch.call(
        "column_mass", impl, OFFERED_MASS, lambda run: run(q, k, lse, weights, where, sight=sight)
    )
