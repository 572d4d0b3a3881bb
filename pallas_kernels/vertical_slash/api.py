"""vertical_slash: prefill whose cost follows the window and the admitted keys."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pallas_kernels import dispatch, reverse
from pallas_kernels.blockwise import xla as blockwise
from pallas_kernels.vertical_slash import ref, xla
from pallas_kernels.vertical_slash.tiles import Rule

if TYPE_CHECKING:
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
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    admit: Bool[Array, "B K T"],
    *,
    window: int,
    lengths: Int[Array, " B"] | None = None,
    capacity: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    impl: str | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Int[Array, "B K"]]:
    """Self-attention over right-padded rows: key j is visible to query i >= j iff it is near or admitted.

    Near is ``i - j < window``; admission is a matter of each KV head and token by token, not by blocks.
    Admitted keys are packed once (``compact.compact``), so memory is that of k and v for ``capacity`` keys
    and work that of T window + (pairs of a query and an admitted older key).

    Args:
      q: queries, any float dtype.
      k: keys; products run in the keys' dtype with float32 sums.
      v: values, of the keys' dtype.
      admit: which keys each KV head admits.
      window: how many latest positions, the query's own included, every query sees.
      lengths: tokens of each row; positions past them may hold anything and get (0, -inf). None: all.
      capacity: most keys a stream may admit; None: all of them, which cannot overflow.
      scale: of the scores; H ** -0.5 by default.
      softcap: c in c tanh(score / c), before masking; None for plain scores.
      impl: see ``dispatch``; "mosaic_gpu" takes bfloat16 of head dim 64 or 128 on Hopper.

    Returns:
      ``(out, lse, admitted)``: float32, and the int32 number of keys that each stream admitted. Where it
      exceeds ``capacity`` keys are missing, and the whole answer of that stream's query heads is NaN, as are
      the gradients through it.
      Gradients of q, k and v are those of ``blockwise`` on this mask whatever ran forward: exact, no [T, T]
      array, computed over all blocks that hold a visible pair. (WG-KV trains with ``gated``.)

    Raises:
      ValueError: shapes that do not fit together, a negative window, a capacity below 1.
      Unsupported: ``impl`` is not offered.
    """
    if q.ndim != 4 or k.ndim != 4 or q.shape[::2] != k.shape[::2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"vertical_slash(q {q.shape}, k {k.shape}) needs q [B, N, T, H] and k [B, K, T, H].")
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
    if capacity is not None and capacity < 1:
        raise ValueError(f"vertical_slash(capacity={capacity}) holds no key. Use 1 or more, or None.")
    if softcap is not None and not softcap > 0:
        raise ValueError(
            f"vertical_slash(softcap={softcap}) bounds the scores. Use a number above 0, or None."
        )
    capacity = q.shape[2] if capacity is None else min(capacity, q.shape[2])
    rule = Rule(window, capacity, q.shape[-1] ** -0.5 if scale is None else scale, softcap)
    return dispatch.call("vertical_slash", impl, OFFERED, lambda f: f(q, k, v, admit, lengths, rule=rule))
