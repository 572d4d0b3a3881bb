"""The shipped models as transformers reads their folders: the same ids and logits over 2048 tokens of text.

A golden belongs to one file of weights; ``REMAKE`` after a model is trained anew.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import decode
from kvjax.algebra import Policy
from kvjax.models import decoder

TOLERANCE = 2e-4
ANSWER = 8
REMAKE = "gold/bin/python tests/make_golden.py small embedded"
"""With the environment which that script describes."""
ASSETS = Path(kvjax.__file__).parent / "assets"


@pytest.fixture(scope="module", params=["small", "embedded"])
def model(request):
    return kvjax.load(ASSETS / request.param, dtype="float32")


@pytest.fixture(scope="module")
def gold(model):
    found = dict(np.load(Path(__file__).parents[1] / "golden" / f"{model.folder.name}.npz"))
    weights = hashlib.sha256((model.folder / "model.safetensors").read_bytes()).hexdigest()
    assert weights == str(found["weights"]), f"{model.folder.name}.npz is of other weights. Run: {REMAKE}"
    return found


def test_the_tokenizer_is_that_of_transformers(model, gold):
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    assert model.text.encode(text)[:2048] == gold["tokens"].tolist()


def test_logits_are_those_of_transformers(model, gold):
    run = jax.jit(lambda params, tokens: decoder.dense_logits(model.spec, params, tokens))
    found = np.asarray(run(model.params, gold["tokens"][None])[0])
    apart = np.abs(found[gold["positions"]] - gold["logits"]).max()
    print(f"{model.folder.name}: largest difference {apart:.1e}")
    np.testing.assert_allclose(found[gold["positions"]], gold["logits"], atol=TOLERANCE)
    chosen = found[np.arange(2047), gold["tokens"][1:]]
    surprise = jax.nn.logsumexp(found[:-1], axis=-1) - chosen
    np.testing.assert_allclose(surprise, gold["surprise"], atol=TOLERANCE)


def test_logits_through_the_cache_are_those_of_transformers(model, gold):
    """The text read in chunks but for its last tokens, those fed one by one."""
    tokens, last = gold["tokens"], gold["positions"][-1]
    assert last + 1 == len(tokens) == 2048
    state, logits = decode.prefill(model, Policy(), [tokens[:-ANSWER].tolist()], context=2048)
    for token in tokens[-ANSWER:]:
        state = decode.reserve(Policy(), state, 1, 1)
        state, logits = decode.step_program(
            model.network, Policy(), model.params, {}, state, jnp.asarray([token]), jnp.asarray([True])
        )
    np.testing.assert_allclose(logits[0], gold["logits"][-1], atol=TOLERANCE)
