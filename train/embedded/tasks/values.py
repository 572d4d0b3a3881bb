"""Values of nine types and keys of five, of which facts are made; training and evaluation share none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from kvjax.eval.tasks.words import DECIMAL, held_out_word

CAPITALS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November",
    "December",
)  # fmt: skip
LEVELS = ("INFO", "WARN", "ERROR", "DEBUG")
STATES = ("started", "stopped", "is ready", "timed out", "was moved", "lost its lease", "has no space left")
STARTS = (
    "B", "Br", "C", "D", "F", "G", "Gr", "H", "J", "K", "Kl", "L", "M", "N", "P", "R", "S", "St", "T", "Tr",
    "V", "W",
)  # fmt: skip
MIDDLES = ("a", "e", "i", "o", "u", "ai", "ea", "ou", "ar", "el", "en", "il", "on", "or", "un")
ENDS = (
    "ra", "la", "na", "do", "ko", "my", "lin", "ton", "ber", "den", "mas", "ric", "vin", "sel", "nard",
    "wick",
)  # fmt: skip
TOWNS = ("ham", "ford", "burg", "field", "port", "mouth", "stead", "wood", "bridge", "ville")


@dataclasses.dataclass(frozen=True)
class Draw:
    """A generator with the split it draws for.

    Attributes:
      rng: consumed.
      words: key words of the split.
      held: whether the split is that of evaluation.
    """

    rng: np.random.Generator
    words: Callable[[], str]
    held: bool

    def one(self, items: tuple[str, ...] | str) -> str:
        return items[int(self.rng.integers(len(items)))]

    def digits(self, count: int) -> str:
        """A string of digits, the first not nought."""
        return self.one(DECIMAL[1:]) + "".join(self.one(DECIMAL) for _ in range(count - 1))

    def in_split(self, make: Callable[[], str]) -> str:
        """The first string from ``make`` that is in this split (by the checksum that splits key words)."""
        while held_out_word(string := make()) != self.held:
            pass
        return string

    def name(self) -> str:
        """A made-up name."""
        return self.in_split(lambda: self.one(STARTS) + self.one(MIDDLES) + self.one(ENDS))


def _code(d: Draw) -> str:
    def make() -> str:
        letters = "".join(d.one(CAPITALS) for _ in range(int(d.rng.integers(1, 4))))
        return f"{letters}{d.one(('-', '', '/'))}{d.digits(int(d.rng.integers(2, 5)))}"

    return d.in_split(make)


def _price(d: Draw) -> str:
    amount = d.digits(int(d.rng.integers(1, 4)))
    if d.rng.random() < 0.5:
        return f"${amount}.{d.one(DECIMAL)}{d.one('05')}"
    return f"{amount} {d.one(('pounds', 'dollars', 'shillings', 'francs', 'euros'))}"


def _date(d: Draw) -> str:
    day, year = 1 + int(d.rng.integers(28)), 1700 + int(d.rng.integers(330))
    forms = (
        f"{day} {d.one(MONTHS)} {year}",
        f"{d.one(MONTHS)} {day}, {year}",
        f"{year}-{1 + day % 12:02}-{day:02}",
    )
    return d.one(forms)


def _log(d: Draw) -> str:
    clock = f"{int(d.rng.integers(24)):02}:{int(d.rng.integers(60)):02}"
    return f"{clock} {d.one(LEVELS)} {d.words()} {d.digits(3)} {d.one(STATES)}"


VALUES: dict[str, Callable[[Draw], str]] = {
    "number": lambda d: d.digits(int(d.rng.integers(2, 8))),
    "word": lambda d: d.words(),
    "words": lambda d: f"{d.words()} {d.words()}",
    "code": _code,
    "name": lambda d: d.name() if d.rng.random() < 0.4 else f"{d.name()} {d.name()}",
    "price": _price,
    "place": lambda d: d.name() + d.one(TOWNS),
    "date": _date,
    "log": _log,
}
"""By type."""

KEYS: dict[str, Callable[[Draw], str]] = {
    "pair": lambda d: f"{d.words()}-{d.words()}",
    "name": lambda d: f"{d.name()} {d.name()}",
    "thing": lambda d: f"the {d.words()} {d.words()}",
    "single": lambda d: d.name(),
    "code": _code,
}
KEY_SHARES = (0.35, 0.25, 0.15, 0.15, 0.1)


def keys(d: Draw, count: int) -> list[str]:
    """``count`` different keys of one kind; fewer if they run out."""
    make = KEYS[list(KEYS)[int(d.rng.choice(len(KEYS), p=KEY_SHARES))]]
    distinct: dict[str, None] = {}
    for _ in range(4 * count + 8):
        if len(distinct) < count:
            distinct[make(d)] = None
    return list(distinct)
