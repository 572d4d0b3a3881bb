"""Baseline rankings without learning, on a batch of traces: the scores of other policies.

Recency (StreamingLLM), K-norm, KeyDiff and LagKV use no attention. TOVA and SnapKV are privileged: they read
the cache's last queries, if the traces store them. Agents take the axis of KV heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Observation
from kvjax.policies.keydiff import KeyDiff
from kvjax.policies.lagkv import LagKV
from kvjax.policies.snapkv import SnapKV
from kvjax.policies.tova import Tova
from kvjax.types import EMPTY
from pallas_kernels.blockwise.api import blockwise, column_mass

if TYPE_CHECKING:
    from jaxtyping import Array, Float

WINDOW = 32
"""Last queries of the cache that a batch may carry."""
LAG = 64
"""LagKV's partition; the default of 128 would leave caches of fewer than 260 tokens unranked."""


def scores(batch: dict[str, Array], layers: int, softcap: float | None) -> dict[str, Float[Array, "B A T"]]:
    """Scores by baseline; the privileged ones only if the batch has ``seen``.

    Args:
      batch: ``k``, ``v`` [B, A, T, H], ``size`` [B] tokens in the cache; ``seen`` [B, A, G, W, H], the
        queries of its last W = ``WINDOW`` tokens.
      layers: A = L x K; TOVA averages over a layer.
      softcap: of the model's scores.
    """
    k, v = (batch[name].astype(jnp.float32) for name in ("k", "v"))
    rows, agents, tokens, _ = k.shape
    at = jnp.arange(tokens)[None, :]
    pos, total = jnp.where(at < batch["size"][:, None], at, EMPTY), batch["size"]

    def observed(**values: Array) -> Observation:
        return Observation(pos=pos, total=total, layer=0, layers=1, values=values, softcap=softcap)

    score_of = {
        "recency": jnp.broadcast_to(at.astype(jnp.float32)[:, None], k.shape[:3]),
        "knorm": -jnp.linalg.norm(k, axis=-1),  # RoPE does not change it
        "keydiff": KeyDiff().score_prompt(None, observed(k=k)),
        "lagkv": LagKV(LAG).score_prompt(None, observed(k=k, v=v)),
    }
    if "seen" not in batch:
        return score_of
    seen = batch["seen"].astype(jnp.float32)
    groups, window = seen.shape[2:4]
    seen = seen.reshape(rows, agents * groups, window, -1)
    positions = total[:, None] - window + jnp.arange(window)[None, :]
    q = jnp.zeros((rows, agents * groups, tokens, seen.shape[-1]), jnp.float32)
    q = q.at[jnp.arange(rows)[:, None, None], jnp.arange(agents * groups)[:, None], positions[:, None]].set(
        seen
    )
    votes = SnapKV(window).score_prompt(None, observed(q=q, k=k, v=v))
    score_of["snapkv"] = jnp.where(
        (at >= total[:, None] - window)[:, None], jnp.inf, votes
    )  # its window stays
    last, at_last = seen[:, :, -1:], positions[:, -1:]
    _, lse = blockwise(last, k, v, q_pos=at_last, k_pos=pos, softcap=softcap)
    once = jnp.ones((rows, 1))
    mass = column_mass(last, k, lse, once, q_pos=at_last, k_pos=pos, softcap=softcap)
    by_layer = mass.reshape(rows * layers, -1, tokens)
    shared = Tova().score_prompt(None, observed(mass=by_layer)).reshape(rows, layers, 1, tokens)
    score_of["tova"] = jnp.repeat(shared, agents // layers, axis=2).reshape(k.shape[:3])
    return score_of
