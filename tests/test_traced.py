"""Hyperparameters are traced: a policy with other values runs the program that is compiled already."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import decode
from kvjax.algebra import Number, Part, Policy
from kvjax.decode import _by_layer

# A preset (or a policy that shows its hyperparameters on a tiny model), and the same with other values.
NEIGHBOURS = {
    "full": "full",
    "window(16) + sinks(4)": "window(16) + sinks(3)",
    "write_gate(0.5, window=16)": "write_gate(0.495, window=16)",
    "duo(0.5, window=16) + sinks(4)": "duo(0.45, window=16) + sinks(3)",
    "random + uniform(0.5)": "random(7) + uniform(0.52)",
    "knorm + uniform(0.5)": "knorm + uniform(0.48)",
    "knorm + uniform(24, every_step)": "knorm + uniform(23, every_step)",
    "knorm + uniform('2560B')": "knorm + uniform('2496B')",
    "keydiff + uniform(0.5)": "keydiff + uniform(0.51)",
    "lagkv(8) + uniform(0.5)": "lagkv(8) + uniform(0.52)",
    "leverage(6) + uniform(0.5)": "leverage(6, seed=2) + uniform(0.52)",
    "compactor(chunk=16, sketch=6) + uniform(0.5)": "compactor(2, chunk=16, sketch=6, seed=3)"
    " + uniform(0.52)",
    "cur(8) + uniform(0.5)": "cur(8, sinks=2) + uniform(0.52)",
    "cap(ahead=16) + uniform(0.5)": "cap(3.0, ahead=16, sinks=2) + uniform(0.52)",
    "qfilter + uniform(23, every_step)": "qfilter + uniform(22, every_step)",
    "trim_kv + uniform(23, every_step)": "trim_kv + uniform(22, every_step)",
    "kvzap(-5, window=16)": "kvzap(-5.001, window=16)",
    "fast_kvzip + uniform(0.5)": "fast_kvzip(3) + uniform(0.52)",
    "fast_kvzip_gate(0.5, window=16)": "fast_kvzip_gate(0.498, window=16)",
    "h2o + uniform(0.5)": "h2o + uniform(0.52)",
    "tova + uniform(0.5)": "tova + uniform(0.52)",
    "scissorhands(8) + uniform(0.5)": "scissorhands(8) + uniform(0.52)",
    "expected_attention(16) + uniform(0.5)": "expected_attention(16, sinks=2, floor=0.01) + uniform(0.52)",
    "snapkv(8) + uniform(0.5)": "snapkv(8) + uniform(0.48)",
    "snapkv(8) + then(random) + uniform(24, every(4))": "snapkv(8) + then(random(7)) + uniform(23, every(4))",
    "tri_attention + uniform(24, every(4))": "tri_attention + uniform(23, every(4))",
    "kvzap_scores + ada(0.5)": "kvzap_scores + ada(0.49, floor=0.25)",
    "r_kv(window=4, kernel=3) + uniform(22, every(4))": "r_kv(0.2, window=4, kernel=3, similar=0.4)"
    " + uniform(21, every(4))",
    "snapkv(8) + ada(0.5)": "snapkv(8) + ada(0.49, floor=0.25)",
    "snapkv(8) + overall(0.5)": "snapkv(8) + overall(0.49, floor=0.25)",
    "snapkv(8) + lu_kv(0.5)": "snapkv(8) + lu_kv(0.49)",
    "snapkv(8) + pyramid(0.5)": "snapkv(8) + pyramid(0.495, slope=1.98)",
    "gvote(0.6, samples=2, ahead=8)": "gvote(0.61, samples=2, ahead=8, seed=5)",
    "gvote(0.6, samples=inf, ahead=8)": "gvote(0.61, samples=inf, ahead=8, sinks=3)",
    "kvp(2, recent=8) + uniform(0.5)": "kvp(3, recent=8, seed=1) + uniform(0.48)",
    "kvp(2, recent=8) + uniform(23, every_step)": "kvp(1, recent=8) + uniform(22, every_step)",
    "conf_kv(recent=8) + confidence(20, loose=31)": "conf_kv(0.4, gamma=0.9, recent=8)"
    " + confidence(19, loose=30, threshold=0.6, slope=1.01, wh=0.5, wm=0.25, wp=0.25)",
    "expected_attention(16) + critical + uniform(0.5)": "expected_attention(16, sinks=2)"
    " + critical(0.4, floor=0.01) + uniform(0.52)",
    "kvzip(20, instruction=(5, 7)) + uniform(0.5)": "kvzip(20, instruction=(5, 7)) + uniform(0.52)",
    "snapkv(8) + chunks(7) + uniform(0.5)": "snapkv(8) + chunks(7) + uniform(0.48)",
    "random + entropy_chunks(7) + uniform(0.5)": "random(7) + entropy_chunks(7) + uniform(0.52)",
    "quest(3, chunk=4, recent=8)": "quest(3, chunk=4, recent=8) + sinks(2)",
    "topk(5, sinks=2, tail=6)": "topk(5, sinks=2, tail=6) + sinks(2)",
    "magicpig(3, 12, sinks=2, tail=6)": "magicpig(3, 12, sinks=2, tail=6) + sinks(2)",
    "topk(5, sinks=2, tail=6) + phi(4)": "topk(5, sinks=2, tail=6) + sinks(2) + phi(4)",
    "int8(16)": "int8(16) + sinks(1)",
    "int4(16, hadamard=True)": "int4(16, hadamard=True) + sinks(1)",
    "fp8(16)": "fp8(16) + sinks(1)",
    "kivi(2, recent=16, group=4)": "kivi(2, recent=16, group=4) + sinks(1)",
}

PROMPT, NEW = 60, 4


def run(policy: Policy) -> None:
    """The whole way of a prompt and its answer."""
    weights = tiny.weights(policy)
    size = {"context": 96, "chunk_size": 32, "page": tiny.PAGE, "weights": weights}
    state, logits = decode.prefill(tiny.model(), policy, [tiny.prompt(PROMPT)], **size)
    list(decode.stream(tiny.model(), policy, state, logits, max_new_tokens=NEW, weights=weights))


COMPILED: list[float] = []
"""Seconds of every program that was compiled since this file was imported, small ones included."""


def _heard(event: str, duration: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(duration)


jax.monitoring.register_event_duration_secs_listener(_heard)


def compilations(run_it: Callable[[], object]) -> int:
    """Programs compiled meanwhile."""
    before = len(COMPILED)
    run_it()
    return len(COMPILED) - before


AT_ONCE = (
    "write_gate(0.5, window=16)",
    "knorm + uniform(24, every_step)",
    "conf_kv(recent=8) + confidence(20, loose=31)",
    "topk(5, sinks=2, tail=6) + phi(4)",
    "int8(16)",
)
"""A policy of each place, whose tokens are written by one program for all layers."""


@pytest.mark.parametrize(("spec", "other"), NEIGHBOURS.items())
def test_another_value_of_any_hyperparameter_compiles_nothing(spec, other, monkeypatch):
    """By one program for all layers, or (as deep models are run, in half the time) by one that they share."""
    if spec not in AT_ONCE:
        monkeypatch.setattr(_by_layer, "DEEP", 1)
    first, second = kvjax.policy(spec), kvjax.policy(other)
    run(first)
    tiny.weights(second)  # drawing them compiles: the first's may be older than the programs
    assert compilations(functools.partial(run, second)) == 0
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert (first == second) == (spec == other), "equality and repr show every hyperparameter"


@pytest.mark.slow
def test_a_structure_does_compile():
    """The counter can count."""
    run(kvjax.policy("snapkv(8) + uniform(0.5)"))
    assert compilations(functools.partial(run, kvjax.policy("snapkv(6) + uniform(0.5)"))) > 0


def test_every_preset_has_a_neighbour():
    assert set(AT_ONCE) <= set(NEIGHBOURS)
    shown = {kind for spec in NEIGHBOURS for kind in map(type, kvjax.policy(spec).chain)}
    assert {kind for spec in kvjax.PRESETS.values() for kind in map(type, kvjax.policy(spec).chain)} <= shown


def test_every_hyperparameter_is_changed():
    """A hyperparameter that no pair above changes could be compiled in without a test that sees it."""
    changed_by_part: dict[type[Part], set[str]] = {}
    for spec, other in NEIGHBOURS.items():
        for one, two in zip(kvjax.policy(spec).chain, kvjax.policy(other).chain):
            changed = {name for name in one.traced if getattr(one, name) != getattr(two, name)}
            changed_by_part.setdefault(type(one), set()).update(changed)
    left = {
        kind.name: missed
        for kind, names in changed_by_part.items()
        if (missed := set(kind.traced) - names - {"of"})
    }
    assert left == {}


def maps() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="memory maps are listed in /proc on Linux only"
)
@pytest.mark.slow
@pytest.mark.parametrize("count", [60, 200])
def test_many_budgets_leave_memory_maps_flat(count):
    """Once the size classes between the smallest and the largest budget are there."""
    budgets = np.linspace(0.3, 0.9, 2 * count)
    policies = [kvjax.policy(f"knorm + uniform({share:.4f})") for share in budgets]
    for policy in policies[:: len(policies) // 12]:
        run(policy)
    assert compilations(lambda: [run(p) for p in policies[::2]]) <= 12  # classes between those above
    before = maps()
    assert compilations(lambda: [run(p) for p in policies[1::2]]) == 0
    assert maps() - before < 50  # four programs had 678


@dataclasses.dataclass(frozen=True, repr=False)
class Sharp(Part):
    """A part with a hyperparameter and a field that is structure."""

    name = "sharp"
    place = "eviction"
    arguments = {"edge": Number(0, 1)}
    traced = ("edge",)
    edge: float = 0.5
    wide: int = 3


def test_a_part_is_a_pytree_of_its_hyperparameters():
    leaves, structure = jax.tree.flatten(Sharp(0.25))
    assert leaves == [0.25]
    assert structure == jax.tree.structure(Sharp(1))
    assert structure != jax.tree.structure(Sharp(0.25, wide=4))
    assert jax.tree.map(lambda x: x, Sharp(0.25)) == Sharp(0.25)
    assert jax.jit(lambda part: part.edge * 2 + part.wide)(Sharp(0.25)) == 3.5
    assert jax.eval_shape(lambda part: part.edge, Sharp(1)).dtype == jnp.float32  # as of 1.0


def test_a_policy_goes_into_a_program_inside_a_program():
    """Leaves that are made on the host (a limit, 32 bits of a seed) are made once, not of tracers again."""

    @jax.jit
    def inner(policy: Policy) -> jax.Array:
        return policy.eviction.seed + policy.budget.limit.number

    policy = kvjax.policy("random(3) + uniform(40)")
    assert jax.jit(inner)(policy) == 43
    lowered = jax.jit(lambda policy: policy.eviction.alpha).lower(kvjax.policy("conf-kv"))
    assert lowered.compile().in_tree is not None  # flattens a policy of shapes
