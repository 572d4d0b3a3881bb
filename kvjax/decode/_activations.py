"""Whole prompts read once with the model's own attention, for any number of policies that cut afterwards."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import layer
from kvjax.algebra import Eviction
from kvjax.decode._by_layer import embed, outer
from kvjax.decode._capacity import bucket, padded
from kvjax.decode._checks import Prompts, check_prompts, read_prompts
from kvjax.sharding.mesh import ONE, Mesh, mesh_of
from kvjax.types import EMPTY, Heads, Network, Params, Weighted, of_layer

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptActivations:
    """Prompts read with the model's own attention; any policy that cuts afterwards can be served from them.

    Attributes:
      prompts: token ids of each row.
      context: most tokens a row will ever see.
      inputs: of every layer, and the last one's output.
      lse: of every layer's attention.
      replayed: scores [B, K, T] of every layer after the pieces of an eviction that replays, once one of its
        policies was served.
    """

    prompts: tuple[np.ndarray, ...]
    context: int
    inputs: tuple[Float[Array, "B T D"], ...]
    lse: tuple[Float[Array, "B N T"], ...]
    replayed: dict[Eviction, list[Float[Array, "B K T"]]] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes it holds."""
        return sum(x.nbytes for x in jax.tree.leaves((self.inputs, self.lse, [*self.replayed.values()])))


def read_full(model: Weighted, prompts: Prompts, *, context: int | None = None) -> PromptActivations:
    """Read the prompts once, for as many policies as one likes (``cut``).

    Args:
      model, prompts, context: as in ``prefill``.

    Raises:
      RequestError: as ``prefill``.
    """
    network = model.network
    rows = read_prompts("read_full", model, prompts)
    lengths = [len(row) for row in rows]
    if context is None:
        context = bucket(max(lengths, default=0), network.max_positions)
    check_prompts("read_full", network, lengths, context)
    network = network.at(context)
    total, mesh = jnp.asarray(lengths, jnp.int32), mesh_of(model.params)
    inputs, lses = [embed_prompts(network, model.params, rows, mesh)], []
    for index, block in enumerate(model.params["layers"]):
        x, lse = _attend_layer(of_layer(network, index), network.windows[index], block, inputs[-1], total)
        inputs.append(x)
        lses.append(lse)
    return PromptActivations(prompts=tuple(rows), context=context, inputs=tuple(inputs), lse=tuple(lses))


def embed_prompts(
    network: Network, params: Params, prompts: Sequence[np.ndarray], mesh: Mesh = ONE, run: Any = embed
) -> Float[Array, "B T D"]:
    """What goes into the first layer: prompts padded to their size class; ``run`` is ``embed``, compiled."""
    width = bucket(max(len(prompt) for prompt in prompts))
    return run(  # type: ignore[no-any-return]
        network, outer(params), np.zeros(len(prompts), np.int32), padded(prompts, width), mesh
    )


@functools.partial(jax.jit, static_argnames=("network", "window"))
def _attend_layer(
    network: Network,
    window: int | None,
    block: Params,
    x: Float[Array, "B T D"],
    total: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Float[Array, "B N T"]]:
    """One layer of whole prompts without any policy: its output, and its attention's lse."""
    at = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    pos = jnp.where(at < total[:, None], at, EMPTY)

    def attend(_: int, heads: Heads, __: Array | None) -> tuple[Array, Array | None]:
        return layer.attend_prompt(heads, pos, total, window)

    x, lse = network.layer(block, network.windows.index(window), x, at, attend, None)
    assert lse is not None  # attend has run
    return x, lse
