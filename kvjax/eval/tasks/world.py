"""A little world for bAbI's questions 1 to 5 (https://arxiv.org/abs/1502.05698), where its files are absent.

Independent of the world that training uses, except for its words. Events are drawn first, as (who, did,
what), and a question is answered by looking back along them.
"""

from __future__ import annotations

import dataclasses

from kvjax.eval.tasks.words import Rng, pick, shuffled

ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
WALKERS, GIVERS = ("Daniel", "John", "Mary", "Sandra"), ("Bill", "Fred", "Jeff", "Mary")
WORDS = {
    "go": ("moved to", "went to", "went back to", "travelled to", "journeyed to"),
    "take": ("got", "took", "grabbed", "picked up"),
    "drop": ("dropped", "put down", "left", "discarded"),
    "give": ("gave", "handed", "passed"),
}
WAYS = {"north": "south", "east": "west", "south": "north", "west": "east"}


@dataclasses.dataclass(frozen=True)
class Event:
    """Who did what to which thing or room, and for whom."""

    who: str
    did: str
    what: str
    whom: str = ""

    def sentence(self, rng: Rng) -> str:
        verb = pick(rng, WORDS[self.did])
        there = " there" if self.did in ("take", "drop") and rng.random() < 0.2 else ""
        return f"{self.who} {verb} the {self.what}{f' to {self.whom}' if self.whom else there}."


Story = tuple[list[str], str, str]
"""(facts, question, answer)"""


def room_of(events: list[Event], who: str) -> str | None:
    """The room somebody last went to."""
    return next((e.what for e in reversed(events) if e.did == "go" and e.who == who), None)


def holder_of(events: list[Event], thing: str) -> str | None:
    """Who has a thing now."""
    last = next((e for e in reversed(events) if e.what == thing), None)
    return None if last is None or last.did == "drop" else last.whom or last.who


def trail_of(events: list[Event], thing: str) -> list[str]:
    """Rooms a thing was in, one after the other, no room twice in a row."""
    rooms: list[str] = []
    for at in range(1, len(events) + 1):
        past = events[:at]
        who = holder_of(past, thing)
        room = room_of(past, who) if who else None
        if room and rooms[-1:] != [room]:
            rooms.append(room)
    return rooms


def _walk(rng: Rng, events: list[Event]) -> Event:
    who = pick(rng, WALKERS)
    return Event(who, "go", pick(rng, [room for room in ROOMS if room != room_of(events, who)]))


def _carry(rng: Rng, events: list[Event]) -> Event:
    """A walk, a taking or a dropping, whichever is drawn and possible."""
    kind = rng.random()
    thing = pick(rng, THINGS)
    who = holder_of(events, thing)
    if kind > 0.85 and who:
        return Event(who, "drop", thing)
    if kind > 0.6 and not who:
        lies = trail_of(events, thing)
        near = [w for w in WALKERS if room_of(events, w) and (not lies or room_of(events, w) == lies[-1])]
        if near:
            return Event(pick(rng, near), "take", thing)
    return _walk(rng, events)


def _sentences(rng: Rng, events: list[Event]) -> list[str]:
    return [event.sentence(rng) for event in events]


def whereabouts(rng: Rng, facts: int) -> Story:
    """Question 1: where is somebody?"""
    events: list[Event] = []
    while len(events) < facts:
        events.append(_walk(rng, events))
    who = pick(rng, sorted({e.who for e in events}))
    return _sentences(rng, events), f"Where is {who}?", str(room_of(events, who))


def things(rng: Rng, facts: int) -> Story:
    """Question 2: where is a thing?"""
    events: list[Event] = []
    while len(events) < facts or not any(trail_of(events, thing) for thing in THINGS):
        events.append(_carry(rng, events))
    thing = pick(rng, [thing for thing in THINGS if trail_of(events, thing)])
    return _sentences(rng, events), f"Where is the {thing}?", trail_of(events, thing)[-1]


def before(rng: Rng, facts: int) -> Story:
    """Question 3: where was a thing before its last stay in a room?"""
    events: list[Event] = []
    while len(events) < facts or not any(len(trail_of(events, thing)) > 1 for thing in THINGS):
        events.append(_carry(rng, events))
    thing = pick(rng, [thing for thing in THINGS if len(trail_of(events, thing)) > 1])
    trail = trail_of(events, thing)
    room = pick(rng, sorted(set(trail[1:])))
    last = len(trail) - 1 - trail[::-1].index(room)
    if last == 0:
        return before(rng, facts)
    return _sentences(rng, events), f"Where was the {thing} before the {room}?", trail[last - 1]


def directions(rng: Rng, _: int) -> Story:
    """Question 4: which room lies in a direction of another?"""
    a, b, c = shuffled(rng, ROOMS)[:3]
    way = pick(rng, sorted(WAYS))
    facts = [f"The {a} is {way} of the {b}.", f"The {b} is {way} of the {c}."]
    near, far = pick(rng, ((a, b), (b, c)))
    questions = [
        (f"What is {way} of the {far}?", near),
        (f"What is the {near} {way} of?", far),
        (f"What is {WAYS[way]} of the {near}?", far),
        (f"What is the {far} {WAYS[way]} of?", near),
    ]
    question, answer = pick(rng, questions)
    return shuffled(rng, facts), question, answer


def gifts(rng: Rng, facts: int) -> Story:
    """Question 5: who gave what to whom, the last time?"""
    events: list[Event] = []
    while len(events) < facts or not any(e.did == "give" for e in events):
        thing = pick(rng, THINGS)
        who = holder_of(events, thing)
        if who and rng.random() < 0.6:
            events.append(Event(who, "give", thing, pick(rng, [g for g in GIVERS if g != who])))
        elif who is None:
            events.append(Event(pick(rng, GIVERS), "take", thing))
        else:
            events.append(Event(pick(rng, GIVERS), "go", pick(rng, ROOMS)))
    gave = [e for e in reversed(events) if e.did == "give"]
    gift = pick(rng, gave[::-1])
    giver, thing, taker = gift.who, gift.what, gift.whom

    def latest(**known: str) -> Event:
        return next(e for e in gave if all(getattr(e, name) == value for name, value in known.items()))

    questions = [
        (f"What did {giver} give to {taker}?", latest(who=giver, whom=taker).what),
        (f"Who gave the {thing} to {taker}?", latest(what=thing, whom=taker).who),
        (f"Who gave the {thing}?", latest(what=thing).who),
        (f"Who received the {thing}?", latest(what=thing).whom),
        (f"Who did {giver} give the {thing} to?", latest(who=giver, what=thing).whom),
    ]
    return _sentences(rng, events), *pick(rng, questions)


STORIES = {1: whereabouts, 2: things, 3: before, 4: directions, 5: gifts}
