"""Grammars: which tokens may come, against a search over the vocabulary's bytes; texts that keep to them."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest

import kvjax
from kvjax.engine import Engine, Request

pytest.importorskip("llguidance")

from kvjax.grammar import GrammarError, Grammars

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "tall": {"type": "boolean"}},
    "required": ["city", "tall"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model():
    return kvjax.load()


@pytest.fixture(scope="module")
def grammars(model) -> Grammars:
    return Grammars(model.text, model.spec.vocab_size)


def allowed_ids(guide) -> set[int]:
    """By the bits that the engine reads."""
    bits = np.unpackbits(guide.allowed().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_what_may_come_is_what_some_text_of_the_grammar_begins_with(model, grammars):
    """Oracle: all texts of a small language, and every token's own text.

    Where the text can go on in one way only, llguidance may leave the tokens that are usual there.
    """
    language = ["".join(x) + end for x in itertools.product("ab", repeat=3) for end in ("cat", "dog")]
    guide = grammars.guide("regex", "[ab]{3}(cat|dog)")()
    pieces = {id: model.text.tokenizer.decode([id], skip_special_tokens=False) for id in range(3, 5120)}
    written = ""
    for _ in range(40):
        begins = {
            id
            for id, piece in pieces.items()
            if piece and "\ufffd" not in piece and any(x.startswith(written + piece) for x in language)
        }
        allowed = allowed_ids(guide)
        choice = len({x[len(written)] for x in language if x.startswith(written)}) > 1
        assert allowed
        assert allowed == begins if choice else allowed <= begins
        token = max(allowed, key=lambda id: (len(pieces[id]), id))
        guide.take(token)
        written += pieces[token]
        if guide.done or written in language:
            break
    assert written in language


@pytest.mark.parametrize(
    ("kind", "value", "holds"),
    [
        ("json", SCHEMA, lambda text: json.loads(text)["city"] in ("Oslo", "Rome")),
        ("regex", "[0-9]{3}-[a-f]{2}", lambda text: re.fullmatch("[0-9]{3}-[a-f]{2}", text)),
        ("choice", ["yes", "no (really)"], lambda text: text in ("yes", "no (really)")),
        ("grammar", 'start: "<" /[a-z]{4}/ ">"', lambda text: re.fullmatch("<[a-z]{4}>", text)),
    ],
)
def test_texts_keep_to_their_grammar(model, engine, grammars, kind, value, holds):
    """Also at a high temperature, where the model alone would write anything."""
    for seed in range(2):
        request = Request(
            prompt=model.text.encode("The answer is"),
            max_new_tokens=60,
            temperature=1.5,
            seed=seed,
            guide=grammars.guide(kind, value),
        )
        ticket = engine.submit(request)
        text = model.text.decode(ticket.result())
        assert holds(text), text
        assert ticket.finish_reason == "stop"


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, max_rows=4, context=256) as engine:
        yield engine
        assert engine.fault is None


def test_rows_without_a_grammar_write_what_they_write_alone(model, engine, grammars):
    """They run in a batch of their own; log-probabilities are the model's own, not those of a mask."""
    plain = Request(prompt=model.text.encode("Once upon a time"), max_new_tokens=24, logprobs=1)
    alone = list(engine.submit(plain))
    guided = Request(
        prompt=plain.prompt, max_new_tokens=24, logprobs=1, guide=grammars.guide("regex", "[0-9]{24}")
    )
    tickets = [engine.submit(x) for x in (guided, plain, guided)]
    texts = [list(ticket) for ticket in tickets]
    assert [event.token for event in texts[1]] == [event.token for event in alone]
    assert [x.token for x in texts[0]] == [x.token for x in texts[2]]
    assert texts[0][0].logprob < alone[0].logprob - 1
    assert texts[0][0].top_logprobs == alone[0].top_logprobs
    assert {(batch.rows, batch.max_rows) for batch in engine.metrics().batches} == {(0, 4)}
    assert len(engine.metrics().batches) == 2


@pytest.mark.parametrize(
    ("kind", "value"), [("regex", "(a"), ("json", {"type": "nothing"}), ("grammar", "start: missing")]
)
def test_a_malformed_grammar_is_refused(grammars, kind, value):
    with pytest.raises(GrammarError, match=kind):
        grammars.guide(kind, value)
