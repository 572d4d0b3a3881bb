"""What a call of decode_step is made of; fields as in ``api.decode_step``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


class Cache(NamedTuple):
    """What a step changes, all of one dtype.

    Attributes:
      ring_k, ring_v: the newest W tokens of each stream, token p in slot p mod W.
      k_pages, v_pages: a pool, of which each stream's list names its own.
    """

    ring_k: Float[Array, "B K W H"]
    ring_v: Float[Array, "B K W H"]
    k_pages: Float[Array, "P S H"]
    v_pages: Float[Array, "P S H"]


class Token(NamedTuple):
    """The new token of each row."""

    q: Float[Array, "B N H"]
    k: Float[Array, "B K H"]
    v: Float[Array, "B K H"]


class Lists(NamedTuple):
    """Where each stream is, and whether the token that leaves its ring goes to its pages."""

    table: Int[Array, "B K M"]
    length: Int[Array, "B K"]
    seen: Int[Array, " B"]
    enters: Bool[Array, "B K"]
