"""Rows for models that chat: what a user asks and an assistant answers, in the model's chat template.

  HEAD  text FACT text FACT text QUESTION  MIDDLE  ANSWER  BETWEEN  QUESTION  MIDDLE  ANSWER ...

A row has exactly as many tokens as it is asked for. Kinds:

  facts      sentences of our own templates in a book; one to four of them are asked for
  stories    bAbI's training questions 1, 2, 4 and 5: the facts in a book, in order
  labels     messages with their intents (banking77, clinc150, training splits) and one to be labelled
  problems   GSM8K's training problems, one solved after the other
  books      books and speeches: the user gives a part, the assistant goes on with it

Every 20th example, the held-out books and the held-out words are for checks alone. A kind whose files are not
there is left out. A model without a template gets the words with line breaks between them.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.eval.tasks.babilong import FILES, parsed
from kvjax.eval.tasks.labels import banking, by_intent
from train import rows, text
from train.config import require
from train.rows import ANSWER, HAYSTACK, TAIL, TEXT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvjax.text import Text

HELD = 20
"""Every 20th example is held out for checks."""

LEAST = 32
"""Fewest tokens of text before a question."""

Row = tuple[np.ndarray, np.ndarray]
"""(ids int32 [N], loss weight of each id float32 [N]); answers have ``train.rows.ANSWER``."""

Example = tuple[list[str], str, str]
"""(facts, question, answer)."""

FACTS = (
    ("The locker of {name} opens with the code {number}.", "Which code opens the locker of {name}?"),
    ("The parcel for {name} has the number {number}.", "What is the number of the parcel for {name}?"),
    ("The train to {name} leaves from track {small}.", "From which track does the train to {name} leave?"),
    ("{name} ordered {small} boxes of candles.", "How many boxes of candles did {name} order?"),
    ("{name} hid the spare key under the {word}.", "Under what did {name} hide the spare key?"),
    ("The password that {name} chose is {word}.", "Which password did {name} choose?"),
    ("The ship {name} carries a cargo of {word}.", "What cargo does the ship {name} carry?"),
    ("{name} works for a company called {other}.", "For which company does {name} work?"),
)  # fmt: skip
"""(statement, question); ``name`` is the key, the other one the value."""

ONE_WORD = " Answer with one word."
GO_ON = "Here is a part of a book. Go on with it.\n\n"
LABEL = "Here are messages with their labels.\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """What the template writes before the first words, between question and answer, before the next one."""

    head: list[int]
    middle: list[int]
    between: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Material:
    """What the rows of one split are made of.

    Attributes:
      turns: of the template.
      source: text of books and speeches, key words, and the tokenizer.
      stories, problems: examples; problems have no facts.
      labelled: (message, intent) pairs of each set.
    """

    turns: Turns
    source: rows.Source
    stories: Sequence[Example] = ()
    problems: Sequence[Example] = ()
    labelled: Sequence[Sequence[tuple[str, str]]] = ()

    def has(self, kind: str) -> bool:
        needed: dict[str, Sequence[Any]] = {"stories": self.stories, "labels": self.labelled}
        return bool(needed.get(kind, self.problems if kind == "problems" else (1,)))


def turns(model_text: Text) -> Turns:
    """The turns of a model's template.

    Raises:
      ValueError: a template that fails.
    """
    marks = ["FIRST-QUESTION", "FIRST-ANSWER", "SECOND-QUESTION", "SECOND-ANSWER"]
    roles = ("user", "assistant") * 2
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks)]
    shown = model_text.render(messages, add_generation_prompt=False, continue_final_message=True)
    head, middle, between, _, _ = re.split("|".join(marks), shown)
    return Turns(
        head=model_text.encode(head, bos=model_text.template is None),
        middle=model_text.encode(middle, bos=False),
        between=model_text.encode(between, bos=False),
    )


def material(model_text: Text, cache: Path | None, *, seed: int) -> tuple[Material, Material]:
    """What training rows and rows of checks are made of."""
    folder = text.data_folder()
    train, _, held = rows.sources(
        text.corpus(folder, seed=seed), without_special_tokens(model_text.tokenizer), cache
    )
    examples = {name: read(folder) for name, read in READ.items()} if folder else {}
    labelled = _labelled(folder) if folder else []
    both = []
    for source, is_held in ((train, False), (held, True)):
        own = {
            name: [x for i, x in enumerate(every) if (i % HELD == 0) == is_held]
            for name, every in examples.items()
        }
        pairs = [[x for i, x in enumerate(each) if (i % HELD == 0) == is_held] for each in labelled]
        both.append(Material(turns=turns(model_text), source=source, labelled=pairs, **own))
    return both[0], both[1]


def without_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that adds no special tokens: rows are joined of many pieces."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | {"post_processor": None}))


def _unpacked(folder: Path, name: str) -> str:
    file = folder / name
    return gzip.decompress(file.read_bytes()).decode() if file.is_file() else ""


def _stories(folder: Path) -> list[Example]:
    files = (_unpacked(folder, f"babi/en-10k/{FILES[kind]}_train.txt.gz") for kind in (1, 2, 4, 5))
    return [story for file in files for story in parsed(file) if len(story[0]) <= 32]


def _problems(folder: Path) -> list[Example]:
    solved = [json.loads(line) for line in _unpacked(folder, "gsm8k/train.jsonl.gz").splitlines() if line]
    clean = [(row["question"], re.sub(r"<<[^>]*>>", "", row["answer"])) for row in solved]
    return [([], question, answer.replace("####", "The answer is")) for question, answer in clean]


READ: dict[str, Callable[[Path], list[Example]]] = {"stories": _stories, "problems": _problems}


def _labelled(folder: Path) -> list[list[tuple[str, str]]]:
    """Without the intents that evaluation asks for."""
    sets = []
    if bank := _unpacked(folder, "icl/banking77_train.csv.gz"):
        sets.append(banking(bank.encode()))
    if clinc := _unpacked(folder, "icl/clinc150_full.json.gz"):
        sets.append([(message, intent) for message, intent in json.loads(clinc)["train"]])
    kept = (by_intent(pairs, held_out=False) for pairs in sets)
    return [[(x, intent) for intent, messages in each.items() for x in messages] for each in kept]


# --- kinds ---------------------------------------------------------------------------------------


def _asked(
    rng: np.random.Generator, own: Material, length: int, body: _Body, exchanges: _Exchanges
) -> Row | None:
    """HEAD, a body that fills the row, and exchanges; None where the body has no room."""
    encode, turn = own.source.encode, own.turns
    parts: list[tuple[list[int], float]] = []
    for n, (question, answer) in enumerate(exchanges):
        ask = encode(("" if n else "\n\n") + question)
        parts += [(turn.between if n else [], TAIL), (ask + turn.middle, TAIL), (encode(answer), ANSWER)]
    room = length - len(turn.head) - sum(len(ids) for ids, _ in parts)
    filled = body(rng, room) if room >= LEAST else None
    if filled is None:
        return None
    ids = [np.asarray(turn.head, np.int32), filled, *(np.asarray(part, np.int32) for part, _ in parts)]
    weights = [TAIL, HAYSTACK, *(weight for _, weight in parts)]
    weight = np.concatenate([np.full(len(part), w, np.float32) for part, w in zip(ids, weights)])
    return np.concatenate(ids).astype(np.int32), weight


_Body = Callable[[np.random.Generator, int], "np.ndarray | None"]
_Exchanges = Sequence[tuple[str, str]]


def _in_a_book(own: Material, sentences: Sequence[str]) -> _Body:
    """Text that begins with a sentence, and the sentences in their order at ends of others."""

    def body(rng: np.random.Generator, room: int) -> np.ndarray | None:
        source, pieces = own.source, [own.source.encode(" " + sentence) for sentence in sentences]
        left = room - sum(map(len, pieces))
        starts = source.ends[source.ends + left <= len(source.text)] if left >= LEAST else ()
        if not len(starts):
            return None
        start = int(starts[int(rng.integers(len(starts)))])
        shown = source.text[start : start + left]
        ends = np.flatnonzero(source.is_end[shown]) + 1
        cuts = np.sort(rng.choice(ends if len(ends) else np.asarray([left]), len(pieces)))
        at = np.repeat(cuts, np.asarray([len(piece) for piece in pieces], int))
        return np.insert(shown, at, [token for piece in pieces for token in piece])

    return body


def facts(rng: np.random.Generator, own: Material, length: int) -> Row | None:
    """Facts in a book."""
    count = int(rng.integers(1, 9 if length >= 512 else 3))
    asked = int(rng.integers(1, min(count, 4) + 1))
    same = rng.random() < 0.5
    first = int(rng.integers(len(FACTS)))
    sentences, questions = [], []
    for _ in range(count):
        statement, question = FACTS[first if same else int(rng.integers(len(FACTS)))]
        given = {
            "name": own.source.word(rng).capitalize(),
            "other": own.source.word(rng).capitalize(),
            "word": own.source.word(rng),
            "number": "".join(map(str, rng.integers(0, 10, 5))),
            "small": str(int(rng.integers(2, 60))),
        }
        sentences.append(statement.format(**given))
        questions.append(question.format(**given))
    order = rng.permutation(count)
    exchanges = [(questions[i], sentences[i]) for i in order[:asked]]
    shuffled = [sentences[i] for i in rng.permutation(count)]
    return _asked(rng, own, length, _in_a_book(own, shuffled), exchanges)


def stories(rng: np.random.Generator, own: Material, length: int) -> Row | None:
    """The facts of a story in a book."""
    told, question, answer = own.stories[int(rng.integers(len(own.stories)))]
    return _asked(rng, own, length, _in_a_book(own, told), [(question + ONE_WORD, answer.capitalize())])


def labels(rng: np.random.Generator, own: Material, length: int) -> Row | None:
    """As many labelled messages of a few intents as fit, and one to be labelled."""
    pairs = own.labelled[int(rng.integers(len(own.labelled)))]
    intents = rng.permutation(sorted({intent for _, intent in pairs}))
    for count in (8, 32, len(intents)):
        chosen = set(intents[:count].tolist())
        shown = [pair for pair in pairs if pair[1] in chosen]
        (message, intent), *others = (shown[i] for i in rng.permutation(len(shown)))
        question = f"Which label fits this message? {message.strip()}"
        answer = [(question, intent.replace("_", " "))]
        if (row := _asked(rng, own, length, _labelled_messages(own, others), answer)) is not None:
            return row
    return None


def _labelled_messages(own: Material, pairs: Sequence[tuple[str, str]]) -> _Body:
    """The last of these messages that fit."""

    def body(_: np.random.Generator, room: int) -> np.ndarray | None:
        lines = "".join(f"\n{message.strip()} Label: {label.replace('_', ' ')}" for message, label in pairs)
        head, ids = own.source.encode(LABEL), own.source.encode(lines)
        if len(head) + len(ids) < room:
            return None
        return np.asarray(head + ids[len(head) + len(ids) - room :], np.int32)

    return body


def problems(rng: np.random.Generator, own: Material, length: int) -> Row | None:
    """Solved problems, until the row is full."""
    encode, turn = own.source.encode, own.turns
    parts: list[tuple[list[int], float]] = [(turn.head, TAIL)]
    while sum(len(ids) for ids, _ in parts) < length:
        _, question, answer = own.problems[int(rng.integers(len(own.problems)))]
        parts += [(encode(question), TEXT), (turn.middle, TAIL), (encode(answer), TEXT), (turn.between, TAIL)]
    ids = np.concatenate([np.asarray(part, np.int32) for part, _ in parts])[:length]
    return ids, np.concatenate([np.full(len(part), w, np.float32) for part, w in parts])[:length]


def books(rng: np.random.Generator, own: Material, length: int) -> Row | None:
    """Text, of which the assistant writes the second part."""
    head = own.turns.head + own.source.encode(GO_ON)
    room = length - len(head) - len(own.turns.middle)
    body = _in_a_book(own, [])(rng, room) if room >= LEAST else None
    if body is None:
        return None
    cut = int(rng.integers(room // 4, 3 * room // 4))
    ids = np.concatenate([head, body[:cut], own.turns.middle, body[cut:]]).astype(np.int32)
    return ids, np.full(length, TEXT, np.float32)


KINDS: dict[str, Callable[[np.random.Generator, Material, int], Row | None]] = {
    "facts": facts,
    "stories": stories,
    "labels": labels,
    "problems": problems,
    "books": books,
}


def shares(mix: Mapping[str, float], own: Material, key: str) -> dict[str, float]:
    """The kinds of a config's mix whose files are there.

    Raises:
      ConfigError: unknown kinds, or none of these.
    """
    require(bool(mix) and set(mix) <= set(KINDS), key, mix, f"names others than {', '.join(KINDS)}.")
    there = {kind: float(share) for kind, share in mix.items() if own.has(kind)}
    require(bool(there), key, mix, "needs files of KVJAX_DATA, which are not there. Add facts or books.")
    if absent := mix.keys() - there.keys():
        print(f"no files for rows of {', '.join(sorted(absent))}: they are left out", file=sys.stderr)
    return there


def draw(
    rng: np.random.Generator, own: Material, length: int, mix: Mapping[str, float]
) -> tuple[str, np.ndarray, np.ndarray]:
    """(kind, ids, weights) of a row.

    Raises:
      ConfigError: too few tokens for any row.
    """
    chances = np.asarray(list(mix.values()))
    kind = list(mix)[int(rng.choice(len(chances), p=chances / chances.sum()))]
    for name in (kind, kind, kind, "books"):
        if (row := KINDS[name](rng, own, length)) is not None:
            return name, *row
    require(False, "lengths", length, "is too short for a row in the chat template. Give more tokens.")
    raise AssertionError
