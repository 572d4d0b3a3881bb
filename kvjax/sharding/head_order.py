"""KV heads in another order, each with its query heads: the model stays the same function.

On a mesh neighbouring KV heads share a device, and every device gets a pool of the fullest one's size. Where
heads hold unequally much (write gates, AdaKV, DuoAttention), an order that gives each device its share makes
all pools small: ``balanced`` finds it from what heads held, ``kvjax.load(heads=)`` lays weights in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Num

Order = Sequence[Sequence[int]] | np.ndarray
"""[L, K]: in layer l, the j-th KV head is the one that was ``order[l][j]``."""


def read_order(call: str, named: Order, layers: int, kv_heads: int) -> Int[np.ndarray, "L K"]:
    """The order as numbers.

    Raises:
      ValueError: not every KV head once in each layer.
    """
    rule = f"Give each of {layers} layers the numbers 0 to {kv_heads - 1}, in the order of their new places."
    try:
        order = np.asarray(named)
    except ValueError:
        order = np.zeros(0)
    if order.shape != (layers, kv_heads) or not np.array_equal(np.sort(order), [range(kv_heads)] * layers):
        raise ValueError(f"{call} is not an order of the KV heads. {rule}")
    return order.astype(np.int32)


def balanced(held: Float[np.ndarray, "L K"], devices: int) -> Int[np.ndarray, "L K"]:
    """An order in which each of ``devices`` neighbouring shares of a layer's heads holds about as much.

    Heads go one after the other, the fullest first, to the device that holds least and still has room.
    A layer keeps its order where that is no better.

    Args:
      held: what each head holds, in any unit.
      devices: must divide K.
    """
    return np.asarray([_dealt(np.asarray(layer, float), devices) for layer in held], np.int32)


def _dealt(held: np.ndarray, devices: int) -> np.ndarray:
    places = len(held) // devices
    shares: list[list[int]] = [[] for _ in range(devices)]
    for head in np.argsort(-held, kind="stable"):
        free = [share for share in shares if len(share) < places]
        min(free, key=lambda share: held[share].sum()).append(int(head))
    order = np.concatenate([sorted(share) for share in shares]).astype(np.int32)
    most = lambda x: x.reshape(devices, places).sum(axis=1).max()  # noqa: E731
    return order if most(held[order]) < most(held) else np.arange(len(held), dtype=np.int32)


def permuted(letters: Callable[[Params], Params], params: Params, order: Order) -> Params:
    """A model's weights with the KV heads of each layer in another order, on the devices they were on.

    Args:
      letters: names the dimensions of every leaf (``Network.letters``); K and N count heads.
      params: with ``layers``, a list.
      order: see ``Order``.
    """
    layers = []
    for leaves, named, new in zip(params["layers"], letters(params)["layers"], order, strict=True):

        def reordered(x: Any, dims: str, new: Order = new) -> Any:
            axis = next((at for at, letter in enumerate(dims) if letter in "KN"), None)
            if axis is None or x.shape[axis] == 1:  # a scale may have one for all inputs
                return x
            return in_order(x, np.asarray(new), axis)

        layers.append(jax.tree.map(reordered, leaves, named))
    return params | {"layers": layers}


def in_order(x: Any, order: Int[np.ndarray, " K"], axis: int = 0) -> Any:
    """An array with its heads along ``axis``, KV heads or query heads, in another order."""
    order = np.asarray(order)
    group = x.shape[axis] // len(order)
    index = (order[:, None] * group + np.arange(group)).reshape(-1)
    if not isinstance(x, jax.Array):
        return np.take(x, index, axis=axis)
    where = x.sharding if isinstance(x.sharding, NamedSharding) else None
    return jax.jit(_take, static_argnums=2, out_shardings=where)(x, index, axis)


def _take(x: Num[Array, ...], index: Int[Array, " N"], axis: int) -> Num[Array, ...]:
    return x.take(index, axis=axis)
