"""The real model against transformers: tokens, log-probabilities, rounding (``make_golden.py``)."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from real_prompts import BOOK, CHATS, LONG, NEW, PLAIN, PROBE

import kvjax
from kvjax import decode
from kvjax.models import decoder

pytestmark = pytest.mark.real

GOLDEN = np.load(Path(__file__).with_name("golden.npz"))
COUNT = len(PLAIN) + len(CHATS) + 1
PROMPTS = [GOLDEN[f"ids_{i}"].tolist() for i in range(COUNT)]
TOLERANCE = 2e-4


def texts(model: kvjax.LanguageModel) -> list[str]:
    return [*PLAIN, *(model.text.render(chat) for chat in CHATS)]


def test_texts_and_chats_are_the_tokens_of_transformers(smollm2):
    assert [smollm2.text.encode(text, bos=False) for text in texts(smollm2)] == PROMPTS[:-1]
    assert [smollm2.text.chat(chat) for chat in CHATS] == PROMPTS[len(PLAIN) : -1]
    assert smollm2.text.encode(BOOK, bos=False)[:LONG] == PROMPTS[-1]
    assert smollm2.text.bos is None


@functools.partial(jax.jit, static_argnames="spec")
def logprobs(spec, params, ids, at):
    """Of each next token [T - 1], and of the vocabulary after token ``at``."""
    where = jnp.arange(len(ids) - 1)[None]
    x, _ = decoder.forward(spec, params, ids[None, :-1], where, decoder.dense_attend(spec), None)
    every = jax.nn.log_softmax(decoder.logits(spec, params, x)[0].astype(jnp.float32))
    return jnp.take_along_axis(every, ids[1:, None], axis=1)[:, 0], every[at]


def of_prompt(model: kvjax.LanguageModel, i: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.concatenate([GOLDEN[f"ids_{i}"], GOLDEN[f"greedy_{i}"]])
    padded = np.zeros(decode.bucket(len(ids)), np.int32)
    padded[: len(ids)] = ids
    following, first = jax.device_get(logprobs(model.spec, model.params, padded, len(PROMPTS[i]) - 1))
    return following[: len(ids) - 1], first


@pytest.mark.parametrize("i", range(COUNT))
def test_logprobs_are_those_of_transformers(smollm2, i):
    following, first = of_prompt(smollm2, i)
    off = [
        np.abs(following - GOLDEN[f"logprobs_{i}"]).max(),
        np.abs(first[::PROBE] - GOLDEN[f"probe_{i}"]).max(),
    ]
    print(f"prompt {i}, {len(PROMPTS[i])} tokens: largest difference {max(off):.1e}")
    assert max(off) <= TOLERANCE


def test_greedy_tokens_are_those_of_transformers(smollm2):
    """Through the cache: all short prompts in one batch, and the long one."""
    write = functools.partial(kvjax.generate, smollm2, "full", max_new_tokens=NEW, stops=())
    written = write(PROMPTS[:-1]).tokens + write(PROMPTS[-1:]).tokens
    assert written == [GOLDEN[f"greedy_{i}"].tolist() for i in range(COUNT)]


def test_bfloat16_is_no_further_from_float32_than_transformers(smollm2_folder):
    model = kvjax.load(smollm2_folder, dtype="bfloat16")
    ours, theirs = [], []
    for i in range(COUNT):
        exact = GOLDEN[f"logprobs_{i}"]
        ours.append(np.abs(of_prompt(model, i)[0] - exact))
        theirs.append(np.abs(GOLDEN[f"logprobs_bf16_{i}"] - exact))
        print(f"prompt {i}: {ours[-1].mean():.4f} and {theirs[-1].mean():.4f} nats a token")
    assert 0 < np.concatenate(ours).mean() <= np.concatenate(theirs).mean()
