"""The letters of dimensions, and the few types that every other module uses.

The letters mean the same everywhere in the code:

  B rows of the batch      T new tokens        S slots (or key positions)
  P pages of a pool        M pages of a list   L layers
  N query heads            K KV heads          G = N / K query heads a KV head
  H head dim               D model width       F feed-forward width
  V vocabulary             W ring slots        R page lists of a KV head
  E experts of a layer

Annotations such as ``Float[Array, "B T K H"]`` are read by people and by the type checker;
nothing checks them at run time, so importing this module costs nothing beyond jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

EMPTY = -1
"""The id of no page, the position of no token."""

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that weights may be stored in and cast to."""

WEIGHT_DTYPES = ("int8", "int4")
"""What weights may be quantised to at loading."""

Params = dict[str, Any]
"""A pytree of arrays: learned weights of a model or of a policy part."""

Rotate = Callable[["Float[Array, 'B T N H']", "Int[Array, 'B T']"], "Float[Array, 'B T N H']"]
"""A model's RoPE; linear in its first argument."""

Project = Callable[["Float[Array, 'B T D']"], "Float[Array, 'B T N H']"]
"""A layer's map from the input of attention to queries before RoPE, with bias, q-norm and gain.

On a mesh one that has a method ``among`` is a pytree that is cut by head; of any other every device computes
all heads, and takes its own.
"""

C = TypeVar("C")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """What a model layer hands to ``attend``, for T new tokens of each row.

    Attributes:
      q: queries after RoPE.
      k: keys after RoPE.
      v: values.
      q_pre: queries before RoPE (after any q-norm).
      k_pre: keys before RoPE (after any k-norm).
      hidden: the input of the attention block, after its norm.
      softcap: c where the model attends by c tanh(score / c), scores being q k / sqrt(H); or None. Static.
      rotate: turns [B, T, N, H] to positions [B, T], as the model's RoPE does in this layer; None where
        positions turn nothing. Static.
      project: makes queries (``q_pre``) of any hidden states, by the layer's own weights; None where the
        model has no such map.
      wo: the layer's output projection, the last weights that a head's value goes through before it is added
        to the others'; None where the model shows none.
      sinks: a logit of each query head that is one more term of its softmax's sum, with no value behind it;
        or None.
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    q_pre: Float[Array, "B T N H"]
    k_pre: Float[Array, "B T K H"]
    hidden: Float[Array, "B T D"]
    softcap: float | None = None
    rotate: Rotate | None = None
    project: Project | None = None
    wo: Float[Array, "D N H"] | None = None
    sinks: Float[Array, " N"] | None = None

    def of_rows(self, rows: slice) -> Heads:
        """Those of some rows."""
        names = ("q", "k", "v", "q_pre", "k_pre", "hidden")
        return dataclasses.replace(self, **{name: getattr(self, name)[rows] for name in names})


AttendFn = Callable[[int, Heads, C], "tuple[Array, C]"]
"""Attention of a layer: ``attend(layer, heads, carry) -> (out [B, T, N, H], carry)``.

The model knows nothing of caches; they live in ``carry``.
"""


class Network(Protocol):
    """A model's mathematics without its weights: hashable, so that it is a static argument of jit.

    Its ``params`` are a dict with ``embed``, an array [V, D], ``layers``, a list of L trees of arrays, and
    whatever else it needs. Tokens of a row meet in ``attend`` alone, rows never, and positions come from
    ``positions``; ``kvjax.check`` tries that. docs/flax.md says it in a page.

    Attributes:
      num_layers, num_heads, num_kv_heads, head_dim: L, N, K, H.
      max_positions: the longest sequence that the model was trained for.
      windows: per layer, the model's own sliding window, or None; layers of one window differ in weights
        only, unless ``of_layer`` says otherwise.
    """

    def __hash__(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def windows(self) -> tuple[int | None, ...]: ...

    def at(self, context: int) -> Network:
        """The network inside a context of that many positions (LongRoPE depends on it); mostly itself."""
        ...

    def embed(self, params: Params, tokens: Array, positions: Array) -> Array:
        """Token ids [B, T] at positions [B, T] to vectors [B, T, D]."""
        ...

    def layer(
        self, params: Params, index: int, x: Array, positions: Array, attend: AttendFn[C], carry: C
    ) -> tuple[Array, C]:
        """One block, whose attention is ``attend``; ``params`` are the layer's own."""
        ...

    def logits(self, params: Params, x: Array) -> Array:
        """Last layer's output [..., D] to float32 logits [..., V]."""
        ...


def of_layer(network: Network, index: int) -> Network:
    """The network in which a layer is as the first of its window: itself, unless it has such a method.

    Programs are shared by layers of one window, and SmolLM3's differ: some turn nothing by positions.
    """
    own = getattr(network, "of_layer", None)
    return network if own is None else own(index)  # type: ignore[no-any-return]


class Weighted(Protocol):
    """A network and its weights ``params``, as the decode loop takes them."""

    @property
    def network(self) -> Network: ...

    @property
    def params(self) -> Params: ...


def pytree(*, static: tuple[str, ...] = ()) -> Callable[[type[C]], type[C]]:
    """Class decorator for a frozen dataclass: registers it as a pytree.

    Args:
      static: names of the fields that are hashable metadata instead of leaves.
    """

    def register(cls: type[C]) -> type[C]:
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        data = [name for name in names if name not in static]
        return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=list(static))

    return register
