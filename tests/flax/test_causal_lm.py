"""``kvjax.flax.CausalLM``: the cache as one variable of an NNX module, beside ``kvjax.generate``."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

import kvjax
import kvjax.flax as kvflax
from kvjax import decode
from kvjax.decode import RequestError

PROMPTS = [tiny.prompt(40, 1), tiny.prompt(23, 2)]
NEW = 6
SIZES = {"page": tiny.PAGE, "chunk_size": 16}
CONTEXT = decode.bucket(40 + NEW)
STREAMING, SNAPKV = "window(8) + sinks(2)", "snapkv(8) + ada(24)"


def made(spec: str, model=None, **sizes) -> kvflax.CausalLM:
    policy = kvjax.policy(spec)
    sizes = {"batch": 2, "context": CONTEXT, **SIZES, **sizes}
    return kvflax.CausalLM(model or tiny.model(), policy, weights=tiny.weights(policy), **sizes)


def generated(spec: str, new: int = NEW) -> list[list[int]]:
    policy = kvjax.policy(spec)
    call = {"max_new_tokens": new, "weights": tiny.weights(policy), **SIZES}
    return kvjax.generate(tiny.model(), policy, PROMPTS, **call).tokens


def written(step, lm, logits, new: int = NEW) -> list[list[int]]:
    """The tokens of greedy decoding, a call of ``step(lm, tokens)`` each."""
    tokens = [logits.argmax(-1)]
    for _ in range(new - 1):
        tokens.append(step(lm, tokens[-1]).argmax(-1))
    return np.stack(tokens, axis=1).tolist()


@nnx.jit
def jitted(lm, tokens):
    return lm(tokens)


