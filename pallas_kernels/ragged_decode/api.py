"""ragged_decode: queries over the live slots of each KV head's own list of pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from pallas_kernels import dispatch, reverse
from pallas_kernels.ragged_decode import codes, picked, ref, xla
from pallas_kernels.ragged_decode.call import Lists, Options, Pools
from pallas_kernels.ragged_decode.codes import (
    FLOATS8,
    PAIRED,
    Grouped,
    decoded,
    floats,
    floats8,
    lowest_and_step,
    packed,
    paired,
    turned,
    unpacked,
    values,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Num

__all__ = [
    "FLOATS8",
    "OFFERED",
    "PAIRED",
    "Grouped",
    "decoded",
    "floats",
    "floats8",
    "gathered_decode",
    "largest_scores",
    "lowest_and_step",
    "packed",
    "paired",
    "ragged_decode",
    "turned",
    "unpacked",
    "values",
]

OFFERED = dispatch.offered(
    "ragged_decode",
    "ragged_decode",
    reverse.borrowing(xla.ragged_decode, ref.ragged_decode),
    ref.ragged_decode,
    gradient=ref.ragged_decode,
    more=("mosaic_gpu",),
)


def ragged_decode(
    q: Float[Array, "B N T H"],
    k_pages: Num[Array, "P S X"],
    v_pages: Num[Array, "P S X"],
    table: Int[Array, "B K M"],
    length: Int[Array, "B K"],
    *,
    scales: Float[Array, "P 2 H"] | Grouped | None = None,
    pages: Int[Array, "B K J"] | None = None,
    slots: Bool[Array, "B K J S"] | None = None,
    bias: Float[Array, "B N M S"] | None = None,
    mass: bool = False,
    shared: bool = False,
    turn: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    impl: str | None = None,
) -> tuple[Array, ...]:
    """Attention of every query to every live slot of its KV head; no causal mask.

    Each KV head of a row has a list of pages. Its m-th page is ``table[b, k, m]``; slot s of it is live iff
    ``m * S + s < length[b, k]``. Whatever the table holds beyond the live pages, and whatever dead slots
    and free pages hold (NaN too), is never seen. A NaN in a query or a live key makes the row's answer NaN,
    one in a live value its out.

    In ``xla`` a NaN or infinity in a dead value of a live page costs a second, slow pass (looking for
    it costs nothing measurable; masking the pool on every call costs 1.3 to 7 times the read), so
    keep pools finite. Gradients (q, float pools, scales) are those of ``ref`` whatever ran forward: exact,
    and as large as all listed pages gathered at once.

    Args:
      q: queries, any float dtype.
      k_pages: key pool, X = H; float, or codes with ``scales``: int8, uint8 that holds two codes of 4 bits a
        byte (``paired``), or uint16 that holds two e4m3 floats (``floats8``; ``xla`` and ``ref``), X = H / 2.
      v_pages: value pool, of the same shape and dtype.
      table: pool page ids.
      length: live slots of each KV head.
      scales: of codes, one a page and channel: ``[:, 0]`` for keys, ``[:, 1]`` for values; or ``Grouped``, of
        codes of 2 or 4 bits in uint8 pools (``xla`` and ``ref``).
      pages: read only these entries of each KV head's list (indices into M, EMPTY = none, no
        duplicates); cost follows J.
      slots: with ``pages``, read only these slots of them.
      bias: added to each query head's (capped) scores in float32; -inf hides a slot from it. An
        estimator that samples slots with probability p gives -log p. Whole lists only; ``xla`` and ``ref``.
      mass: also return the attention each slot received.
      shared: whether a page may be listed more than once (a common prefix). Only ``xla`` needs it,
        which reads the pool once and gives every page to one KV head; without it the answer of every other KV
        head that lists the page is NaN.
      turn: keys and values lie ``turned``: queries are turned before the read, the output after it.
      scale: of the scores; H ** -0.5 by default.
      softcap: c in c tanh(score / c), taken of the scaled scores; None for plain scores.
      impl: see ``dispatch``.

    Returns:
      ``(out [B, N, T, H], lse [B, N, T])``, and with ``mass`` also ``[B, N, M, S]``: probability
      under this partial's own lse summed over T, 0 for dead and unselected slots. All float32.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
      Unsupported: ``impl`` is not offered.
    """
    _check(q, k_pages, v_pages, table, length, scales)
    _check_options(k_pages, table, scales, pages, slots)
    wanted = (*q.shape[:2], table.shape[2], k_pages.shape[1])
    if bias is not None and (pages is not None or bias.shape != wanted):
        raise ValueError(
            f"ragged_decode(bias {bias.shape}) needs [B, N, M, S] = {wanted} and whole lists: no `pages`."
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(
            f"ragged_decode(softcap={softcap}) bounds the scores. Use a number above 0, or None."
        )
    options = Options(mass, q.shape[-1] ** -0.5 if scale is None else scale, softcap, shared)
    pools, lists = Pools(k_pages, v_pages, scales), Lists(table, length, pages, slots, bias)
    # No Pallas body knows these.
    plain = bias is not None or k_pages.dtype == FLOATS8 or isinstance(scales, Grouped)
    offered = {name: OFFERED[name] for name in ("xla", "ref")} if plain else OFFERED
    q = turned(q) if turn else q
    out, *rest = dispatch.call(
        "ragged_decode", impl, offered, lambda run: run(q, pools, lists, options=options)
    )
    return turned(out) if turn else out, *rest


def largest_scores(
    q: Float[Array, "B N H"],
    k_pages: Num[Array, "P S X"],
    table: Int[Array, "B K M"],
    length: Int[Array, "B K"],
    *,
    scales: Float[Array, "P 2 H"] | Grouped | None = None,
    turn: bool = False,
    each: bool = False,
) -> Float[Array, "B X M S"]:
    """The largest score of every live slot of each KV head's list over its group's queries; no value is read.

    Plain XLA on every platform: one product over the pool as it lies, which copies no key. A page that more
    than one list names (``shared``) is found for one KV head only.

    Args:
      q, k_pages, table, length, scales, turn: as in ``ragged_decode``, one query a head.
      each: the scores of every query head instead, X = N; else X = K.

    Returns:
      float32 q k / sqrt(H); -inf for dead slots and pages that are not there.
    """
    _check(q[:, :, None], k_pages, k_pages, table, length, scales)
    _check_options(k_pages, table, scales, None, None)
    q = turned(q) if turn else q
    return picked.largest_scores(q, k_pages, table, length, scales, each)


def gathered_decode(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    live: Bool[Array, "B K C"],
    *,
    mass: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Array, ...]:
    """``ragged_decode`` of C gathered slots for each KV head; plain XLA on every platform.

    Args:
      q: queries, any float dtype.
      k, v: gathered keys and values; dead ones may hold anything.
      live: which of them are visited.
      mass, scale, softcap: as in ``ragged_decode``.

    Returns:
      ``(out [B, N, T, H], lse [B, N, T])``, and with ``mass`` also ``[B, N, C]``. All float32.

    Raises:
      ValueError: shapes that do not fit together.
    """
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape and live.shape == k.shape[:3]
    if not fits or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"gathered_decode(q {q.shape}, k {k.shape}, v {v.shape}, live {live.shape}) needs q "
            "[B, N, T, H], k and v [B, K, C, H] and live [B, K, C] with N a multiple of K."
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return picked.gathered(q, k, v, live, mass=mass, scale=scale, softcap=softcap)


def _check(q: Array, k_pages: Array, v_pages: Array, table: Array, length: Array, scales: Any) -> None:
    call = "ragged_decode"
    if q.ndim != 4 or k_pages.ndim != 3 or q.shape[-1] != codes.channels(k_pages, scales):
        raise ValueError(
            f"{call}(q {q.shape}, k_pages {k_pages.dtype}{k_pages.shape}) needs q [B, N, T, H] and k_pages "
            "[P, S, H], or [P, S, H / 2] where uint8 holds two codes a byte, or uint16 two floats."
        )
    if v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        pools = f"k_pages {k_pages.dtype}{k_pages.shape}, v_pages {v_pages.dtype}{v_pages.shape}"
        raise ValueError(f"{call}({pools}) needs pools of one shape and dtype.")
    if table.ndim != 3 or table.shape[0] != q.shape[0] or length.shape != table.shape[:2]:
        lists = f"table {table.shape}, length {length.shape}"
        raise ValueError(f"{call}({lists}) needs table [B, K, M] and length [B, K] with B = {q.shape[0]}.")
    if q.shape[1] % table.shape[1]:
        raise ValueError(f"{call}: {q.shape[1]} query heads do not divide over {table.shape[1]} KV heads.")


def _check_options(
    k_pages: Array, table: Array, scales: Any, pages: Array | None, slots: Array | None
) -> None:
    call = "ragged_decode"
    (pool, size, _), h = k_pages.shape, codes.channels(k_pages, scales)
    if isinstance(scales, Grouped):
        _check_grouped(k_pages, scales)
    elif (scales is not None) != (k_pages.dtype in (jnp.int8, PAIRED, FLOATS8)):
        raise ValueError(
            f"{call}(k_pages {k_pages.dtype}): int8, uint8 or uint16 pools, and no others, have "
            "scales [P, 2, H]."
        )
    elif scales is not None and scales.shape != (pool, 2, h):
        raise ValueError(f"{call}(scales {scales.shape}) needs [P, 2, H] = {(pool, 2, h)}.")
    if pages is not None and (pages.ndim != 3 or pages.shape[:2] != table.shape[:2]):
        raise ValueError(f"{call}(pages {pages.shape}) needs [B, K, J] with [B, K] = {table.shape[:2]}.")
    if slots is None:
        return
    if pages is None:
        raise ValueError(f"{call}(slots=...) narrows selected pages. Pass `pages` too.")
    if slots.shape != (*pages.shape, size):
        raise ValueError(f"{call}(slots {slots.shape}) needs [B, K, J, S] = {(*pages.shape, size)}.")


def _check_grouped(k_pages: Array, scales: Grouped) -> None:
    (pool, size, width), (groups, _, h), parts = k_pages.shape, scales.k.shape[1:], scales.v.shape[-1]
    fits = k_pages.dtype == PAIRED and h in (2 * width, 4 * width) and size % groups == 0 and h % parts == 0
    if not fits or scales.k.shape != (pool, groups, 2, h) or scales.v.shape != (pool, size, 2, parts):
        raise ValueError(
            f"ragged_decode(k_pages {k_pages.dtype}{k_pages.shape}, scales {scales.k.shape} and "
            f"{scales.v.shape}) needs uint8 pages [P, S, H / 2] or [P, S, H / 4] and scales [P, g, 2, H] and "
            "[P, S, 2, J], g a divisor of S and J of H."
        )
