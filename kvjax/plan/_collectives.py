"""The collective operations of a compiled program, read off its text."""

from __future__ import annotations

import collections
import dataclasses
import math
import re

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_OP = re.compile(rf"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) ({'|'.join(KINDS)})(-start)?\((.*)$")
_SHAPE = re.compile(r"\b([a-z]\w*?)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}")
_DTYPES = {
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
}
"""Bytes of what takes more than one."""


@dataclasses.dataclass(frozen=True, order=True)
class Collective:
    """A collective operation.

    Attributes:
      kind: of ``KINDS``.
      devices: how many take part together.
      nbytes: of its result on one device.
    """

    kind: str
    devices: int
    nbytes: int

    @property
    def sent(self) -> float:
        """The least bytes that one device sends, in a ring: every byte of a sum goes around twice."""
        others = (self.devices - 1) / self.devices
        return {
            "all-reduce": 2 * self.nbytes * others,
            "all-gather": self.nbytes * others,
            "reduce-scatter": self.nbytes * (self.devices - 1),
            "all-to-all": self.nbytes * others,
            "collective-permute": float(self.nbytes),
        }[self.kind]


def collectives(text: str, devices: int) -> dict[Collective, int]:
    """How often each occurs in a compiled program's text; those in the body of a loop count once.

    An operation that names no groups is among all ``devices`` of the program.
    """
    counts: collections.Counter[Collective] = collections.Counter()
    for line in text.splitlines():
        op = _OP.match(line)
        if op is None:
            continue
        result, kind, starts, rest = op.groups()
        sizes = [_nbytes(*shape) for shape in _SHAPE.findall(result)]
        if starts and kind in ("all-gather", "collective-permute"):
            sizes = [max(sizes)]  # a tuple of operand, result and flags
        one = Collective(kind, _group(rest, devices), sum(sizes))
        if one.devices > 1:
            counts[one] += 1
    return dict(counts)


def _nbytes(dtype: str, dims: str) -> int:
    return _DTYPES.get(dtype, 1) * math.prod(int(n) for n in dims.split(",") if n)


def _group(rest: str, devices: int) -> int:
    if listed := _LISTED.search(rest):
        return len(listed[1].split(","))
    if iota := _IOTA.search(rest):
        return int(iota[1])
    if named := _NAMED.search(rest):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", named[2]))
    return 2 if "source_target_pairs=" in rest else devices
