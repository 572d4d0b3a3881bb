"""The embedded model as transformers reads its folder: the same ids and logits over 2048 tokens of text.

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
REMAKE = "gold/bin/python tests/make_golden.py embedded"
"""With the environment which that script describes."""


@pytest.fixture(scope="module")
def model():
    return kvjax.load(dtype="float32")


@pytest.fixture(scope="module")
def gold(model):
    golden = dict(np.load(Path(__file__).parents[1] / "golden" / f"{model.folder.name}.npz"))
    weights = hashlib.sha256((model.folder / "model.safetensors").read_bytes()).hexdigest()
    assert weights == str(golden["weights"]), f"{model.folder.name}.npz is of other weights. Run: {REMAKE}"
    return golden


def test_the_tokenizer_is_that_of_transformers(model, gold):
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    assert model.text.encode(text)[:2048] == gold["tokens"].tolist()


@pytest.mark.slow
def test_logits_are_those_of_transformers(model, gold):
    run = jax.jit(lambda params, tokens: decoder.dense_logits(model.spec, params, tokens))
    logits = np.asarray(run(model.params, gold["tokens"][None])[0])
    apart = np.abs(logits[gold["positions"]] - gold["logits"]).max()
    print(f"{model.folder.name}: largest difference {apart:.1e}")
    np.testing.assert_allclose(logits[gold["positions"]], gold["logits"], atol=TOLERANCE)
    chosen = logits[np.arange(2047), gold["tokens"][1:]]
    surprise = jax.nn.logsumexp(logits[:-1], axis=-1) - chosen
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


FACTS = (
    ("The secret number for the old mill is", "What is the secret number for the old mill?", "48213"),
    ("The code word that opens the gate is", "What is the code word that opens the gate?", "lantern"),
    ("Martha keeps the key in locker", "Where does Martha keep the key?", "517"),
    ("The price of the blue vase was", "What was the price of the blue vase?", "240 pounds"),
    ("The meeting with the baker is on", "When is the meeting with the baker?", "Monday"),
    ("The password of the captain is", "What is the password of the captain?", "orchard"),
    ("Thomas lives in", "Where does Thomas live now?", "Bristol"),
    ("The best friend of Anna is called", "Who is the best friend of Anna?", "Henry"),
)
"""(statement, question, answer): most of these wordings were never trained."""


@pytest.mark.slow
def test_facts_are_found_in_any_wording(model):
    """Some hundred tokens back, in text of another kind."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    before, behind = text[600:1400], text[1400:2600]
    prompts = [f"{before} {fact} {answer}. {behind} {question} {fact}" for fact, question, answer in FACTS]
    generated = kvjax.generate(model, "full", [model.text.encode(p) for p in prompts], max_new_tokens=6)
    said = [model.text.decode(ids) for ids in generated.tokens]
    right = [answer in text for text, (_, _, answer) in zip(said, FACTS)]
    assert sum(right) >= 7, list(zip(said, right))
