"""merge: partial attentions over disjoint tokens become the attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pallas_kernels.dispatch import Offered, choose
from pallas_kernels.merge import ref, xla

if TYPE_CHECKING:
    from jaxtyping import Array, Float

OFFERED: Offered = {"xla": xla.merge, "ref": ref.merge}


def merge(
    parts: Sequence[tuple[Array, ...]], *, impl: str | None = None
) -> tuple[Float[Array, "... H"], Float[Array, " ..."]]:
    """Join partials of one attention over disjoint token sets; associative and commutative.

    Args:
      parts: one or more ``(out [..., H], lse [...])`` of equal shapes; an empty one is ``(anything, -inf)``.
      impl: see ``dispatch``. Elementwise work fuses on every platform: no Pallas body is planned.

    Returns:
      ``(out, lse)`` in float32, ``(0, -inf)`` where every part is empty, NaN where any part's lse is NaN.
      Differentiable everywhere.

    Raises:
      ValueError: no parts, or parts whose shapes differ.
      Unsupported: ``impl`` is not offered.
    """
    run = choose("merge", impl, OFFERED)
    if not parts:
        raise ValueError("merge([]) has no shape to answer with. Pass at least one (out, lse).")
    for out, lse in parts:
        if out.shape != parts[0][0].shape or lse.shape != out.shape[:-1]:
            shapes = [(o.shape, l.shape) for o, l in parts]
            raise ValueError(
                f"merge(parts) needs out [..., H] and lse [...], the same in all parts; got {shapes}."
            )
    return run(parts)
