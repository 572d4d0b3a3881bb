"""A piece of a prompt that is fed once more: it attends to the prompt and itself, and leaves scores alone.

Why: kvjax/DESIGN.md, 28.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Observation, Replay
from kvjax.cache.ring import Entry
from kvjax.layer._info import LayerInfo, arriving, major, observe
from kvjax.layer._prompt import judged, retained, scores, scores_of_prompt
from kvjax.layer._read import merged
from kvjax.types import EMPTY, Heads
from pallas_kernels.blockwise.api import blockwise

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

Held = tuple["Float[Array, 'B K T H']", "Float[Array, 'B K T H']", "Float[Array, 'B K T']"]
"""A layer of a prompt's full cache: keys, values, and the highest scores so far."""


def hold(x: Heads) -> Held:
    """The full cache of a layer, before any piece."""
    k, v = major(x.k), major(x.v)
    return k, v, jnp.zeros(k.shape[:3], jnp.float32)


def hold_scored(info: LayerInfo, x: Heads, pos: Int[Array, "B T"], lse: Float[Array, "B N T"]) -> Held:
    """The full cache of a layer with scores that need no second pass."""
    k, v, none = hold(x)
    # The model's sliding layers take no policy beyond their window.
    return k, v, none if info.window is not None else scores_of_prompt(info, x, pos, lse)


def replay(
    info: LayerInfo, x: Heads, held: Held, pos: Int[Array, "B P"], begin: Int[Array, " B"], end: Array
) -> tuple[Float[Array, "B P N H"], Float[Array, "B K T"]]:
    """The piece's attention in the model's layout, and the prompt's highest scores after it.

    Args:
      info: which layer; ``info.total`` are the prompts' lengths.
      x: the piece's heads.
      held: of the prompts.
      pos: positions of the piece, EMPTY for padding.
      begin, end: the tokens that it repeats.
    """
    k, v, scores = held
    q, own_k, own_v = major(x.q), major(x.k), major(x.v)
    at = jnp.arange(k.shape[2])
    prompt_pos = jnp.where(at < info.total[:, None], at, EMPTY)
    partials = tuple(
        blockwise(q, keys, values, q_pos=pos, k_pos=k_pos, window=info.window, softcap=x.softcap)
        for keys, values, k_pos in ((k, v, prompt_pos), (own_k, own_v, pos))
    )
    out = merged(partials, x.v.dtype, x.sinks)[0]
    if info.window is not None:  # the model's sliding layers take no policy beyond their window
        return out, scores
    needs = info.policy.needs
    piece = Replay(
        q=q,
        k=own_k,
        pos=pos,
        prompt_k=k,
        prompt_v=v,
        begin=begin,
        end=end,
        hidden=x.hidden if "hidden" in needs else None,
        softcap=x.softcap,
        wo=x.wo if "wo_norm" in needs else None,
    )
    return out, jnp.maximum(scores, info.policy.eviction.replayed(piece))


def scores_of_pieces(info: LayerInfo, x: Heads, held: Held, pos: Int[Array, "B T"]) -> Float[Array, "B K T"]:
    """``scores`` after all pieces; arguments as of ``judge_held``."""
    x, observed = _shown(info, x, held, pos)
    return scores(info, arriving(info, x, pos, observed), observed)


def judge_held(
    info: LayerInfo, x: Heads, held: Held, pos: Int[Array, "B T"], target: Int[Array, "B K"] | None = None
) -> Entry:
    """The prompt's tokens with ``admit`` set where they are retained.

    Args:
      info: which layer.
      x: of any token: only the layer's weights are read.
      held: after all pieces; or with the tokens' ``scores``, if all layers together have a ``target``.
      pos: positions of the prompts, EMPTY for padding.
      target: slots of each KV head.
    """
    x, observed = _shown(info, x, held, pos)
    new = arriving(info, x, pos, observed)
    if target is None:
        return judged(info, x, observed, new, None)
    return dataclasses.replace(new, admit=new.admit & retained(info, new, observed, held[2], target))


def _shown(info: LayerInfo, x: Heads, held: Held, pos: Int[Array, "B T"]) -> tuple[Heads, Observation]:
    """What is left of a prompt when its layers are cut."""
    k, v, replayed = held
    x = dataclasses.replace(x, k=major(k), v=major(v))
    observed = observe(info, x, pos)
    return x, dataclasses.replace(observed, values=observed.values | {"replayed": replayed})
