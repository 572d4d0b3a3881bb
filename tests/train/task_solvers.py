"""One solver a task: from the text of a training row to its answers, in order, by the text alone."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Callable

from train.embedded.tasks import labels


def found_in(pattern: str, text: str) -> str:
    """The group of the first match."""
    match = re.search(pattern, text)
    assert match is not None, pattern
    return match[1]


def solve_needles(text: str) -> list[str]:
    hidden = collections.defaultdict(list)
    for key, value in re.findall(r"One of the special magic \w+ for (\S+) is: (\w+)\.", text):
        hidden[key].append(value)
    wanted = re.findall(r"What (?:is|are all) the special magic \w+ for (.+?) mentioned", text)
    return [value for keys in wanted for key in re.split(r", and |, ", keys) for value in hidden[key]]


def solve_chains(text: str) -> list[str]:
    answers = []
    for number in re.findall(r"Question: .* value (\d+)", text):
        names = []
        for name, value in re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", text):
            if value == number or value in names:
                names.append(name)
        answers.append(" ".join(names))
    return answers


def solve_common(text: str) -> list[str]:
    answers = []
    for listed, count in re.findall(r"than the others\.\n(.*)\nQuestion: What are the (\d+)", text):
        items = [item.split()[1] for item in re.split(r" (?=\d+\. )", listed)]
        ranked = collections.Counter(items).most_common()
        k = int(count)
        assert ranked[k - 1][1] > ranked[k][1]
        answers += sorted((word for word, _ in ranked[:k]), key=items.index)
    return answers


def solve_frequent(text: str) -> list[str]:
    coded = found_in(r"Ignore the dots\.\n(.*)\nQuestion", text).split()
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


def solve_story(text: str, questions: list[str] | None = None) -> list[str]:
    """Replays the facts, each of which must be possible; rooms of a thing are its holder's."""
    at: dict[str, str] = {}
    held: dict[str, str | None] = {}
    been: dict[str, list[str]] = collections.defaultdict(list)
    gifts: list[tuple[str, str, str]] = []
    way: dict[tuple[str, str], str] = {}
    for fact in FACT.findall(text):
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
            gifts.insert(0, (giver, gift, receiver))
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
            return next(g[1] for g in gifts if (g[0], g[2]) == m.groups())
        if m := re.fullmatch(rf"Who gave {THING} to {WHO}\?", question):
            return next(g[0] for g in gifts if g[1:] == m.groups())
        if m := re.fullmatch(rf"Who did {WHO} give {THING} to\?", question):
            return next(g[2] for g in gifts if g[:2] == m.groups())
        if m := re.fullmatch(rf"Who (gave|received) {THING}\?", question):
            return next(g[0 if m[1] == "gave" else 2] for g in gifts if g[1] == m[2])
        raise AssertionError(question)

    wanted = re.findall(r"Question: (.*)\nAnswer:", text) if questions is None else questions
    return [answer(question) for question in wanted]


def solve_labels(text: str) -> list[str]:
    """A word that stands in an earlier text, too, tells the label."""
    seen: dict[str, str] = {}
    answers: list[str] = []
    for shown, label in re.findall(r"text: (.*)\nlabel: (\w)", text):
        key_words = set(re.findall(r"\w+", shown.lower())) - labels.TEMPLATE_WORDS
        known = [seen[word] for word in key_words if word in seen]
        answers += known
        seen |= dict.fromkeys(key_words, label)
    return answers


def solve_ranking(text: str) -> list[str]:
    query = found_in(r"Query: (.*)", text)
    wanted = set(re.findall(r"\w+", query))
    grades = []
    for name, passage in re.findall(r"\[ID: (\d+)\] \w+ (.*)\.", text):
        assert re.sub(r"\w+", "", passage) == re.sub(r"\w+", "", query)
        parts = zip(re.split(r", | and ", passage), re.split(r", | and ", query))
        grades.append((-sum(a == b for a, b in parts), name))
    assert wanted
    return [name for grade, name in sorted(grades, key=lambda pair: pair[0]) if grade]


def solve_sum(text: str) -> list[str]:
    puzzle, thing = re.findall(r"Question: (.*) How many boxes of (\w+) are there\?", text)[-1]
    number = int(found_in(rf"has (\d+) boxes of {thing}\.", puzzle))
    worked = []
    for step in re.split(r"(?<=\.) ", puzzle)[1:]:
        n = int("".join(re.findall(r"\d+", step)) or 0)
        for pattern, sign, result in (
            (r"gets|buys|finds", f"+ {n}", number + n),
            (r"gives|loses|sells", f"- {n}", number - n),
            (r"doubles|twice", "* 2", number * 2),
            (r"triples|three times", "* 3", number * 3),
            (r"half", "/ 2", number / 2),
        ):
            if re.search(pattern, step):
                worked.append(f"{number} {sign} = {int(result)}.")
                assert 0 <= result < 100
                assert result == int(result)
                number = int(result)
                break
        else:
            raise AssertionError(step)
    return [" ".join(worked) + f"\n#### {number}"]


def solve_dialogue(text: str) -> list[str]:
    facts = dict(re.findall(r"[Mm]y ([a-z ]+) is (\w+)\.", text))
    wanted = re.findall(r"my ([a-z ]+?)(?: again)?\?", text)
    return [facts[kind] for kind in wanted]


def solve_pairs(text: str) -> list[str]:
    seen: dict[str, str] = {}
    answers: list[str] = []
    for key, value in re.findall(r"(\w+) -> (\w+)", text):
        if key in seen:
            answers.append(seen[key])
        seen[key] = seen.get(key, value)
    return answers


def solve_json(text: str) -> list[str]:
    values = json.loads(found_in(r"(\{.*\})", text))
    return [str(values[key]) for key in re.findall(r'The value of "(\w+)"', text)]


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
