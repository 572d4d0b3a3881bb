"""What values an argument of a part takes; one checker for all parts, so that ``snapkv(True)`` is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from kvjax.algebra._errors import PolicyError


class Argument:
    """What one argument of a part may be. Subclasses say which values and how to write them.

    Attributes (fields, where a subclass wants them settable):
      what: what a good value is, for messages: "number of tokens".
      optional: None is a value, too.
    """

    what: str = "value"
    optional: bool = False

    def accepts(self, value: Any) -> bool:
        """Is this a good value?"""
        raise NotImplementedError

    @property
    def way_out(self) -> str:
        """What to write instead, after "Give"."""
        raise NotImplementedError

    def leaf(self, value: Any) -> Any:
        """The value as a program is given it, where the argument is a dial."""
        return value

    def check(self, call: object, name: str, value: Any) -> None:
        """Refuse a bad value of what prints as ``call``.

        Raises:
          PolicyError: naming the call, the argument and what it takes.
        """
        if self.optional and value is None or self.accepts(value):
            return
        leave = ", or leave it out" if self.optional else ""
        raise PolicyError(f"{call}: {name}={value!r} is no {self.what}. Give {self.way_out}{leave}.")


@dataclasses.dataclass(frozen=True)
class Whole(Argument):
    """A whole number of at least ``least`` and at most ``most``."""

    least: int = 0
    what: str = "number of tokens"
    most: int | None = None
    optional: bool = False

    def accepts(self, value: Any) -> bool:
        """Not a bool, not a float."""
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        return value >= self.least and (self.most is None or value <= self.most)

    @property
    def way_out(self) -> str:
        """The range."""
        most = " or more" if self.most is None else f" to {self.most}"
        return f"a whole number, {self.least}{most}"


@dataclasses.dataclass(frozen=True)
class Number(Argument):
    """A finite number between ``low`` and ``high``, an end included unless it is ``open``."""

    low: float = 0.0
    high: float = math.inf
    what: str = "share"
    open: str = ""

    def accepts(self, value: Any) -> bool:
        """Not a bool, not infinite, not NaN."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        over = value > self.low if "low" in self.open else value >= self.low
        return over and (value < self.high if "high" in self.open else value <= self.high)

    def leaf(self, value: Any) -> float:
        """1 and 1.0 are one number, and run one program."""
        return float(value)

    @property
    def way_out(self) -> str:
        """The range."""
        low = f"above {self.low:g}" if "low" in self.open else f"{self.low:g} or more"
        if self.high == math.inf:
            return f"a number {low}"
        if not self.open:
            return f"a number from {self.low:g} to {self.high:g}"
        high = f"below {self.high:g}" if "high" in self.open else f"at most {self.high:g}"
        return f"a number {low} and {high}"


@dataclasses.dataclass(frozen=True)
class Switch(Argument):
    """True or False."""

    what: str = "switch"

    def accepts(self, value: Any) -> bool:
        """A bool alone."""
        return isinstance(value, bool)

    @property
    def way_out(self) -> str:
        """Both."""
        return "True or False"
