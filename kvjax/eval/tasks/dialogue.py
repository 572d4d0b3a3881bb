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
from kvjax.eval.tasks.maker import Maker, Piece, Rng, join, pick, shuffled, strings
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task

SGD = "dialogue/sgd_test.jsonl.gz"
ROLES = {"U": "User", "S": "Assistant"}
CODE, DECIMAL = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789", "0123456789"
NOTED = ("Thank you, I have noted it.", "Good, I will remember it.", "All right.")


Turns = list[tuple[str, str]]


@functools.cache
def _dialogues(data: Data) -> list[Turns]:
    return [[(who, said) for who, said in turns] for turns in data.lines(SGD)]


def talk(rng: Rng, maker: Maker) -> Sample:
    """The last reply of a dialogue that fits, as many whole dialogues in front of it as fit."""
    dialogues = _dialogues(maker.data)
    for _ in range(100):
        start = int(rng.integers(len(dialogues)))
        last = dialogues[start]
        if last[-1][0] != "S":
            continue
        before = [dialogues[(start - 1 - i) % len(dialogues)] for i in range(maker.length // 60 + 1)]
        try:
            return maker.fit(functools.partial(_talk, last, before), len(before))
        except TooLongError:
            continue  # this dialogue alone is too long
    raise EvalError(
        f"dialogue_ppl found no dialogue that fits into {maker.length} tokens. Ask for a larger --lengths."
    )


def _talk(last: Turns, before: list[Turns], count: int) -> Sample:
    shown = [turn for turns in reversed(before[:count]) for turn in turns] + last[:-1]
    context = "\n".join(f"{ROLES[who]}: {said}" for who, said in shown)
    return Sample(context=f"{context}\nAssistant:", answer=f" {last[-1][1]}")


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
    told = shuffled(rng, sorted(facts))[:3]
    asked = told[0]
    text = maker.window(rng, maker.data.essays())
    spoken = 1 + maker.length // 192
    topics, noted = maker.words(rng, len(told) + spoken), [pick(rng, NOTED) for _ in told]
    turns = rng.permutation(len(told) + spoken).tolist()  # below len(told): a fact, else a reading

    def build(count: int) -> Sample:
        pieces: list[Piece] = []
        for turn in turns:
            gap = "\n" if pieces else ""
            if turn < len(told):
                kind = told[turn]
                pieces += [(f"{gap}User: ", False), (f"My {kind} is {facts[kind]}.", kind == asked)]
                pieces += [(f"\nAssistant: {noted[turn]}", False)]
            else:
                mine = text[turn - len(told) : count : spoken]
                said = f"{gap}User: Tell me something about {topics[turn]}.\nAssistant: {' '.join(mine)}"
                pieces += [(said, False)]
        context, spans = join(pieces)
        answer = f" {facts[asked]}"
        behind = len(turns) - turns.index(0)
        return Sample(
            context=context,
            question=f"\nUser: What is my {asked}?",
            prefix=f"\nAssistant: Your {asked} is",
            answer=answer,
            refs=(facts[asked],),
            spans=spans,
            max_new=maker.count(answer) + 4,
            tags={"turns_ago": behind},
        )

    return maker.fit(build, len(text), least=spoken)


def score(output: str, sample: Sample) -> float:
    """1 if the fact occurs."""
    return scorers.all_found(output, sample.refs)


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
    Task(name="dialogue_recall", group="dialogue", fits=256, make=recall, score=score),
)
