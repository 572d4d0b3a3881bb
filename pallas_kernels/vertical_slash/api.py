"""vertical_slash: prefill whose cost follows the window and the admitted keys."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax.numpy as jnp

from pallas_kernels import dispatch, reverse
from pallas_kernels.blockwise import xla as blockwise
from pallas_kernels.vertical_slash import ref, xla
from pallas_kernels.vertical_slash.compact import Inputs
from pallas_kernels.vertical_slash.tiles import Rule

if TYPE_CHECKING:
    from jax.typing import DTypeLike
    from jaxtyping import Array, Bool, Float, Int

_PLAIN = functools.partial(ref.vertical_slash, blockwise=blockwise.blockwise)
"""Whose gradient all but ``ref`` have: the same mask, by blocks."""

OFFERED = dispatch.offered(
    "vertical_slash",
    "vertical_slash",
    reverse.borrowing(xla.vertical_slash, _PLAIN),
    ref.vertical_slash,
    gradient=_PLAIN,
    more=("mosaic_gpu",),
)


def vertical_slash(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    admit: Bool[Array, "B K S"],
    *,
    window: int,
    lengths: Int[Array, " B"] | None = None,
    offset: Int[Array, " B"] | None = None,
    capacity: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dtype: DTypeLike = jnp.float32,
    impl: str | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Int[Array, "B K"]]:
    """Self-attention over right-padded rows: key j is visible to query i >= j iff it is near or admitted.

    Near is ``i - j < window``; admission is a matter of each KV head and token by token, not by blocks.
    Admitted keys are packed once (``compact.compact``), so memory is that of k and v for ``capacity`` keys
    and work that of T window + (pairs of a query and an admitted older key).

    Queries may be fewer than keys: a piece of a prompt, at ``offset``, over all that is there so far.

    Args:
      q: queries, any float dtype.
      k: keys; products run in the keys' dtype with float32 sums.
      v: values, of the keys' dtype.
      admit: which keys each KV head admits.
      window: how many latest positions, the query's own included, every query sees.
      lengths: tokens of each row, queries' and older ones; positions past them may hold anything and get
        (0, -inf). None: all S.
      offset: position of each row's first query, 0 or more; key j is at position j. None: 0.
      capacity: most keys a KV head may admit; None: all of them, which cannot overflow.
      scale: of the scores; H ** -0.5 by default.
      softcap: c in c tanh(score / c), before masking; None for plain scores.
      dtype: of ``out``; sums are float32 whatever it is.
      impl: see ``dispatch``; "mosaic_gpu" takes bfloat16 of head dim 64 or 128 on Hopper.

    Returns:
      ``(out, lse, admitted)``: of ``dtype``, float32, and int32: how many keys each KV head admitted.
      Where it exceeds ``capacity`` keys are missing, and the whole answer of that KV head's query heads is
      NaN, as are the gradients through it.
      Gradients of q, k and v are those of ``blockwise`` on this mask whatever ran forward: exact, no [T, T]
      array, computed over all blocks that hold a visible pair. (WG-KV trains with ``gated``.)

    Raises:
      ValueError: shapes that do not fit together, a negative window, a capacity below 1.
      Unsupported: ``impl`` is not offered.
    """
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"vertical_slash(q {q.shape}, k {k.shape}) needs q [B, N, T, H] and k [B, K, S, H].")
    if offset is None and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"vertical_slash(q {q.shape}, k {k.shape}) needs q [B, N, T, H] and k [B, K, S, H] with T = S. "
            "For a piece of a prompt pass `offset`, the position of each row's first query."
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"vertical_slash: {q.shape[1]} query heads do not divide over {k.shape[1]} KV heads."
        )
    if v.shape != k.shape or admit.shape != k.shape[:3]:
        raise ValueError(
            f"vertical_slash(v {v.shape}, admit {admit.shape}) needs v of k's shape and one bit a key: "
            f"{k.shape[:3]}."
        )
    if window < 0:
        raise ValueError(f"vertical_slash(window={window}) counts positions. Use 0 or more.")
    if lengths is not None and lengths.shape != q.shape[:1]:
        raise ValueError(f"vertical_slash(lengths {lengths.shape}) needs one length a row: {q.shape[:1]}.")
    if offset is not None and offset.shape != q.shape[:1]:
        raise ValueError(f"vertical_slash(offset {offset.shape}) needs one position a row: {q.shape[:1]}.")
    if capacity is not None and capacity < 1:
        raise ValueError(f"vertical_slash(capacity={capacity}) holds no key. Use 1 or more, or None.")
    if softcap is not None and not softcap > 0:
        raise ValueError(
            f"vertical_slash(softcap={softcap}) bounds the scores. Use a number above 0, or None."
        )
    capacity = k.shape[2] if capacity is None else min(capacity, k.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rule = Rule(window, capacity, scale, softcap, jnp.dtype(dtype))
    x = Inputs(q, k, v, admit, lengths, offset)
    return dispatch.call("vertical_slash", impl, OFFERED, lambda f: f(x, rule=rule))
