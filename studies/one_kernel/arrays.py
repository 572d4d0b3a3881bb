"""What one decode step reads and writes at a layer, and its sizes.

A stream is a (row, KV head). Its ring is W slots, token p in slot p mod W; its pages hold ``length`` older
tokens. The token that the new one pushes out of the ring goes to the pages, into φ, or is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.phi.api import Summary

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


class Sizes(NamedTuple):
    """Rows, KV heads, queries of a group, head dim, ring, slots of a page, entries, features (0: no φ)."""

    B: int
    K: int
    G: int
    H: int
    W: int
    S: int
    M: int
    F: int


class Cache(NamedTuple):
    """What a step changes; bfloat16, the summary float32."""

    ring_k: Float[Array, "B K W H"]
    ring_v: Float[Array, "B K W H"]
    k_pages: Float[Array, "P S H"]
    v_pages: Float[Array, "P S H"]
    summary: Summary | None


class Token(NamedTuple):
    """The new token of each row and what was decided about the one that leaves.

    Attributes:
      q, k, v: before RoPE.
      cos, sin: of the row's position, both halves of the channels alike.
      seen: tokens the row has seen before; the new one's position.
      table: pool pages of each stream, the one that the leaving token needs among them.
      length: live paged slots before the step.
      admit: whether the leaving token goes to the pages.
      absorb: and whether into φ, [B, K]; None where there is no φ.
      log_q, log_k: features of the queries [B, N, F], and of the key that leaves [B, K, F]; likewise.
    """

    q: Float[Array, "B N H"]
    k: Float[Array, "B K H"]
    v: Float[Array, "B K H"]
    cos: Float[Array, "B H"]
    sin: Float[Array, "B H"]
    seen: Int[Array, " B"]
    table: Int[Array, "B K M"]
    length: Int[Array, "B K"]
    admit: Bool[Array, "B K"]
    absorb: Any = None
    log_q: Any = None
    log_k: Any = None


def shapes(sizes: Sizes) -> tuple[Cache, Token]:
    """Those of a step whose pools hold all lists."""
    b, heads, g, h, w, s, m, f = sizes

    def of(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def exact(*shape: int) -> Any:
        return of(*shape, dtype=jnp.float32)

    summary = Summary(exact(b, heads, f), exact(b, heads, f), exact(b, heads, f, h)) if f else None
    ring, pool = (b, heads, w, h), (b * heads * m, s, h)
    cache = Cache(of(*ring), of(*ring), of(*pool), of(*pool), summary)
    token = Token(
        of(b, heads * g, h),
        of(b, heads, h),
        of(b, heads, h),
        exact(b, h),
        exact(b, h),
        of(b, dtype=jnp.int32),
        of(b, heads, m, dtype=jnp.int32),
        of(b, heads, dtype=jnp.int32),
        of(b, heads, dtype=jnp.bool_),
        of(b, heads, dtype=jnp.bool_) if f else None,
        exact(b, heads * g, f) if f else None,
        exact(b, heads, f) if f else None,
    )
    return cache, token


def turned(x: Float[Array, "... H"], cos: Float[Array, "... H"], sin: Float[Array, "... H"]) -> Array:
    """RoPE of half-split channels, float32."""
    x = x.astype(jnp.float32)
    half = x.shape[-1] // 2
    return x * cos + jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin
