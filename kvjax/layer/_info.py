"""Which layer of the model, and what the policy makes of tokens that arrive there."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.algebra import HERE, OBSERVABLE, AllHeads, Frame, Observation, Policy
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.sharding.specs import HEADS
from kvjax.types import Heads, Params, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@pytree()
@dataclasses.dataclass(frozen=True)
class OfRows:
    """What a part reads of its weights at a layer where each row's hyperparameters decide: [B, K, ...]."""

    tree: Any

    def specs(self) -> Any:
        """How it is cut over devices."""
        return jax.tree.map(lambda _: HEADS, self)


@dataclasses.dataclass(frozen=True)
class LayerInfo:
    """Everything about a layer of the model that is not its cache.

    Attributes:
      policy: what decides.
      params: learned weights of its parts at this layer, by place.
      layer, layers: this layer (may be traced) and how many there are.
      window: the model's own sliding window here, or None.
      total: prompt length of each row.
      confidence: see ``kvjax.algebra.Frame``.
      kind: where ``layer`` is traced, a layer that differs from it in numbers alone; else ``layer``. Static.
      seeds: of each row's request, while its prompt is read whole; else None.
      heads: the layer's KV heads, those on other devices too.
    """

    policy: Policy
    params: Params
    layer: Any
    layers: int
    window: int | None
    total: Int[Array, " B"]
    confidence: Float[Array, " B"] | None = None
    kind: Any = None
    seeds: Int[Array, " B"] | None = None
    heads: AllHeads = HERE

    def __post_init__(self) -> None:
        if self.kind is None:
            object.__setattr__(self, "kind", self.layer)

    def weights(self, place: str) -> Any:
        """Learned weights of the part in ``place``, or None."""
        return self.params.get(place)

    def frame(self, k: Float[Array, "B K T H"], observed: Observation | None = None) -> Frame:
        """Where a budget's target is asked for."""
        policy, storage = self.policy, self.policy.storage
        slot = storage.slot_bytes(k.shape[-1], k.dtype)
        shown = observed if policy.budget.needs else None
        heads = self.heads.count(k.shape[1])
        place = (self.layer, self.layers, heads, slot)
        learned = self.weights("budget")
        return Frame(*place, self.confidence, policy.protected, shown, self.heads, self.total, learned)


def by_row(number: Any, axes: int) -> Any:
    """A number, or one per row, in the shape that broadcasts against so many axes."""
    return jnp.reshape(number, (-1, *[1] * (axes - 1)))


def major(x: Float[Array, "B T N H"]) -> Float[Array, "B N T H"]:
    """From the model's layout to heads first, or back."""
    return jnp.swapaxes(x, 1, 2)


def observe(info: LayerInfo, x: Heads, pos: Int[Array, "B T"]) -> Observation:
    """What the policy's parts declared they look at, and nothing else."""
    values = {
        name: getattr(x, name) if name == "hidden" else major(getattr(x, name))
        for name in OBSERVABLE
        if name in info.policy.needs and name not in ("mass", "q_last", "wo_norm", "replayed")  # made later
    }
    if "q_last" in info.policy.needs:
        last = jnp.argmax(pos, axis=1)
        values["q_last"] = jnp.take_along_axis(x.q, last[:, None, None, None], axis=1)[:, 0]
    return Observation(
        pos=pos,
        total=info.total,
        layer=info.layer,
        layers=info.layers,
        values=values,
        softcap=x.softcap,
        sinks=x.sinks,
        rotate=x.rotate,
        project=x.project,
        wo=x.wo if "wo_norm" in info.policy.needs else None,
        seeds=info.seeds,
        heads=info.heads,
    )


def arriving(info: LayerInfo, x: Heads, pos: Int[Array, "B T"], observed: Observation) -> Entry:
    """The tokens with their admission bits and everything the parts keep with them."""
    policy = info.policy
    k, v = major(x.k), major(x.v)
    admit = policy.admission.admit(info.weights("admission"), observed)
    sink = (pos >= 0) & (pos < by_row(policy.sinks, 2))
    meta: dict[str, Array] = {}
    for part in policy.parts:
        kept = [name for name in part.keeps if f"{part.place}.{name}" in policy.keeps]
        values = part.arrive(info.weights(part.place), observed) if kept else {}
        meta |= {f"{part.place}.{name}": values[name] for name in kept}
    return Entry(
        k=k,
        v=v,
        pos=pos,
        admit=jnp.broadcast_to(admit | sink[:, None, :], k.shape[:3]),
        meta=meta,
        queries={name: observed.values[name] for name in policy.queries},
    )


def absorb(info: LayerInfo, cache: LayerCache, k: Array, v: Array, pos: Array, take: Array) -> LayerCache:
    """Fold tokens into φ, in float32."""
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    take = jnp.broadcast_to(take, k.shape[:3])
    summary = info.policy.completion.absorb(info.weights("completion"), cache.summary, k, v, pos, take)
    return dataclasses.replace(cache, summary=summary)
