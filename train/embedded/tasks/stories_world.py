"""The little worlds behind ``train.embedded.tasks.stories``: people walk, carry things and hand them on.

Rules (observed in bAbI's data): a person whose room is known may take a thing that nobody holds and that is
in that room or was never seen; a thing goes where its holder goes. Question 3 asks for the room a thing
was in just before its last stay in another one; question 5 for the latest gift that matches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from kvjax.eval.tasks.words import pick
from kvjax.eval.tasks.world import GIVERS, ROOMS, THINGS, WAYS, WORDS

WALKERS = ("John", "Mary", "Daniel", "Sandra")
WALK = ("moved", "went", "went back", "travelled", "journeyed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Story:
    """Sentences in order, and (question, answer) pairs about all of them."""

    facts: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]


class World:
    """Who is where, who holds what, where things have been, who gave what to whom."""

    def __init__(self, people: tuple[str, ...]):
        self.people = people
        self.at: dict[str, str] = {}
        self.holder: dict[str, str] = {}
        self.trail: dict[str, list[str]] = {}
        self.gifts: list[tuple[str, str, str]] = []

    def walk(self, rng: np.random.Generator) -> str:
        """Somebody goes to another room."""
        who = pick(rng, self.people)
        room = pick(rng, [room for room in ROOMS if room != self.at.get(who)])
        self.at[who] = room
        for thing, holder in self.holder.items():
            if holder == who:
                self.trail[thing].append(room)
        return f"{who} {pick(rng, WALK)} to the {room}."

    def take(self, rng: np.random.Generator) -> str | None:
        """Somebody takes a thing that is there; None when nobody can."""
        free = [thing for thing in THINGS if thing not in self.holder]
        can = [(w, t) for w in self.at for t in free if self.trail.get(t, [self.at[w]])[-1] == self.at[w]]
        if not can:
            return None
        who, thing = pick(rng, can)
        self.holder[thing] = who
        self.trail.setdefault(thing, [self.at[who]])
        return f"{who} {pick(rng, WORDS['take'])} the {thing}{_there(rng)}."

    def drop(self, rng: np.random.Generator) -> str | None:
        """Somebody lets go of a thing; None when nobody holds one."""
        if not self.holder:
            return None
        thing = pick(rng, sorted(self.holder))
        return f"{self.holder.pop(thing)} {pick(rng, WORDS['drop'])} the {thing}{_there(rng)}."

    def give(self, rng: np.random.Generator) -> str | None:
        """A thing goes to somebody who is there or whose place is not known; None when it cannot."""
        can = [
            (giver, thing, taker)
            for thing, giver in sorted(self.holder.items())
            for taker in self.people
            if taker != giver and self.at.get(taker, self.at[giver]) == self.at[giver]
        ]
        if not can:
            return None
        giver, thing, taker = pick(rng, can)
        self.holder[thing] = taker
        self.at[taker] = self.at[giver]
        self.gifts.append((giver, thing, taker))
        return f"{giver} {pick(rng, WORDS['give'])} the {thing} to {taker}."


def _there(rng: np.random.Generator) -> str:
    return " there" if rng.random() < 0.2 else ""


def _count(rng: np.random.Generator, least: int, most: int) -> int:
    """Facts of a story: short ones as often as long ones."""
    return int(np.exp(rng.uniform(np.log(least), np.log(max(least, most) + 1))))


def _story(rng: np.random.Generator, facts: list[str], can: list[tuple[str, str]]) -> Story | None:
    """The story with one to three of the questions that can be asked."""
    if not can:
        return None
    order = rng.permutation(len(can))[: int(rng.integers(1, 4))]
    return Story(facts=tuple(facts), questions=tuple(can[i] for i in order))


def whereabouts(rng: np.random.Generator, most: int) -> Story | None:
    """Question 1: where somebody is."""
    world = World(WALKERS)
    facts = [world.walk(rng) for _ in range(_count(rng, 2, most))]
    return _story(rng, facts, [(f"Where is {who}?", room) for who, room in world.at.items()])


def _carried(rng: np.random.Generator, least: int, most: int) -> tuple[World, list[str]]:
    world = World(WALKERS)
    facts: list[str] = []
    while len(facts) < least or len(facts) < most:
        act = (world.walk, world.take, world.drop)[int(np.searchsorted([0.64, 0.85], rng.random()))]
        fact = act(rng)
        if fact is not None:
            facts.append(fact)
    return world, facts


def things(rng: np.random.Generator, most: int) -> Story | None:
    """Question 2: where a thing is."""
    world, facts = _carried(rng, 3, _count(rng, 3, most))
    return _story(rng, facts, [(f"Where is the {thing}?", trail[-1]) for thing, trail in world.trail.items()])


def before(rng: np.random.Generator, most: int) -> Story | None:
    """Question 3: where a thing was before it was in a room."""
    world, facts = _carried(rng, 4, _count(rng, 6, most))
    can = [
        (f"Where was the {thing} before the {trail[i]}?", trail[i - 1])
        for thing, trail in world.trail.items()
        for i in range(1, len(trail))
        if trail[i] not in trail[i + 1 :]
    ]
    return _story(rng, facts, can)


def directions(rng: np.random.Generator, _: int) -> Story | None:
    """Question 4: three rooms in a line; the text gives two neighbours' positions, one is asked for."""
    rooms = [ROOMS[i] for i in rng.permutation(len(ROOMS))[:3]]
    way = pick(rng, sorted(WAYS))
    pairs = [(rooms[1], rooms[0]), (rooms[2], rooms[1])]  # (a, b): a is `way` of b
    facts = []
    for i in rng.permutation(2):
        a, b = pairs[i]
        forward = rng.random() < 0.5
        facts.append(f"The {a} is {way} of the {b}." if forward else f"The {b} is {WAYS[way]} of the {a}.")
    can = []
    for a, b in pairs:
        for side, near, far in ((way, a, b), (WAYS[way], b, a)):
            can += [(f"What is {side} of the {far}?", near), (f"What is the {near} {side} of?", far)]
    return _story(rng, facts, can)


def gifts(rng: np.random.Generator, most: int) -> Story | None:
    """Question 5: who gave what to whom; the latest matching gift counts."""
    world = World(GIVERS)
    facts: list[str] = []
    for _ in range(10 * (count := _count(rng, 4, most))):
        if len(facts) == count:
            break
        acts = (world.walk, world.take, world.give, world.drop)
        fact = acts[int(np.searchsorted([0.5, 0.68, 0.9], rng.random()))](rng)
        if fact is not None:
            facts.append(fact)
    latest: dict[str, str] = {}
    for giver, thing, taker in world.gifts:
        latest |= {
            f"What did {giver} give to {taker}?": thing,
            f"Who gave the {thing} to {taker}?": giver,
            f"Who gave the {thing}?": giver,
            f"Who received the {thing}?": taker,
            f"Who did {giver} give the {thing} to?": taker,
        }
    return _story(rng, facts, list(latest.items()))


STORIES: dict[int, Callable[[np.random.Generator, int], Story | None]] = {
    1: whereabouts,
    2: things,
    3: before,
    4: directions,
    5: gifts,
}
