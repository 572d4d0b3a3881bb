"""Families and descriptions of policies: what is left open, what is kept, of budgets in new files too."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kvjax import catalogue, policy
from kvjax.algebra import Budget, Policy
from kvjax.catalogue import describe, family, opened


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("full", ["full"]),
        ("window(…) + sinks(4)", ["window(9) + sinks(4)", "window(130) + sinks(4)"]),
        ("duo(…, window=…) + sinks(4)", ["duo(0.25) + sinks(4)", "duo(0.5, window=64) + sinks(4)"]),
        ("write_gate(0.1, window=32)", ["write_gate(0.1, window=32)"]),
        ("quest(…, dense=0)", ["quest(4, dense=0)", "quest(8, dense=0)"]),
        ("snapkv(32) + int8(16) + uniform(…)", [f"snapkv + uniform({n}) + int8(16)" for n in (0.25, 64)]),
        ("snapkv(16) + ada(…)", ["snapkv(16) + ada(64)", "snapkv(16) + ada('8MiB')"]),
        ("snapkv(32) + ada(…, floor=0.5)", ["snapkv + ada(64, floor=0.5)"]),
        ("snapkv(32) + pyramid(…)", ["snapkv + pyramid(64)"]),
        (
            "conf_kv(0.75) + confidence(…, loose=…, slope=1.5)",
            ["conf_kv + confidence(128, 256, slope=1.5)", "conf_kv + confidence(slope=1.5)"],
        ),
    ],
)
def test_a_family_is_the_same_method_at_other_budgets(name, members):
    assert {family(policy(member)) for member in members} == {name}


@dataclasses.dataclass(frozen=True, repr=False)
class Votes(Budget):
    """A budget in a new file that says nothing about its sizes."""

    name = "votes"
    quorum: int = 3
    mercy: float = 0.5


def test_a_budget_that_says_nothing_is_sized_by_its_first_field():
    assert family(Policy(budget=Votes(7))) == family(Policy(budget=Votes())) == "votes(…)"
    assert family(Policy(budget=Votes(mercy=0.1))) == "votes(…, mercy=0.1)"
    assert describe(Policy(budget=Votes(7)))["size"] == {"quorum": {"number": 7, "unit": "tokens"}}


def test_every_size_of_every_part_is_one_of_its_fields():
    for part in catalogue.parts().values():
        fields = {field.name for field in dataclasses.fields(part)}
        assert set(part.sizes) <= fields, part.name


@pytest.mark.parametrize("spec", ["full", "quest(4, dense=0)", "conf_kv + confidence(128, 256) + int8(32)"])
def test_a_description_is_json_and_its_policy_parses_back(spec):
    chosen = policy(spec)
    described = json.loads(json.dumps(describe(chosen)))
    assert described == describe(chosen)
    assert policy(described["policy"]) == chosen
    parts = {part["place"]: part["name"] for part in described["parts"]}
    assert parts == {p.place: p.name for p, idle in zip(chosen.parts, Policy().parts) if p != idle}


@pytest.mark.parametrize(
    ("budget", "size"),
    [
        ("uniform(64)", {"amount": {"number": 64, "unit": "tokens"}}),
        ("uniform(0.25)", {"amount": {"number": 0.25, "unit": "ratio"}}),
        ("uniform('2KiB')", {"amount": {"number": 2048, "unit": "bytes"}}),
    ],
)
def test_a_size_is_a_number_and_its_unit(budget, size):
    described = describe(policy(f"snapkv + {budget}"))
    assert described["size"] == size
    assert described["parts"][-1]["args"]["when"] == "after_prompt"


def test_any_field_can_be_left_open():
    chosen = policy("snapkv(8) + uniform(64) + sinks(4)")
    assert opened(chosen, {"eviction": ["window"], "": ["sinks"]}) == "snapkv(…) + uniform(64) + sinks(…)"
    assert opened(chosen, {"eviction": ["kernel"]}) == "snapkv(8, kernel=…) + uniform(64) + sinks(4)"
    assert repr(chosen) == "snapkv(8) + uniform(64) + sinks(4)", "the policy itself was touched"
