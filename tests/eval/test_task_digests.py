"""Samples of every task, of evaluation and of training, are byte for byte those of the recorded digests."""

from __future__ import annotations

import json

import pytest
import task_digests
from task_digests import COUNTS, FILE, LENGTHS, TEXTS, WORLDS

KNOWN = json.loads(FILE.read_text())


def check(world: str, kind: str, count: int, lengths: tuple[int, ...]) -> None:
    folder = task_digests.pack()
    if kind == "pack" and (folder is None or task_digests.fingerprint(folder) != KNOWN["pack"]):
        pytest.skip("the digests' data pack is not there: set KVJAX_DATA to its folder")
    of, names = WORLDS[world]
    at = COUNTS.index(count)
    for name in names:
        for length in lengths:
            known = KNOWN[world][kind][name][str(length)][at]
            assert of(name, kind, length, count) == known, (name, length)


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("world", WORLDS)
def test_the_first_samples_of_every_task_are_as_recorded(world, kind):
    check(world, kind, COUNTS[0], (1024,))


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("world", WORLDS)
def test_a_hundred_samples_of_every_task_and_length_are_as_recorded(world, kind, length):
    check(world, kind, COUNTS[1], (length,))


@pytest.mark.parametrize("name", KNOWN["texts"])
def test_texts_for_a_tokenizer_are_as_recorded(name):
    assert [task_digests.of_texts(name, count) for count in COUNTS] == KNOWN["texts"][name]


def test_every_task_has_a_digest():
    for world, (_, names) in WORLDS.items():
        assert all(set(KNOWN[world][kind]) == set(names) for kind in TEXTS)
