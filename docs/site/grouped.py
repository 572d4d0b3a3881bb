"""For griffe: a docstring's entry ``a, b: text`` is one for each name; lines in two columns are a list."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

from docs.site.text import listed

ENTRY = re.compile(r"^(?P<in> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=in) +.*)*)", re.MULTILINE)
SECTION = re.compile(r"^(?:Args|Attributes):\n(?:(?: .*)?\n)*(?: .*)?", re.MULTILINE)


def split(text: str) -> str:
    """The docstring with grouped entries of its arguments and attributes written out."""

    def written_out(entry: re.Match[str]) -> str:
        return "\n".join(f"{entry['in']}{name}: {entry['text']}" for name in entry["names"].split(", "))

    return SECTION.sub(lambda section: ENTRY.sub(written_out, section[0]), text)


class Grouped(Extension):
    """Applied to every object that has a docstring."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = listed(split(obj.docstring.value))
