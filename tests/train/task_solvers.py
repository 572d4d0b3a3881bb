"""One solver a task: from the text of a training row to its answers, in order, by the text alone."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Callable

from train.tasks import labels


def found_in(pattern: str, said: str) -> str:
    """The group of the first match."""
    match = re.search(pattern, said)
    assert match is not None, pattern
    return match[1]


def solve_needles(said: str) -> list[str]:
    hidden = collections.defaultdict(list)
    for key, value in re.findall(r"One of the special magic \w+ for (\S+) is: (\w+)\.", said):
        hidden[key].append(value)
    asked = re.findall(r"What (?:is|are all) the special magic \w+ for (.+?) mentioned", said)
    return [value for keys in asked for key in re.split(r", and |, ", keys) for value in hidden[key]]


def solve_chains(said: str) -> list[str]:
    found = []
    for number in re.findall(r"Question: .* value (\d+)", said):
        names = []
        for name, value in re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", said):
            if value == number or value in names:
                names.append(name)
        found.append(" ".join(names))
    return found


def solve_common(said: str) -> list[str]:
    found = []
    for listed, count in re.findall(r"than the others\.\n(.*)\nQuestion: What are the (\d+)", said):
        items = [item.split()[1] for item in re.split(r" (?=\d+\. )", listed)]
        ranked = collections.Counter(items).most_common()
        k = int(count)
        assert ranked[k - 1][1] > ranked[k][1]
        found += sorted((word for word, _ in ranked[:k]), key=items.index)
    return found


def solve_frequent(said: str) -> list[str]:
    coded = found_in(r"Ignore the dots\.\n(.*)\nQuestion", said).split()
    ranked = [pair for pair in collections.Counter(coded).most_common() if pair[0] != "..."]
    assert ranked[0][1] > ranked[1][1] > ranked[2][1] > ranked[3][1]
    assert coded.count("...") > ranked[0][1]
    return [" ".join(word for word, _ in ranked[:3])]


WHO = r"(John|Mary|Daniel|Sandra|Bill|Fred|Jeff)"
THING = r"the (apple|football|milk)"
FACT = re.compile(
    rf"{WHO} (?:moved|went|went back|travelled|journeyed) (to) the (\w+)\.|"
    rf"{WHO} (got|took|grabbed|picked up|dropped|put down|left|discarded) {THING}(?: there)?\.|"
    rf"{WHO} (?:gave|handed|passed) {THING} to {WHO}\.|"
    r"The (\w+) is (north|south|east|west) of the (\w+)\."
)
BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}


def solve_story(said: str, questions: list[str] | None = None) -> list[str]:
    """Replays the facts, each of which must be possible; rooms of a thing are its holder's."""
    at: dict[str, str] = {}
    held: dict[str, str | None] = {}
    been: dict[str, list[str]] = collections.defaultdict(list)
    given: list[tuple[str, str, str]] = []
    way: dict[tuple[str, str], str] = {}
    for fact in FACT.findall(said):
        walker, _, room, taker, verb, taken, giver, gift, receiver, a, side, b = fact
        if walker:
            at[walker] = room
        elif taker:
            took = verb in ("got", "took", "grabbed", "picked up")
            assert held.get(taken, None if took else taker) == (None if took else taker)
            assert not took or not been[taken] or been[taken][-1] == at.get(taker, been[taken][-1])
            held[taken] = taker if took else None
        elif giver:
            assert held.get(gift, giver) == giver
            held[gift] = receiver
            given.insert(0, (giver, gift, receiver))
        else:
            way[side, b], way[BACK[side], a] = a, b
        for thing, who in held.items():
            if who in at and been[thing][-1:] != [at[who]]:
                been[thing].append(at[who])

    def answer(question: str) -> str:
        if m := re.fullmatch(rf"Where is {WHO}\?", question):
            return at[m[1]]
        if m := re.fullmatch(rf"Where is {THING}\?", question):
            return been[m[1]][-1]
        if m := re.fullmatch(rf"Where was {THING} before the (\w+)\?", question):
            rooms = been[m[1]]
            return rooms[len(rooms) - 2 - rooms[::-1].index(m[2])]
        if m := re.fullmatch(r"What is (\w+) of the (\w+)\?", question):
            return way[m[1], m[2]]
        if m := re.fullmatch(r"What is the (\w+) (\w+) of\?", question):
            return way[BACK[m[2]], m[1]]
        if m := re.fullmatch(rf"What did {WHO} give to {WHO}\?", question):
            return next(g[1] for g in given if (g[0], g[2]) == m.groups())
        if m := re.fullmatch(rf"Who gave {THING} to {WHO}\?", question):
            return next(g[0] for g in given if g[1:] == m.groups())
        if m := re.fullmatch(rf"Who did {WHO} give {THING} to\?", question):
            return next(g[2] for g in given if g[:2] == m.groups())
        if m := re.fullmatch(rf"Who (gave|received) {THING}\?", question):
            return next(g[0 if m[1] == "gave" else 2] for g in given if g[1] == m[2])
        raise AssertionError(question)

    asked = re.findall(r"Question: (.*)\nAnswer:", said) if questions is None else questions
    return [answer(question) for question in asked]


