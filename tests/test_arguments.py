"""What parts take and what they need, checked when they are built: one checker for all of them."""

from __future__ import annotations

import dataclasses
import math

import pytest

from kvjax import catalogue, policy
from kvjax.algebra import Admission, Eviction, Number, Policy, PolicyError, Switch, Whole
from kvjax.budgets.uniform import Uniform

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


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=IDS)
def test_every_number_has_a_bound(kind, name):
    argument = kind.arguments[name]
    if isinstance(argument, Switch):
        return
    largest = {Whole: "most", Number: "high"}.get(type(argument))
    if largest:
        bound = getattr(argument, largest)
        assert argument.accepts(bound) or "high" in getattr(argument, "open", "")
        with pytest.raises(PolicyError):
            argument.check("call", name, bound + 1)
    for wrong in (10**30, -(10**30), math.nan, -math.inf, 1e999):
        with pytest.raises(PolicyError, match="Give|Write"):
            kind(**{name: wrong})


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
