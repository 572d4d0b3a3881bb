"""What a score may cost, read off the traced programs: nothing is compiled or run here.

Methods that look at keys and values alone add no matrix product to a prompt; none holds an array of all
queries by all keys; and a method that acts once, after the prompt, leaves the decode step as it was.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
from policy_oracle import room

from kvjax import decode, layer
from kvjax.algebra import Eviction, KeepRecent, Observation, Policy, When
from kvjax.budgets.confidence import Confidence
from kvjax.budgets.uniform import Uniform
from kvjax.cache import ring as rings
from kvjax.cache.state import LayerCache
from kvjax.layer import _read, _step
from kvjax.policies.expected_attention import ExpectedAttention
from kvjax.policies.h2o import H2O
from kvjax.policies.keydiff import KeyDiff
from kvjax.policies.knorm import KNorm
from kvjax.policies.lagkv import LagKV
from kvjax.policies.random_keep import Random
from kvjax.policies.scissorhands import Scissorhands
from kvjax.policies.snapkv import SnapKV
from kvjax.policies.tova import Tova
from kvjax.types import Heads

FREE = (KeyDiff(), LagKV(16), KNorm(), Random())
PAID = (H2O(), H2O(0), Tova(), SnapKV(), Scissorhands(), ExpectedAttention())
ROWS, N, K, H = 2, 4, 2, 8


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def heads(t: int) -> Heads:
    q, k = array(ROWS, t, N, H), array(ROWS, t, K, H)
    return Heads(q=q, k=k, v=k, q_pre=q, k_pre=k, hidden=array(ROWS, t, 32))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, those of loops, branches and called functions too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def prompt_products(eviction: Eviction, t: int = 1024) -> int:
    """Matrix products in one layer's pass over a prompt."""
    return products(prompt_program(eviction, t))


def products(jaxpr: Any) -> int:
    return sum(e.primitive.name == "dot_general" for e in equations(jaxpr.jaxpr))


def prompt_program(eviction: Eviction, t: int) -> Any:
    def run(x: dict[str, Any], pos: jax.Array, total: jax.Array) -> Any:
        site = layer.LayerInfo(Policy(eviction=eviction, budget=Uniform(0.25)), {}, 0, 2, None, total)
        return layer.prompt(site, Heads(**x), pos)

    arrays = {name: x for name, x in vars(heads(t)).items() if name not in ("softcap", "rotate")}
    return jax.make_jaxpr(run)(arrays, array(ROWS, t, dtype=jnp.int32), array(ROWS, dtype=jnp.int32))


def test_scores_without_attention_add_no_product_to_a_prompt():
    plain = prompt_products(KeepRecent())
    assert plain > 0
    assert [prompt_products(eviction) for eviction in FREE] == [plain] * len(FREE)
    assert min(prompt_products(eviction) for eviction in PAID) > plain


@pytest.mark.parametrize("eviction", [*FREE, *PAID], ids=repr)
def test_no_score_holds_all_queries_by_all_keys(eviction):
    t = 16384
    line = {
        "q": array(1, 2, t, H),
        "k": array(1, 1, t, H),
        "v": array(1, 1, t, H),
        "q_pre": array(1, 2, t, H),
        "mass": array(1, 2, t),
    }

    def score(pos: jax.Array, total: jax.Array, values: dict[str, Any]) -> Any:
        return eviction.score_prompt(
            None, Observation(pos=pos, total=total, layer=0, layers=1, values=values)
        )

    jaxpr = jax.make_jaxpr(score)(array(1, t, dtype=jnp.int32), array(1, dtype=jnp.int32), line)
    largest = max(math.prod(out.aval.shape) for e in equations(jaxpr.jaxpr) for out in e.outvars)
    assert t <= largest < t * t / 8


def every_step(eviction: Eviction) -> Policy:
    return Policy(eviction=eviction, budget=Uniform(24, "every_step"), recent=8)


