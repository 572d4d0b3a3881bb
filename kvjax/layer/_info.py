"""Which layer of the model, and what the policy makes of tokens that arrive there."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvjax.algebra import OBSERVABLE, Frame, Observation, Policy
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.types import Heads, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class LayerInfo:
    """Everything about a layer of the model that is not its cache.

    Attributes:
      policy: what decides.
      params: learned weights of its parts at this layer, by place.
      layer, layers: this layer (may be traced in ``prompt``) and how many there are.
      window: the model's own sliding window here, or None.
      total: prompt length of each row.
      confidence: see ``kvjax.algebra.Frame``.
    """

    policy: Policy
    params: Params
    layer: Any
    layers: int
    window: int | None
    total: Int[Array, " B"]
    confidence: Float[Array, " B"] | None = None

    def weights(self, place: str) -> Any:
        """Learned weights of the part in ``place``, or None."""
        return self.params.get(place)

    def frame(self, k: Float[Array, "B K T H"]) -> Frame:
        """Where a budget's target is asked for."""
        storage = self.policy.storage
        slot = 2 * storage.width(k.shape[-1]) * storage.dtype(k.dtype).itemsize
        return Frame(self.layer, self.layers, k.shape[1], slot, self.confidence, self.policy.protected)


def major(x: Float[Array, "B T N H"]) -> Float[Array, "B N T H"]:
    """From the seam's layout to ours, or back."""
    return jnp.swapaxes(x, 1, 2)


def observe(info: LayerInfo, x: Heads, pos: Int[Array, "B T"]) -> Observation:
    """What the policy's parts declared they look at, and nothing else."""
    values = {
        name: getattr(x, name) if name == "hidden" else major(getattr(x, name))
        for name in OBSERVABLE
        if name in info.policy.needs and name != "mass"  # known after attention only
    }
    where = {"pos": pos, "total": info.total, "layer": info.layer, "layers": info.layers}
    return Observation(**where, values=values, softcap=x.softcap, rotate=x.rotate)


def arriving(info: LayerInfo, x: Heads, pos: Int[Array, "B T"], observed: Observation) -> Entry:
    """The tokens with their admission bits and everything the parts keep with them."""
    policy = info.policy
    k, v = major(x.k), major(x.v)
    admit = policy.admission.admit(info.weights("admission"), observed)
    sink = (pos >= 0) & (pos < policy.sinks)
    meta: dict[str, Array] = {}
    for part in policy.parts:
        values = part.arrive(info.weights(part.place), observed)
        named = {f"{part.place}.{name}": values[name] for name in part.keeps}
        meta |= {name: x for name, x in named.items() if name in policy.keeps}
    return Entry(k=k, v=v, pos=pos, admit=jnp.broadcast_to(admit | sink[:, None, :], k.shape[:3]), meta=meta)


def absorb(info: LayerInfo, cache: LayerCache, k: Array, v: Array, pos: Array, take: Array) -> LayerCache:
    """Fold tokens into φ, in float32."""
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    take = jnp.broadcast_to(take, k.shape[:3])
    summary = info.policy.completion.absorb(info.weights("completion"), cache.summary, k, v, pos, take)
    return dataclasses.replace(cache, summary=summary)
