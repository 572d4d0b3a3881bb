"""What parts take and what they need, checked when they are built: one checker for all of them."""

from __future__ import annotations

import dataclasses
import math
import types
from pathlib import Path
from typing import Any

import jax
import pytest
import tiny

import kvjax
from kvjax import catalogue, policy
from kvjax.algebra import (
    MOST,
    Admission,
    Argument,
    Every,
    Eviction,
    Held,
    KeepRecent,
    Native,
    Number,
    Policy,
    PolicyError,
    Ranking,
    SelectAll,
    Switch,
    Whole,
)
from kvjax.budgets.amount import OfPrompt, Size, Time
from kvjax.budgets.gvote import Whose
from kvjax.budgets.uniform import Uniform
from kvjax.cache import pool
from kvjax.decode import RequestError, _prefill
from kvjax.policies import magicpig
from kvjax.policies.critical import Critical
from kvjax.policies.draft import Draft, Drafting
from kvjax.policies.knorm import KNorm
from kvjax.policies.kvzip import Instruction
from kvjax.policies.topk import FINEST, Retrieved, TopK
from kvjax.storage.host import Coding, HeldStorage, Host
from kvjax.storage.int8 import Int8
from kvjax.storage.kivi import Bits

PARTS = sorted(catalogue.parts().values(), key=lambda kind: kind.name)
FIELDS = [(kind, field.name) for kind in PARTS for field in dataclasses.fields(kind)]
IDS = [f"{kind.name}.{name}" for kind, name in FIELDS]


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=IDS)
def test_every_field_of_every_part_says_what_it_takes(kind, name):
    assert name in kind.arguments


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=IDS)
def test_a_bool_is_no_number_and_a_number_no_switch(kind, name):
    wrong = 1 if isinstance(kind.arguments[name], Switch) else True
    with pytest.raises(PolicyError) as refused:
        kind(**{name: wrong})
    message = str(refused.value)
    assert message.startswith(f"{kind.name}(")
    assert repr(wrong) in message
    assert "Give " in message


def bounds(argument: Argument) -> tuple[list[Any], list[Any]]:
    """The outermost values that an argument takes, and those right beyond them."""
    if isinstance(argument, Switch):
        return [False, True], [2]
    if isinstance(argument, Whole):
        return [argument.least, argument.most], [argument.least - 1, argument.most + 1]
    if isinstance(argument, Number):
        ends = {"low": (argument.low, -math.inf), "high": (argument.high, math.inf)}
        good = [math.nextafter(at, -out) if end in argument.open else at for end, (at, out) in ends.items()]
        return good, [
            at if end in argument.open else math.nextafter(at, out) for end, (at, out) in ends.items()
        ]
    return {
        Size: (
            [1, MOST, 5e-324, 1.0, f"{'9' * 15}GiB"],
            [0, MOST + 1, 0.0, 1.0000001, f"{'9' * 16}GiB", "-1B"],
        ),
        Time: ([Every(1), Every(MOST)], ["every", every_more]),
        Retrieved: ([1, MOST, 1 / FINEST, 1.0], [0, MOST + 1, 0.5 / FINEST, 1.0000001]),
        Whose: (["last", "expected"], ["first", 1]),
        OfPrompt: (["cut"], ["kept", 1]),
        Bits: ([2, 4], [1, 3, 8, 2.0, True]),
        Instruction: (["a", "a" * 200, (0,), (7,) * 200], ["", "a" * 201, (), (-1,), (True,), [5], 5]),
        Held: ([KNorm()], [KeepRecent(), 1]),
        Ranking: ([KNorm()], [KeepRecent(), Critical(of=KNorm()), 1]),
        HeldStorage: ([Native(), Int8()], [Host(), KNorm(), 1]),
        Coding: (["native", "int8", "int4"], ["int2", 1]),
        Drafting: ([TopK()], [SelectAll(), Draft(by=TopK()), KNorm(), 1]),
    }[type(argument)]


def every_more() -> Every:
    return Every(MOST + 1)


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else [1]


