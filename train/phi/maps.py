"""The maps in training: the paper's form, and how they are folded for serving (arXiv 2604.05438, J).

  g0 = x Ws + bs        g1 = g0 + a (GELU(g0 W1 + b1) W2 + b2)        log φ(x) = g1 Wo + bo

A = L x K heads lie along one axis; leaves of keys are [A, ...], of queries [A, G, ...].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.policies import phi
from kvjax.types import Params
from train.phi.settings import Maps

if TYPE_CHECKING:
    from jaxtyping import Array


def initial(key: Array, heads: int, groups: int, head_dim: int, maps: Maps) -> Params:
    """Untrained maps: random features of exp(q k / sqrt(H)), directions shared by a group; the gate a is 0.

    Args:
      key: a PRNG key.
      heads: A.
      groups: G, query heads of a KV head.
      head_dim: H.
      maps: widths and the spread of the directions; with a spread of 1 the features are unbiased.
    """
    width, hidden = maps.width or head_dim, maps.hidden or max(head_dim // 2, 1)
    first, second, last = jax.random.split(key, 3)
    directions = maps.spread * jax.random.normal(last, (heads, width, maps.features))
    params: Params = {}
    for side in ("k",) if maps.symmetric else ("k", "q"):
        lead = (heads,) if side == "k" else (heads, groups)
        shared = directions if side == "k" else directions[:, None]
        params |= {
            f"ws_{side}": jnp.broadcast_to(
                jnp.eye(head_dim, width) * head_dim**-0.25, (*lead, head_dim, width)
            ),
            f"bs_{side}": jnp.zeros((*lead, width)),
            f"w1_{side}": jax.random.normal(first, (*lead, width, hidden)) * width**-0.5,
            f"b1_{side}": jnp.zeros((*lead, hidden)),
            f"w2_{side}": jax.random.normal(second, (*lead, hidden, width)) * hidden**-0.5,
            f"b2_{side}": jnp.zeros((*lead, width)),
            f"a_{side}": jnp.zeros(lead),
            f"wo_{side}": jnp.broadcast_to(shared, (*lead, width, maps.features)),
            f"bo_{side}": jnp.full((*lead, maps.features), -0.5 * jnp.log(maps.features)),
        }
    return {name: jnp.array(value) for name, value in params.items()}


def folded(params: Params) -> Params:
    """The maps as ``phi.log_features`` takes them, query heads along one axis [A G, ...]."""
    exact = jax.lax.Precision.HIGHEST
    result: Params = {}
    for side in ("k", "q") if "ws_q" in params else ("k",):
        p = {name.removesuffix(f"_{side}"): value for name, value in params.items() if name.endswith(side)}
        ws, w1, w2, wo, gate = (p[name] for name in ("ws", "w1", "w2", "wo", "a"))

        def times(a: Array, b: Array) -> Array:
            return jnp.einsum("...ij,...jk->...ik", a, b, precision=exact)

        def shifted(bias: Array, w: Array) -> Array:
            return times(bias[..., None, :], w)[..., 0, :]

        values = (
            times(ws, wo),
            times(ws, w1),
            shifted(p["bs"], w1) + p["b1"],
            gate[..., None, None] * times(w2, wo),
            shifted(p["bs"] + gate[..., None] * p["b2"], wo) + p["bo"],
        )
        lead = gate.ndim
        result |= {f"{n}_{side}": x.reshape(-1, *x.shape[lead:]) for n, x in zip(phi.LEAVES, values)}
    return result
