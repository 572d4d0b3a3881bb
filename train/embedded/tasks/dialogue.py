"""Dialogue: what somebody said in an early turn is asked for in the last (a twin of multi-turn retrieval).

Turns carry role words. The user tells one to four facts about himself (booking code, name, town, room,
pin), each in a turn of its own; in the other turns he asks for something to read and is given text,
which fills the row. The last one or two turns ask for facts, distances as they fall.
Fits from 256 tokens on.
"""

from __future__ import annotations

import numpy as np

from kvjax.eval.tasks.dialogue import CODE, NOTED
from kvjax.eval.tasks.words import DECIMAL, pick
from train.embedded.tasks.pieces import Row, chain, distinct, join, plain, stack, strings, window
from train.rows import ANSWER, HAYSTACK, TAIL, Source

FITS = 256

ROLES = (("User", "Assistant"), ("Customer", "Agent"))
TELL = ("My {kind} is {value}.", "Please note: my {kind} is {value}.", "By the way, my {kind} is {value}.")
ASK = ("What is my {kind}?", "Can you tell me my {kind} again?", "Do you remember my {kind}?")
READ = ("Tell me something about {word}.", "Read me a page about {word}, please.", "What about {word}?")


def row(rng: np.random.Generator, source: Source, length: int, *, count: int | None = None) -> Row | None:
    """One row with ``count`` facts, 1 to 5."""
    count = int(rng.integers(1, 5 if length >= 512 else 3)) if count is None else count
    user, agent = pick(rng, ROLES)
    facts = _facts(rng, source)
    kinds = [sorted(facts)[i] for i in rng.permutation(len(facts))[:count]]
    readings = int(rng.integers(1, 2 + length // 192))
    turns = rng.permutation(np.arange(count + readings))  # below count: a fact, else a reading
    heads: list[Row] = []
    for i, turn in enumerate(turns):
        if turn < count:
            line = pick(rng, TELL).format(kind=kinds[turn], value=facts[kinds[turn]])
            reply = f" {pick(rng, NOTED)}"
        else:
            line, reply = pick(rng, READ).format(word=source.word(rng)), ""
        gap = "\n" if i else ""
        heads.append(join(source, [(f"{gap}{user}: {line}\n{agent}:{reply}", HAYSTACK)]))
    questions = []
    for kind in [kinds[i] for i in rng.permutation(count)[: int(rng.integers(1, 3))]]:
        question = pick(rng, ASK).format(kind=kind)
        lead = f"\n{user}: {question}\n{agent}: Your {kind} is"
        questions.append(join(source, [(lead, TAIL), (f" {facts[kind]}", ANSWER), (".", TAIL)]))
    tail = chain(*questions)
    room = length - 1 - sum(len(head[0]) for head in heads) - len(tail[0])
    if room < 8 * readings:
        return None
    shares = 4 + rng.multinomial(room - 4 * readings, [1 / readings] * readings)
    texts = iter([plain(window(rng, source, int(share))) for share in shares])
    spans = [
        span
        for turn, head in zip(turns, heads)
        for span in ((head,) if turn < count else (head, next(texts)))
    ]
    return stack(*spans, tail)


def _facts(rng: np.random.Generator, source: Source) -> dict[str, str]:
    """One value of every kind."""
    name, town = (distinct(rng, source, 2) * 2)[:2]
    return {
        "booking code": strings(rng, source, 1, 6, CODE)[0],
        "name": name.capitalize(),
        "home town": town.capitalize(),
        "room number": "".join(DECIMAL[i] for i in rng.integers(0, 10, 3)),
        "pin": "".join(DECIMAL[i] for i in rng.integers(0, 10, 4)),
    }
