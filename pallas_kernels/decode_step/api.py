"""decode_step: a token a row goes into a layer's ring, the one it pushes out to its pages; both are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels import dispatch
from pallas_kernels.decode_step import ref, xla
from pallas_kernels.decode_step.call import Cache, Lists, Token, refusal

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

__all__ = ["OFFERED", "Cache", "decode_step", "has_body"]

OFFERED = dispatch.offered("decode_step", "decode_step", xla.decode_step, ref.decode_step)


def decode_step(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    cache: Cache,
    table: Int[Array, "B K M"],
    length: Int[Array, "B K"],
    *,
    seen: Int[Array, " B"],
    enters: Bool[Array, "B K"],
    scale: float | None = None,
    impl: str | None = None,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Cache]:
    """A decode step of a layer that decides about a token once, as it leaves the window; nothing is evicted.

    Each KV head of a row has a ring with its newest W tokens, token p in slot p mod W; its pages hold
    ``length`` older ones: number i of its list in slot ``i % S`` of page ``table[b, k, i // S]``.
    The step, in this order:

      1. the token in the new one's slot of the ring goes to number ``length`` of the list where ``enters``;
      2. the new one takes its slot;
      3. every query reads all of its KV head's ring and pages, with what was just written.

    Dead slots (of a ring that is not full, of free pages, beyond a list's end) may hold anything and are
    never seen; a body may leave anything in them. Rings and pools are written in place where they are donated
    or the carry of a loop; else XLA copies them. No gradient: this is for serving.

    Args:
      q: queries, turned (RoPE) as the keys are.
      k, v: the new token's, as the cache is to hold them.
      cache: rings and pools.
      table: pool page ids, the page that the leaving token goes to among them.
      length: live paged slots of each KV head before the step.
      seen: tokens each row has seen, which is the new one's position; below 0 for a row without a new token:
        nothing of it is written, and what it reads is undefined.
      enters: whether the leaving token goes to the pages. It does not where there is none
        (``seen < W``) or the table has no page for it.
      scale: of the scores; H ** -0.5 by default.
      impl: see ``dispatch``.

    Returns:
      ``(out [B, N, H], lse [B, N], cache)``: attention in the queries' dtype, its log-sum-exp in float32, and
      the cache after the step.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
      Unsupported: ``impl`` is not offered, or its body cannot run this call.
    """
    _check(q, k, v, cache, table, length, seen, enters)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    token, lists = Token(q, k, v), Lists(table, length, seen, enters)
    return dispatch.call("decode_step", impl, OFFERED, lambda run: run(token, cache, lists, scale=scale))


def has_body(q: Float[Array, "B N H"], cache: Cache, table: Int[Array, "B K M"]) -> bool:
    """Whether ``impl=None`` runs a Pallas body for arrays of these shapes on this device.

    Where it does not, ``xla`` gains nothing over a caller's own sequence of operations.
    """
    impl = dispatch.body("decode_step", OFFERED)
    return impl is not None and refusal(impl, q, cache, table) is None


def _check(
    q: Array, k: Array, v: Array, cache: Cache, table: Array, length: Array, seen: Array, enters: Array
) -> None:
    call, ring, pages = "decode_step", cache.ring_k, cache.k_pages
    if ring.ndim != 4 or pages.ndim != 3 or ring.shape[3] != pages.shape[2] or ring.dtype != pages.dtype:
        raise ValueError(
            f"{call}(ring_k {ring.dtype}{ring.shape}, k_pages {pages.dtype}{pages.shape}) needs a ring "
            "[B, K, W, H] and pages [P, S, H] of one dtype."
        )
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(cache[::2], cache[1::2])):
        shapes = ", ".join(f"{name} {x.dtype}{x.shape}" for name, x in cache._asdict().items())
        raise ValueError(f"{call}({shapes}) needs k and v of one shape and dtype.")
    (b, heads, _, h), n = ring.shape, q.shape[1] if q.ndim == 3 else 0
    if q.shape != (b, n, h) or n % heads or k.shape != (b, heads, h) or v.shape != k.shape:
        raise ValueError(
            f"{call}(q {q.shape}, k {k.shape}, v {v.shape}) needs q [B, N, H] and k, v [B, K, H] for a ring "
            f"[B, K, W, H] = {ring.shape}, with N a multiple of K."
        )
    if table.ndim != 3 or table.shape[:2] != (b, heads) or length.shape != (b, heads):
        raise ValueError(
            f"{call}(table {table.shape}, length {length.shape}) needs [B, K, M] and [B, K] = {(b, heads)}."
        )
    if seen.shape != (b,) or enters.shape != (b, heads):
        raise ValueError(
            f"{call}(seen {seen.shape}, enters {enters.shape}) needs [B] and [B, K] = {(b, heads)}."
        )
