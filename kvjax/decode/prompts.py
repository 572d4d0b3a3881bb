"""Prompts into a new state: in chunks where the policy decides on arrival, else layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from kvjax.cache.state import KVState
from kvjax.decode.chunks import extend
from kvjax.decode.layerwise import prefill_whole
from kvjax.decode.requests import Progress, RequestError, check_prompts
from kvjax.decode.rooms import empty
from kvjax.decode.sizes import CHUNK, bucket
from kvjax.decode.weights import checked
from kvjax.policy import Policy
from kvjax.types import Params, Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def prefill(
    model: Weighted,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    context: int | None = None,
    chunk_size: int = CHUNK,
    page: int | None = None,
    weights: Params | None = None,
    progress: Progress | None = None,
) -> tuple[KVState, Float[Array, "B V"]]:
    """Read the prompts; the compressed state and the logits of each row's next token.

    Policies that decide on arrival read in chunks, in bounded memory; policies that score after full
    attention read the whole prompt layer by layer, each layer compressed before the next one runs.

    Args:
      model: a network and its weights.
      policy: what to keep.
      prompts: token ids per row, any lengths of at least 1.
      context: most tokens a row will ever see (prompt and new ones); by default the prompts' size class.
      chunk_size: tokens a chunk.
      page: slots of a page; by default ``page_size`` chooses.
      weights: learned weights, for policies that have some: ``kvjax.weights_for(policy, model)``.
      progress: told how much is done.

    Raises:
      RequestError: an empty prompt, or one longer than the model or ``context`` allows.
      WeightsError: a policy that learns without its weights, or weights that do not fit.
    """
    weights = checked(model, policy, weights)
    lengths = [len(prompt) for prompt in prompts]
    context = bucket(max(lengths, default=0)) if context is None else context
    check_prompts(model.network, lengths, context)
    dtype = model.params["embed"].dtype
    if chunk_size < 1:
        raise RequestError(f"prefill(chunk_size={chunk_size}) reads nothing. Give 1 token or more.")
    rows = len(prompts)
    state = empty(
        model.network, policy, rows=rows, context=context, dtype=dtype, page=page, chunk_size=chunk_size
    )
    state = dataclasses.replace(state, total=jax.device_put(np.asarray(lengths, np.int32)))
    if policy.whole_prompt:
        return prefill_whole(model, policy, state, prompts, weights, progress)
    return extend(model, policy, state, prompts, weights=weights, progress=progress)
