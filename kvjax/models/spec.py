"""The static description of a decoder: sizes, positions, and the traits of its family."""

from __future__ import annotations

import dataclasses
from typing import Literal

from kvjax.models.rope import LinearScaling, Llama3Scaling, LongRope, Rope, Yarn

__all__ = ["Experts", "LinearScaling", "Llama3Scaling", "LongRope", "ModelSpec", "Rope", "Yarn"]

FamilyName = Literal[
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3_text", "gpt2", "smollm3", "granite"),
    *("qwen3_moe", "mixtral", "gpt_oss", "olmo2"),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Layers whose MLP is a choice of experts for each token.

    Attributes:
      count: E, experts of a layer.
      chosen: how many of them a token goes through.
      width: F of each.
      normed: the weights of the chosen experts add up to 1; else they are shares among all experts.
      dense_layers: layers that have one MLP of ``ModelSpec.mlp_dim`` instead.
    """

    count: int
    chosen: int
    width: int
    normed: bool = True
    dense_layers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything static about a decoder; hashable, so it is a static argument of jit.

    Attributes:
      family: HF ``model_type`` this spec is read from and written as.
      max_positions: the longest sequence the model was trained for.
      positions: "rope" turns queries and keys; "learned" adds a table to the embeddings.
      rope: of every layer, or of the layers with full attention where ``local_rope`` is given.
      local_rope: of the sliding layers.
      unturned: layers that turn neither queries nor keys (SmolLM3).
      norm: "rms"; "rms_plus_one", whose stored weight is the scale minus one; "layer" with mean and bias.
      qk_norm: queries and keys are normalised per head, before they turn.
      joint_qk_norm: a token's queries are normalised over all heads together, and so are its keys (OLMo 2).
      pre_norms: what attention and MLP take is normalised.
      post_norms: what attention and MLP give is normalised before it is added.
      scaled_embedding: embeddings are multiplied by sqrt(D) on the way in.
      query_pre_attn_scalar: scores are divided by its square root; None for head_dim.
      attention_multiplier: scores are multiplied by it instead; or None.
      embedding_multiplier, residual_multiplier, logits_divisor: factors on embeddings, on what attention and
        MLP add, and the divisor of logits (Granite).
      attn_softcap, final_softcap: c in c tanh(x / c), for scores before the mask, for logits; or None.
      mlp: "swiglu" and "geglu" gate, "gelu" does not (both GELUs in the tanh form); "swiglu_clipped" is
        gpt-oss's (``kvjax.models.activations``).
      experts: of layers with a mixture of experts; or None.
      sinks: each query head has a learned logit in the sum of its softmax, which no value stands behind.
      qkv_bias: biases of the query, key and value maps.
      linear_bias: biases of every other map of a layer.
      tied: logits come from the embedding.
      windows: per layer, the model's own sliding window in tokens, or None for full attention.
      bos, eos: token ids that begin a text and end one (several may end it).
    """

    family: FamilyName
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    model_dim: int
    mlp_dim: int
    max_positions: int
    positions: Literal["rope", "learned"] = "rope"
    rope: Rope = Rope()
    local_rope: Rope | None = None
    unturned: tuple[int, ...] = ()
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    norm_eps: float = 1e-6
    qk_norm: bool = False
    joint_qk_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    scaled_embedding: bool = False
    query_pre_attn_scalar: float | None = None
    attention_multiplier: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    attn_softcap: float | None = None
    final_softcap: float | None = None
    mlp: Literal["swiglu", "swiglu_clipped", "geglu", "gelu"] = "swiglu"
    experts: Experts | None = None
    sinks: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False
    tied: bool = True
    windows: tuple[int | None, ...] = ()
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelSpec(num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}) cannot group its "
                "query heads. Make num_heads a multiple of num_kv_heads."
            )
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ValueError(
                f"ModelSpec(windows=...) names {len(self.windows)} layers, the model has {self.num_layers}. "
                "Give one window (or None) per layer."
            )

    @property
    def groups(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_experts(self) -> int | None:
        """E, where layers have experts."""
        return None if self.experts is None else self.experts.count

    @property
    def query_gain(self) -> float:
        """The factor on queries that makes scores divided by sqrt(H) equal the model's."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier * self.head_dim**0.5
        scalar = self.query_pre_attn_scalar
        return 1.0 if scalar is None else (self.head_dim / scalar) ** 0.5

    @property
    def embedding_gain(self) -> float:
        """The factor on embeddings on the way in."""
        return self.model_dim**0.5 if self.scaled_embedding else self.embedding_multiplier

    def rope_of(self, layer: int) -> Rope | None:
        """How a layer turns queries and keys, which may depend on its window; None where it does not."""
        if self.positions == "learned" or layer in self.unturned:
            return None
        return self.rope if self.local_rope is None or self.windows[layer] is None else self.local_rope

    def at(self, context: int) -> ModelSpec:
        """The spec inside a context of that many positions (see ``Rope.at``)."""
        local = self.local_rope and self.local_rope.at(context)
        return dataclasses.replace(self, rope=self.rope.at(context), local_rope=local)