HUGE = (10**400, -(10**400), 10**30, -(10**30), -1e300, math.nan, math.inf, -math.inf, "9" * 400, nested(150))


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=IDS)
def test_every_argument_takes_its_bounds_and_nothing_beyond(kind, name):
    good, bad = bounds(kind.arguments[name])
    for value in good:
        kind.arguments[name].check("call", name, value)
    for value in (*bad, *HUGE):
        with pytest.raises(PolicyError, match="Give|Write|For tokens"):
            kind(**{name: value() if callable(value) else value})


DEEP = ("-" * 400 + "1", "a." * 200 + "b", "[" * 150 + "1" + "]" * 150, "(" * 400 + "1" + ")" * 400)


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=IDS)
def test_no_argument_takes_a_deep_or_huge_text(kind, name):
    if kind.idle:
        return
    for text in (*DEEP, "every(" * 99 + "1" + ")" * 99, "9" * 800, "1e999", "-1e999", "1" + "*9" * 300):
        with pytest.raises(PolicyError) as refused:
            policy(f"{kind.name}({name}={text})")
        assert len(str(refused.value)) < 6000


POSITIONS = {
    ("cap", "ahead"),
    ("compactor", "chunk"),
    ("cur", "window"),
    ("expected_attention", "ahead"),
    ("expected_attention", "newest"),
    ("gvote", "ahead"),
    ("gvote", "queries"),
    ("kvzip", "size"),
    ("lagkv", "lag"),
    ("r_kv", "kernel"),
    ("r_kv", "window"),
    ("scissorhands", "window"),
    ("snapkv", "kernel"),
    ("snapkv", "window"),
}
"""Arguments with which memory or time grow, and which mean nothing beyond a model's positions."""


def test_numbers_beyond_the_positions_of_a_model_are_refused_when_they_meet_it():
    tried, network = set(), types.SimpleNamespace(max_positions=64)
    for kind, name in FIELDS:
        if not getattr(kind.arguments[name], "by_positions", False):
            continue
        tried.add((kind.name, name))
        most = max(64, getattr(kind(), name))
        kind(**{name: most - (name == "kernel")}).check_positions(network)
        beyond = kind(**{name: most + 1})
        with pytest.raises(
            PolicyError, match=rf"{name}={most + 1} is more than the 64 positions of the model"
        ):
            beyond.check_positions(network)
    assert tried == POSITIONS


@pytest.mark.parametrize(
    "spec",
    [
        "snapkv(257) + uniform(0.25)",
        "snapkv(window=1000000) + ada(0.25)",
        "expected_attention(ahead=4096) + uniform(8)",
        "lagkv(1000000) + uniform(8)",
        "gvote(0.5, ahead=4096)",
    ],
)
def test_a_policy_beyond_the_positions_is_refused_before_anything_runs(spec, monkeypatch):
    monkeypatch.setattr(jax, "jit", None)
    monkeypatch.setattr(_prefill, "read_layers", None)
    for call in (kvjax.prefill, kvjax.generate):
        with pytest.raises(PolicyError, match="is more than the 256 positions of the model. Give at most"):
            call(tiny.model(), spec, [tiny.prompt(20)])


@pytest.mark.parametrize("size", [{"chunk_size": 257}, {"chunk_size": 0}, {"page": 257}, {"page": 0}])
def test_chunks_and_pages_beyond_the_positions_are_refused(size):
    with pytest.raises(RequestError, match=r"prefill\(.*\) is out of range: .* 256 positions. Give 1 to 256"):
        kvjax.prefill(tiny.model(), "full", [tiny.prompt(20)], **size)


def test_what_is_kept_by_a_value_of_somebody_else_is_bounded():
    for seed in range(9):
        magicpig._directions(seed, 4, 2, 2)
    assert magicpig._directions.cache_info().currsize == magicpig._directions.cache_info().maxsize == 4
    before = dict(pool._FAMILIAR)
    try:
        for number in range(2 * pool.MOST_FAMILIAR):
            pool.familiar(("test", number), [3, 5])
            pool.familiar("one", [3 + number * 100, 5])
        assert len(pool._FAMILIAR) == pool.MOST_FAMILIAR
        assert max(map(len, pool._FAMILIAR.values())) <= pool.MOST_FAMILIAR
    finally:
        pool._FAMILIAR.clear()
        pool._FAMILIAR.update(before)


