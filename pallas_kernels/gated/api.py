"""gated: WG-KV's training attention, with gradients of q, k, v and of the log gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels import dispatch
from pallas_kernels.gated import ref, xla
from pallas_kernels.gated.vjp import Rule

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

OFFERED = dispatch.offered("gated", "gated", xla.gated, ref.gated)


def gated(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    log_gate: Float[Array, "B K T"],
    *,
    window: int,
    lengths: Int[Array, " B"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    impl: str | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """Causal self-attention over right-padded rows with a bias on the keys outside the window.

    The score of query i and key j <= i is ``scale q_i . k_j``, plus ``log_gate[j]`` of the KV head where
    ``i - j >= window``. With log gates 0 and -inf this is the mask of ``vertical_slash``.

    Args:
      q: queries, any float dtype.
      k: keys; products run in the keys' dtype with float32 sums.
      v: values, of the keys' dtype.
      log_gate: of each key, usually <= 0; -inf closes it. Form it as
        ``logaddexp(log_sigmoid(z), log(eps))`` so that its gradient reaches z in float32.
      window: how many latest positions, the query's own included, have no bias.
      lengths: tokens of each row; positions past them may hold anything and get (0, -inf). None: all.
      scale: of the scores; H ** -0.5 by default.
      softcap: c in c tanh(score / c), before the bias; None for plain scores.
      impl: see ``dispatch``.

    Returns:
      ``(out, lse)``, float32. Both have gradients in q, k, v and log_gate; all but ``ref`` compute blocks
      again in the backward pass, hold no [T, T] array, and have no second derivative.

    Raises:
      ValueError: shapes that do not fit together, or a negative window.
      Unsupported: ``impl`` is not offered.
    """
    if q.ndim != 4 or k.ndim != 4 or q.shape[::2] != k.shape[::2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"gated(q {q.shape}, k {k.shape}) needs q [B, N, T, H] and k [B, K, T, H].")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"gated: {q.shape[1]} query heads do not divide over {k.shape[1]} KV heads.")
    if v.shape != k.shape or log_gate.shape != k.shape[:3]:
        raise ValueError(
            f"gated(v {v.shape}, log_gate {log_gate.shape}) needs v of k's shape and one log gate a key: "
            f"{k.shape[:3]}."
        )
    if window < 0:
        raise ValueError(f"gated(window={window}) counts positions. Use 0 or more.")
    if lengths is not None and lengths.shape != q.shape[:1]:
        raise ValueError(f"gated(lengths {lengths.shape}) needs one length a row: {q.shape[:1]}.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"gated(softcap={softcap}) bounds the scores. Use a number above 0, or None.")
    rule = Rule(window, q.shape[-1] ** -0.5 if scale is None else scale, softcap)
    return dispatch.call("gated", impl, OFFERED, lambda f: f(q, k, v, log_gate, lengths, rule=rule))