def solve_labels(said: str) -> list[str]:
    """A word that stands in an earlier text, too, tells the label."""
    seen: dict[str, str] = {}
    found: list[str] = []
    for shown, label in re.findall(r"text: (.*)\nlabel: (\w)", said):
        key_words = set(re.findall(r"\w+", shown.lower())) - labels.TEMPLATE_WORDS
        known = [seen[word] for word in key_words if word in seen]
        found += known
        seen |= dict.fromkeys(key_words, label)
    return found


def solve_ranking(said: str) -> list[str]:
    query = found_in(r"Query: (.*)", said)
    wanted = set(re.findall(r"\w+", query))
    grades = []
    for name, told in re.findall(r"\[ID: (\d+)\] \w+ (.*)\.", said):
        assert re.sub(r"\w+", "", told) == re.sub(r"\w+", "", query)
        parts = zip(re.split(r", | and ", told), re.split(r", | and ", query))
        grades.append((-sum(a == b for a, b in parts), name))
    assert wanted
    return [name for grade, name in sorted(grades, key=lambda pair: pair[0]) if grade]


def solve_sum(said: str) -> list[str]:
    told, thing = re.findall(r"Question: (.*) How many boxes of (\w+) are there\?", said)[-1]
    number = int(found_in(rf"has (\d+) boxes of {thing}\.", told))
    worked = []
    for step in re.split(r"(?<=\.) ", told)[1:]:
        n = int("".join(re.findall(r"\d+", step)) or 0)
        for pattern, sign, made in (
            (r"gets|buys|finds", f"+ {n}", number + n),
            (r"gives|loses|sells", f"- {n}", number - n),
            (r"doubles|twice", "* 2", number * 2),
            (r"triples|three times", "* 3", number * 3),
            (r"half", "/ 2", number / 2),
        ):
            if re.search(pattern, step):
                worked.append(f"{number} {sign} = {int(made)}.")
                assert 0 <= made < 100
                assert made == int(made)
                number = int(made)
                break
        else:
            raise AssertionError(step)
    return [" ".join(worked) + f"\n#### {number}"]


def solve_dialogue(said: str) -> list[str]:
    told = dict(re.findall(r"[Mm]y ([a-z ]+) is (\w+)\.", said))
    asked = re.findall(r"my ([a-z ]+?)(?: again)?\?", said)
    return [told[kind] for kind in asked]


def solve_pairs(said: str) -> list[str]:
    seen: dict[str, str] = {}
    found: list[str] = []
    for key, value in re.findall(r"(\w+) -> (\w+)", said):
        if key in seen:
            found.append(seen[key])
        seen[key] = seen.get(key, value)
    return found


def solve_json(said: str) -> list[str]:
    values = json.loads(found_in(r"(\{.*\})", said))
    return [str(values[key]) for key in re.findall(r'The value of "(\w+)"', said)]


SOLVE: dict[str, Callable[[str], list[str]]] = {
    "niah": solve_needles,
    "needles": solve_needles,
    "tracking": solve_chains,
    "chains": solve_chains,
    "cwe": solve_common,
    "fwe": solve_frequent,
    "stories": solve_story,
    "labels": solve_labels,
    "rerank": solve_ranking,
    "arithmetic": solve_sum,
    "dialogue": solve_dialogue,
    "associations": solve_json,
}