ENDLESS = {"kvjax/layer/_rows.py", "kvjax/catalogue/_discovery.py", "kvjax/saving/_device_parts.py"}
"""Caches by kinds of parts, by nothing, and of one call."""


def test_no_cache_of_the_library_grows_without_end():
    root = Path(kvjax.__file__).parent
    for folder in (
        "algebra",
        "budgets",
        "cache",
        "decode",
        "engine",
        "layer",
        "policies",
        "saving",
        "storage",
    ):
        for file in sorted((root / folder).glob("*.py")):
            if "@functools.cache\n" in file.read_text():
                assert str(file.relative_to(root.parent)) in ENDLESS


@pytest.mark.parametrize("kind", PARTS, ids=lambda kind: kind.name)
def test_hyperparameters_are_fields(kind):
    assert set(kind.traced) <= {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("argument", "good", "bad"),
    [
        (Whole(1), [1, 10**9], [0, -1, 1.0, "1", None, True]),
        (Whole(0, "seed", 9), [0, 9], [10, -1]),
        (Whole(optional=True), [None, 0], [-1]),
        (Number(0, 1), [0, 1, 0.5], [-1e-9, 1.1, math.nan, math.inf, "0.5", True, None]),
        (Number(0, 1, open="low high"), [0.5], [0, 1]),
        (Number(1, what="slope"), [1, 1e6], [0.99, 1e7, math.inf]),
        (Switch(), [True, False], [0, 1, None, "True"]),
    ],
    ids=repr,
)
def test_arguments_take_what_they_say(argument, good, bad):
    for value in good:
        argument.check("call", "name", value)
    for value in bad:
        with pytest.raises(PolicyError, match=r"^call: name=.* is not a valid .*\. Give .*\.$"):
            argument.check("call", "name", value)


@pytest.mark.parametrize(
    "spec", ["snapkv(True)", "window(True)", "quest(True)", "duo(True)", "knorm + uniform(5, every(True))"]
)
def test_calls_that_used_to_build_are_refused(spec):
    with pytest.raises(PolicyError, match="True"):
        policy(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "window(" + "-" * 900 + "1)",
        "window(" + "a." * 400 + "b)",
        "window(" + "(" * 400 + "1" + ")" * 400 + ")",
        "window(1)" + " + window(1)" * 100_000,
        "knorm + uniform(1e999)",
        "snapkv + uniform(100000000000000000000)",
        f"window({'9' * 700})",
        "knorm + uniform('99999999999999999999GiB')",
        "knorm + uniform(5, every(1000000000000))",
        "magicpig(10, 1000000)",
        "snapkv(kernel=20001) + uniform(0.25)",
        "expected_attention(ahead=1000000) + uniform(0.25)",
        "sinks(10000000000)",
    ],
    ids=range(13),
)
def test_policies_of_a_hostile_client_are_refused_in_one_sentence(spec):
    with pytest.raises(PolicyError) as refused:
        policy(spec)
    assert len(str(refused.value)) < 3000


def test_what_a_part_needs_is_checked_when_the_policy_is_built():
    @dataclasses.dataclass(frozen=True, repr=False)
    class Misspelt(Eviction):
        name = "misspelt"
        needs = frozenset({"k", "kk"})

    @dataclasses.dataclass(frozen=True, repr=False)
    class Early(Admission):
        name = "early"
        needs = frozenset({"mass"})

    with pytest.raises(PolicyError, match=r"misspelt needs kk, which eviction cannot see.*k_pre"):
        Policy(eviction=Misspelt(), budget=Uniform(8))
    with pytest.raises(PolicyError, match=r"early needs mass, which admission cannot see"):
        Policy(admission=Early())
