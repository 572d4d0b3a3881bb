"""Several turns: perplexity of the last reply, and a fact of an early turn that is asked for in the last.

dialogue_ppl: Schema-Guided Dialogue's test dialogues joined until the length is reached; the reference is
the last assistant turn (after KVP's multi-turn test). dialogue_recall: the user tells facts about himself,
each in a turn of its own among turns in which something is read out; exact match of the one asked for.
"""

from __future__ import annotations

import functools

from kvjax.eval.errors import EvalError, TooLongError
from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.maker import Maker, Piece, join
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import DECIMAL, Rng, pick, shuffled, strings

SGD = "dialogue/sgd_test.jsonl.gz"
ROLES = {"U": "User", "S": "Assistant"}
CODE = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
NOTED = ("Thank you, I have noted it.", "Good, I will remember it.", "All right.")


Turns = list[tuple[str, str]]


@functools.cache
def _dialogues(data: Data) -> list[Turns]:
    return [[(who, text) for who, text in turns] for turns in data.lines(SGD)]


def talk(rng: Rng, maker: Maker) -> Sample:
    """The last reply of a dialogue that fits, as many whole dialogues in front of it as fit."""
    dialogues = _dialogues(maker.data)
    for _ in range(100):
        start = int(rng.integers(len(dialogues)))
        last = dialogues[start]
        if last[-1][0] != "S":
            continue
        before = [dialogues[(start - 1 - i) % len(dialogues)] for i in range(maker.length // 60 + 1)]

        def build(count: int, last: Turns = last, before: list[Turns] = before) -> Sample:
            shown = [turn for turns in reversed(before[:count]) for turn in turns] + last[:-1]
            context = "\n".join(f"{ROLES[who]}: {text}" for who, text in shown)
            return Sample(context=f"{context}\nAssistant:", answer=f" {last[-1][1]}")

        try:
            return maker.fit(build, len(before))
        except TooLongError:
            continue  # this dialogue alone is too long
    raise EvalError(
        f"dialogue_ppl found no dialogue that fits into {maker.length} tokens. Ask for a larger --lengths."
    )


def recall(rng: Rng, maker: Maker) -> Sample:
    """One of three facts, told in random turns."""
    name, town = (word.capitalize() for word in maker.words(rng, 2))
    facts = {
        "booking code": strings(rng, 1, 6, CODE)[0],
        "name": name,
        "home town": town,
        "room number": strings(rng, 1, 3, DECIMAL)[0],
        "pin": strings(rng, 1, 4, DECIMAL)[0],
    }
    kinds = shuffled(rng, sorted(facts))[:3]
    wanted = kinds[0]
    text = maker.window(rng, maker.data.essays())
    readings = 1 + maker.length // 192
    topics, noted = maker.words(rng, len(kinds) + readings), [pick(rng, NOTED) for _ in kinds]
    turns = rng.permutation(len(kinds) + readings).tolist()  # below len(kinds): a fact, else a reading

    def build(count: int) -> Sample:
        pieces: list[Piece] = []
        for turn in turns:
            gap = "\n" if pieces else ""
            if turn < len(kinds):
                kind = kinds[turn]
                pieces += [(f"{gap}User: ", False), (f"My {kind} is {facts[kind]}.", kind == wanted)]
                pieces += [(f"\nAssistant: {noted[turn]}", False)]
            else:
                page = " ".join(text[turn - len(kinds) : count : readings])
                pieces += [(f"{gap}User: Tell me something about {topics[turn]}.\nAssistant: {page}", False)]
        return maker.sample(
            join(pieces),
            f"\nUser: What is my {wanted}?",
            f"\nAssistant: Your {wanted} is",
            f" {facts[wanted]}",
            (facts[wanted],),
            tags={"turns_ago": len(turns) - turns.index(0)},
        )

    return maker.fit(build, len(text), least=readings)


TASKS = (
    Task(
        name="dialogue_ppl",
        group="dialogue",
        fits=512,
        make=talk,
        metric="perplexity",
        asks=False,
        needs=(SGD,),
    ),
    Task(name="dialogue_recall", group="dialogue", fits=256, make=recall, score=scorers.all_found),
)
