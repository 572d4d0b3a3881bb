"""The static description of a decoder: sizes, rotary embedding, what is tied and what has a bias."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the rotary frequencies: long wavelengths are divided by ``factor``,
    short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al., RoFormer), half-split layout.

    Attributes:
      theta: base of the geometric series of frequencies.
      scaling: Llama 3's rule, or None.
    """

    theta: float = 10_000.0
    scaling: Llama3Scaling | None = None

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Angles per position, float32 [H / 2], fastest first."""
        freq = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.scaling is None:
            return freq.astype(np.float32)
        s = self.scaling
        wavelength = 2 * math.pi / freq
        longest = s.original_max_position_embeddings / s.low_freq_factor
        shortest = s.original_max_position_embeddings / s.high_freq_factor
        # 1 at the shortest wavelength (kept as it is), 0 at the longest (fully divided).
        keep = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (
            s.high_freq_factor - s.low_freq_factor
        )
        blend = (1 - keep) * freq / s.factor + keep * freq
        freq = np.where(wavelength > longest, freq / s.factor, np.where(wavelength < shortest, freq, blend))
        return freq.astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything static about a decoder; hashable, so it is a static argument of jit.

    Attributes:
      family: HF ``model_type`` this spec is read from and written as.
      windows: per layer, the model's own sliding window in tokens, or None for full attention.
      max_positions: the longest sequence the model was trained for.
      bos, eos: token ids that begin a text and end one (several may end it).
    """

    family: Literal["llama", "qwen2"]
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    model_dim: int
    mlp_dim: int
    max_positions: int
    rope: Rope = Rope()
    norm_eps: float = 1e-6
    qkv_bias: bool = False
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
