"""DuoAttention: some KV heads keep every token, the others only sinks and a window.

Xiao et al., DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads,
https://arxiv.org/abs/2410.10819

Each KV head of each layer has a learned number alpha, which says how much the head loses without the middle
of a text (``train.duo`` learns it). The heads with the largest numbers in the whole model are its retrieval
heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Admission, Number, Observation, Policy, PolicyError, Switch, Whole
from kvjax.types import Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool


def retrieval_heads(alphas: Sequence[Array], share: float) -> Bool[Array, "L K"]:
    """The floor(share L K + 1/2) heads with the largest alpha; among equals the lower layer, then head.

    Args:
      alphas: one [K] per layer.
      share: of the heads, 0 to 1.
    """
    alpha = jnp.stack([jnp.asarray(x, jnp.float32) for x in alphas])
    flat = alpha.reshape(-1)
    index = jnp.arange(flat.size)
    # Counting the heads before each one is cheaper in a compiled step than a sort.
    before = (flat[None, :] > flat[:, None]) | (
        (flat[None, :] == flat[:, None]) & (index[None, :] < index[:, None])
    )
    return (before.sum(axis=1) < jnp.floor(share * flat.size + 0.5)).reshape(alpha.shape)


@dataclasses.dataclass(frozen=True, repr=False)
class Duo(Admission):
    """Retrieval heads admit every token, streaming heads only the policy's sinks.

    Learned weights: ``alpha`` [K] per layer; only their order matters.

    Attributes:
      share: of all KV heads of the model that are retrieval heads, 0 to 1.
      window: W of the streaming heads, in tokens.
      prefill: streaming heads read the prompt through their window too, as in the paper; False reads the
        prompt with full attention and applies the pattern to the cache afterwards.
    """

    name = "duo"
    arguments = {
        "share": Number(0, 1, "share of the heads"),
        "window": Whole(1, "window"),
        "prefill": Switch(),
    }
    traced = ("share",)
    sizes = ("share", "window")
    learns = "duo"
    trained_by = "python -m train.duo --config FILE, as in configs/gates/duo-embedded.yaml"
    share: float = 0.5
    window: int = 256  # type: ignore[assignment]
    prefill: bool = True

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        for index, layer in enumerate(weights):
            self.check_shapes(index, layer, {"alpha": (network.num_kv_heads,)}, network)

    def at_layer(self, weights: Sequence[Params], layer: int) -> Params:
        """``retrieves`` [K]: is the KV head a retrieval head? This depends on the alphas of all layers."""
        return {"retrieves": retrieval_heads([of_layer["alpha"] for of_layer in weights], self.share)[layer]}

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        return [
            {"alpha": jax.random.uniform(layer_key, (network.num_kv_heads,))}
            for layer_key in jax.random.split(key, network.num_layers)
        ]

    def admit(self, params: Params | None, observed: Observation) -> Bool[Array, "B K T"]:
        if params is None:
            raise PolicyError(f"{self!r} has no pattern. Pass weights=kvjax.weights_for(policy, model).")
        retrieves, (rows, tokens) = params["retrieves"], observed.pos.shape
        return jnp.broadcast_to(retrieves[None, :, None], (rows, len(retrieves), tokens))


PRESETS = {"duo-attention": "duo(0.5) + sinks(64)"}

EXAMPLES = (
    Policy(admission=Duo(share=0.5, window=24), sinks=4),
    Policy(admission=Duo(share=0.25, window=8, prefill=False), sinks=2),
)
