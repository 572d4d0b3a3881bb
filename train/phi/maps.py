"""The maps while they are trained: the paper's form, and the fold into what serves (arXiv 2604.05438, J).

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
      maps: widths and the spread of the directions; 1 gives features that are right in the mean.
    """
    width, hidden = maps.width or head_dim, maps.hidden or max(head_dim // 2, 1)
    first, second, last = jax.random.split(key, 3)
    directions = maps.spread * jax.random.normal(last, (heads, width, maps.features))
    found: Params = {}
    for side in ("k",) if maps.symmetric else ("k", "q"):
        lead = (heads,) if side == "k" else (heads, groups)
        same = directions if side == "k" else directions[:, None]
        found |= {
            f"ws_{side}": jnp.broadcast_to(
                jnp.eye(head_dim, width) * head_dim**-0.25, (*lead, head_dim, width)
            ),
            f"bs_{side}": jnp.zeros((*lead, width)),
            f"w1_{side}": jax.random.normal(first, (*lead, width, hidden)) * width**-0.5,
            f"b1_{side}": jnp.zeros((*lead, hidden)),
            f"w2_{side}": jax.random.normal(second, (*lead, hidden, width)) * hidden**-0.5,
            f"b2_{side}": jnp.zeros((*lead, width)),
            f"a_{side}": jnp.zeros(lead),
            f"wo_{side}": jnp.broadcast_to(same, (*lead, width, maps.features)),
            f"bo_{side}": jnp.full((*lead, maps.features), -0.5 * jnp.log(maps.features)),
        }
    return {name: jnp.array(value) for name, value in found.items()}


def folded(params: Params) -> Params:
    """The maps as ``phi.log_features`` takes them, query heads along one axis [A G, ...]."""
    exact = jax.lax.Precision.HIGHEST
    found: Params = {}
    for side in ("k", "q") if "ws_q" in params else ("k",):
        mine = {name.removesuffix(f"_{side}"): value for name, value in params.items() if name.endswith(side)}
        ws, w1, w2, wo, gate = (mine[name] for name in ("ws", "w1", "w2", "wo", "a"))

        def times(a: Array, b: Array) -> Array:
            return jnp.einsum("...ij,...jk->...ik", a, b, precision=exact)

        def shifted(bias: Array, w: Array) -> Array:
            return times(bias[..., None, :], w)[..., 0, :]

        values = (
            times(ws, wo),
            times(ws, w1),
            shifted(mine["bs"], w1) + mine["b1"],
            gate[..., None, None] * times(w2, wo),
            shifted(mine["bs"] + gate[..., None] * mine["b2"], wo) + mine["bo"],
        )
        lead = gate.ndim
        found |= {f"{n}_{side}": x.reshape(-1, *x.shape[lead:]) for n, x in zip(phi.LEAVES, values)}
    return found
