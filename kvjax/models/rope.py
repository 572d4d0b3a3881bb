"""Rotary position embedding (Su et al., RoFormer), half-split layout, and the ways it is stretched.

Each rule of stretching is a frozen value, which ``Rope.frequencies`` applies.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.types import EMPTY

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


FEW = 8
"""From so many tokens on it pays to compute their angles once for all heads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every position divided by ``factor`` (Chen et al., position interpolation)."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the rotary frequencies: long wavelengths are divided by ``factor``,
    short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRope:
    """LongRoPE (Ding et al.): every frequency divided by a searched factor of its own.

    There are two sets of factors, for texts within the original length and for longer ones. Keys are
    cached after they were turned, so the choice is made once for a whole context: ``Rope.at``.

    Attributes:
      short, long: one factor a frequency.
      original_max_position_embeddings: the longest context that takes ``short``.
      attention_factor: turned queries and keys are multiplied by it, whichever set is taken.
      stretched: take ``long``.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float
    stretched: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN (Peng et al., arXiv 2309.00071, section 3.2): slow pairs are stretched, fast ones kept.

    Attributes:
      factor: of the stretch.
      original_max_position_embeddings: the length before it.
      beta_fast, beta_slow: turns within that length from which a pair is kept, and up to which it is fully
        stretched; between them the two are blended by the pair's index.
      truncate: the blend begins and ends at whole indices.
      attention_factor: turned queries and keys are multiplied by it.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float


Scaling = LinearScaling | Llama3Scaling | LongRope | Yarn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Which pairs of a head's channels turn, and how far per position.

    Attributes:
      theta: base of the geometric series of frequencies.
      scaling: how the series is stretched, or None.
      fraction: part of the head that turns, its first channels; the others stay as they are.
    """

    theta: float = 10_000.0
    scaling: Scaling | None = None
    fraction: float = 1.0

    def at(self, context: int) -> Rope:
        """The rope inside a context of that many positions, prompt and answer together.

        Only LongRoPE asks: ``long`` is taken iff the context exceeds the original length, for every
        token of it. transformers decides by the longest position met so far; the two agree for texts
        that end within the original length in a context that does, and for prompts beyond it.
        """
        s = self.scaling
        if not isinstance(s, LongRope):
            return self
        stretched = context > s.original_max_position_embeddings
        return dataclasses.replace(self, scaling=dataclasses.replace(s, stretched=stretched))

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Angles per position of the turning pairs, float32 [H / 2] (or that fraction), fastest first."""
        turning = int(head_dim * self.fraction)
        # Exponents are rounded to float32, as where models are trained: thirds and the like move the result.
        exponents = np.arange(0, turning, 2, dtype=np.float32) / np.float32(turning)
        freq = self.theta ** -exponents.astype(np.float64)
        s = self.scaling
        if isinstance(s, LinearScaling):
            freq = freq / s.factor
        elif isinstance(s, LongRope):
            # Power, product and reciprocal are each rounded to float32 where models are trained. Rounded once
            # half of the frequencies have another last bit, which turns by 0.008 more at position 131,072.
            powers = (self.theta ** exponents.astype(np.float64)).astype(np.float32)
            return np.float32(1) / (np.asarray(s.long if s.stretched else s.short, np.float32) * powers)
        elif isinstance(s, Llama3Scaling):
            freq = _llama3(freq, s)
        elif isinstance(s, Yarn):
            freq = _yarn(freq, s, self.theta)
        return freq.astype(np.float32)

    @property
    def amplitude(self) -> float:
        """The factor on turned channels."""
        return self.scaling.attention_factor if isinstance(self.scaling, LongRope | Yarn) else 1.0


def _llama3(freq: np.ndarray, s: Llama3Scaling) -> np.ndarray:
    wavelength = 2 * math.pi / freq
    longest = s.original_max_position_embeddings / s.low_freq_factor
    shortest = s.original_max_position_embeddings / s.high_freq_factor
    # 1 at the shortest wavelength (kept as it is), 0 at the longest (fully divided).
    keep = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    blend = (1 - keep) * freq / s.factor + keep * freq
    return np.where(wavelength > longest, freq / s.factor, np.where(wavelength < shortest, freq, blend))


def _yarn(freq: np.ndarray, s: Yarn, theta: float) -> np.ndarray:
    pairs, original = len(freq), s.original_max_position_embeddings

    def index_of(turns: float) -> float:
        """The pair, as a fraction, that turns so often within the original length."""
        return pairs * math.log(original / (2 * math.pi * turns)) / math.log(theta)

    first, last = index_of(s.beta_fast), index_of(s.beta_slow)
    if s.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    stretched = np.clip((np.arange(pairs) - first) / (last - first or 0.001), 0, 1)
    return freq * (1 - stretched) + freq / s.factor * stretched


def rotate(x: Float[Array, "B T N H"], positions: Int[Array, "B T"], rope: Rope) -> Float[Array, "B T N H"]:
    """Turn each (i, i + R/2) pair of the first R channels by its position times the pair's frequency."""
    frequencies = jnp.asarray(rope.frequencies(x.shape[-1]))
    half = len(frequencies)

    def turns(positions: Int[Array, "B T"]) -> tuple[Array, Array]:
        angle = positions[:, :, None, None].astype(jnp.float32) * frequencies
        return rope.amplitude * jnp.cos(angle), rope.amplitude * jnp.sin(angle)

    def turns_once(positions: Int[Array, "B T"]) -> tuple[Array, Array]:
        # Fused into the turn, XLA on CPU would compute them again for every head and half of it. (A barrier
        # does not keep it from that, a branch does.)
        nothing = jnp.zeros((*positions.shape, 1, half), jnp.float32)
        return jax.lax.cond(positions.max() >= EMPTY, turns, lambda _: (nothing, nothing), positions)

    if positions.size < FEW:
        cos, sin = turns(positions)
    else:
        cos, sin = jax.lax.platform_dependent(positions, cpu=turns_once, default=turns)
    y = x.astype(jnp.float32)
    a, b = y[..., :half], y[..., half : 2 * half]
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin, y[..., 2 * half :]], axis=-1)
    return turned.astype(x.dtype)
