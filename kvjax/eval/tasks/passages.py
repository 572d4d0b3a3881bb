"""Passages of text whose last 128 tokens are fed one by one, beside the full cache on the same tokens.

All that comes before them is read and compressed. One pass gives the perplexity, the divergence from the full
cache's distribution and whether both have the same likeliest token. Passages are spread evenly over held-out
books, WikiText-2's test articles, Schema-Guided Dialogue's test dialogues and GSM8K's solved test problems.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from kvjax.eval.errors import TooLongError
from kvjax.eval.tasks.arithmetic import GSM8K
from kvjax.eval.tasks.data import Data, unwrap
from kvjax.eval.tasks.dialogue import ROLES, SGD
from kvjax.eval.tasks.maker import Maker
from kvjax.eval.tasks.perplexity import WIKITEXT
from kvjax.eval.tasks.sample import Sample, encode
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import Rng

FED = 128
"""Tokens that are fed."""

PLACES = 16
"""Passages of a text before they begin to repeat."""

BOOKS = (
    "books/heldout/dracula_345.txt.gz",
    "books/heldout/nltk_carroll_alice.txt.gz",
    "books/heldout/nltk_chesterton_thursday.txt.gz",
)


def _books(data: Data) -> str:
    if data.folder is None:
        return " ".join(data.novel())
    return "\n".join(unwrap(data.raw(name).decode(errors="ignore")) for name in BOOKS)


def _wikitext(data: Data) -> str:
    return data.raw(WIKITEXT).decode(errors="ignore")


def _dialogues(data: Data) -> str:
    return "\n\n".join("\n".join(f"{ROLES[who]}: {text}" for who, text in turns) for turns in data.lines(SGD))


def _problems(data: Data) -> str:
    shown = (f"Question: {row['question']}\nAnswer: {row['answer']}" for row in data.lines(GSM8K))
    return re.sub(r"<<[^>]*>>", "", "\n\n".join(shown))


Read = Callable[[Data], str]


@functools.cache
def _words(read: Read, data: Data) -> tuple[str, ...]:
    """Words with the white space before them."""
    return tuple(re.findall(r"\s*\S+", read(data)))


def passage(read: Read, _: Rng, maker: Maker) -> Sample:
    """The passage of this index: as many tokens as fit, up to the end of a word.

    Raises:
      TooLongError: a tokenizer that does not let a word end where one must.
    """
    words = _words(read, maker.data)
    start = maker.index % PLACES * (len(words) // PLACES)
    text = "".join(words[start : start + maker.length]).lstrip()
    offsets = maker.text.tokenizer.encode(text, add_special_tokens=False).offsets
    room = maker.length - (maker.text.bos is not None)
    for end in range(min(room, len(offsets) - 1), FED, -1):
        if not text[offsets[end - 1][1] : offsets[end][1]][:1].isspace():
            continue  # inside a word, cut text would have other tokens
        cut, last = offsets[end - FED - 1][1], offsets[end - 1][1]
        sample = Sample(context=text[:cut], answer=text[cut:last])
        encoded = encode(maker.text, sample)
        if len(encoded.answer) == FED and len(encoded.context) <= maker.length - FED:
            return sample
    raise TooLongError(f"no passage of {maker.length} tokens ends with a word. Ask for another --lengths.")


def _task(name: str, read: Read, *needs: str) -> Task:
    return Task(
        name=name,
        group="text",
        fits=256,
        make=functools.partial(passage, read),
        metric="perplexity",
        asks=False,
        needs=needs,
        compares=True,
    )


TASKS = (
    _task("text_books", _books),
    _task("text_wikitext", _wikitext, WIKITEXT),
    _task("text_dialogue", _dialogues, SGD),
    _task("text_gsm8k", _problems, GSM8K),
)