@pytest.mark.parametrize(
    ("policy", "asks"),
    [
        (every_step(KeepRecent()), False),
        (every_step(KNorm()), False),
        (Policy(budget=Confidence(24, 40), recent=8), False),
        (Policy(eviction=H2O(), budget=Uniform(24), recent=8), False),
        (every_step(H2O(8)), True),
        (every_step(Tova()), True),
    ],
    ids=repr,
)
def test_a_decode_step_asks_for_mass_only_where_somebody_ranks_by_it(policy, asks, monkeypatch):
    """Seen from inside, while a whole step and a whole chunk are traced."""
    requests = []
    read, query_weights = _read.ragged_decode, _step.column_mass

    def reads(*arguments: Any, mass: bool, **more: Any) -> Any:
        requests.append(mass)
        return read(*arguments, mass=mass, **more)

    def weighs(*arguments: Any, **more: Any) -> Any:
        requests.append(True)
        return query_weights(*arguments, **more)

    monkeypatch.setattr(_read, "ragged_decode", reads)
    monkeypatch.setattr(_step, "column_mass", weighs)

    def chunk(network, policy, params, weights, state, fed, count):
        run = (layer.chunk, (state.length, count))
        return decode.run_layers(network, policy, params, weights, state, fed, *run)

    state = tiny.start(policy, ROWS)
    tokens, rows = array(ROWS, dtype=jnp.int32), array(ROWS, dtype=jnp.bool)
    arguments = tiny.model().network, policy, tiny.model().params, {}
    for run, fed, count in (
        (decode.step, tokens, rows),
        (chunk, array(ROWS, 5, dtype=jnp.int32), tokens),
    ):
        requests.clear()
        jax.eval_shape(functools.partial(run, *arguments), state, fed, count)
        assert requests
        assert any(requests) == all(requests) == asks
    assert any(name.startswith("eviction.mass") for name in policy.keeps) == asks


def test_ranking_costs_nothing_where_nobody_goes_and_no_sort_where_one_goes():
    policy = every_step(KNorm())
    ring = rings.empty(ROWS, K, 8, H, jnp.dtype(jnp.float32), policy.keeps)
    cache = LayerCache(ring=ring, pages=room(ROWS, K, H, entries=4, meta=policy.keeps), summary=None)

    def run(cache: LayerCache, length: jax.Array) -> LayerCache:
        return layer.evict(layer.LayerInfo(policy, {}, 0, 1, None, length), cache, length, length > 0)

    def names(jaxpr: Any) -> Counter[str]:
        return Counter(equation.primitive.name for equation in equations(jaxpr))

    program = jax.make_jaxpr(run)(cache, array(ROWS, dtype=jnp.int32)).jaxpr
    loops = [equation for equation in program.eqns if equation.primitive.name == "while"]
    one, many = (names(loop.params["body_jaxpr"].jaxpr) for loop in loops)
    always = names(program) - one - many
    assert not {"gather", "scatter", "sort", "argmax"} & always.keys()
    assert one["argmax"] == 1
    assert not one["sort"]
    assert many["sort"]


@pytest.mark.slow
def test_one_shot_methods_share_one_decode_step():
    def program(eviction: Eviction, when: When = "after_prompt") -> str:
        policy = Policy(eviction=eviction, budget=Uniform(64, when), recent=32)
        ring = rings.empty(ROWS, K, 32, H, jnp.dtype(jnp.float32), policy.keeps)
        cache = LayerCache(ring=ring, pages=room(ROWS, K, H, entries=4, meta=policy.keeps), summary=None)

        def run(cache: LayerCache, x: dict[str, Any], length: jax.Array, active: jax.Array) -> Any:
            site = layer.LayerInfo(policy, {}, 0, 2, None, length)
            return layer.step(site, Heads(**x), cache, length, active)

        arrays = {name: x for name, x in vars(heads(1)).items() if name not in ("softcap", "rotate")}
        rows = array(ROWS, dtype=jnp.int32), array(ROWS, dtype=jnp.bool)
        return jax.jit(run).lower(cache, arrays, *rows).as_text()

    shared = program(KeepRecent())
    assert program(KNorm(), "every_step") != program(KeepRecent(), "every_step"), "kept values do not show"
    for eviction in (KNorm(), KeyDiff(), LagKV(16), H2O(32), Tova(), Scissorhands()):
        assert program(eviction) == shared, eviction
