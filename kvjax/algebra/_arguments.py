"""Which values an argument of a part takes, checked in one place: ``snapkv(True)`` is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from kvjax.algebra._errors import PolicyError

MOST = 2**30
"""The largest number of tokens that a part takes: sums of two fit into int32."""

LARGEST = 1e6
"""The largest number that is not a share: its products with scores stay finite in float32."""


class Argument:
    """The values that one argument of a part may have.

    Attributes (fields where a subclass lets users of the class set them):
      what: the meaning of a good value, for error messages: "number of tokens".
      optional: None is allowed, too.
    """

    what: str = "value"
    optional: bool = False

    def accepts(self, value: Any) -> bool:
        """Is this a good value? None is checked elsewhere."""
        raise NotImplementedError

    @property
    def expected(self) -> str:
        """What to write instead of a bad value, after "Give"."""
        raise NotImplementedError

    def leaf(self, value: Any) -> Any:
        """The value as it is passed to a program, where the argument is traced."""
        return value

    def check(self, call: object, name: str, value: Any) -> None:
        """Refuses a bad value.

        Args:
          call: what the message names as the call, for example the part.
          name: of the argument.
          value: its value.

        Raises:
          PolicyError: names the call, the argument and what it takes.
        """
        if self.optional and value is None or self.accepts(value):
            return
        omit = ", or leave it out" if self.optional else ""
        raise PolicyError(f"{call}: {name}={value!r} is not a valid {self.what}. Give {self.expected}{omit}.")


class OfPlace(Argument):
    """A part as an argument, which a string writes in parentheses: ``then(knorm)``.

    Class attributes:
      place: where such a part stands; of a word that names parts of two places, that one is meant.
    """

    place: str


@dataclasses.dataclass(frozen=True)
class Whole(Argument):
    """A whole number of at least ``least`` and at most ``most``; not a bool, not a float.

    ``most`` is small where a program's size or memory grows with the number: anybody may send a policy to a
    server. ``by_positions``: it grows so, and only numbers up to a model's positions mean something.
    """

    least: int = 0
    what: str = "number of tokens"
    most: int = MOST
    optional: bool = False
    by_positions: bool = False

    def accepts(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        return self.least <= value <= self.most

    @property
    def expected(self) -> str:
        most = f" or more, at most {MOST}" if self.most == MOST else f" to {self.most}"
        return f"a whole number, {self.least}{most}"


@dataclasses.dataclass(frozen=True)
class Number(Argument):
    """A finite number between ``low`` and ``high``, both included unless ``open`` names "low" or "high"."""

    low: float = 0.0
    high: float = LARGEST
    what: str = "share"
    open: str = ""

    def accepts(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if isinstance(value, float) and not math.isfinite(value):  # of a large int that raises
            return False
        over = value > self.low if "low" in self.open else value >= self.low
        return over and (value < self.high if "high" in self.open else value <= self.high)

    def leaf(self, value: Any) -> float:
        return float(value)  # so that 1 and 1.0 run the same program

    @property
    def expected(self) -> str:
        low = f"above {self.low:g}" if "low" in self.open else f"{self.low:g} or more"
        if not self.open:
            return f"a number from {self.low:g} to {self.high:g}"
        high = f"below {self.high:g}" if "high" in self.open else f"at most {self.high:g}"
        return f"a number {low} and {high}"


@dataclasses.dataclass(frozen=True)
class Switch(Argument):
    """True or False."""

    what: str = "switch"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)

    @property
    def expected(self) -> str:
        return "True or False"
