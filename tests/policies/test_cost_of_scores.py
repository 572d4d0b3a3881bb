"""What a score may cost, read off the traced programs: nothing is compiled or run here.

Methods that look at keys and values alone add no matrix product to a prompt; none holds an array of all
queries by all keys; and a method that acts once, after the prompt, leaves the decode step as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from policy_oracle import room

from kvjax import layer
from kvjax.budgets.uniform import Uniform
from kvjax.cache import ring as rings
from kvjax.cache.state import LayerCache
from kvjax.policies.expected_attention import ExpectedAttention
from kvjax.policies.h2o import H2O
from kvjax.policies.keydiff import KeyDiff
from kvjax.policies.knorm import KNorm
from kvjax.policies.lagkv import LagKV
from kvjax.policies.random_keep import Random
from kvjax.policies.scissorhands import Scissorhands
from kvjax.policies.snapkv import SnapKV
from kvjax.policies.tova import Tova
from kvjax.policy import Eviction, KeepRecent, Observation, Policy, When
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

    def run(x: dict[str, Any], pos: jax.Array, total: jax.Array) -> Any:
        site = layer.Site(Policy(eviction=eviction, budget=Uniform(0.25)), {}, 0, 2, None, total)
        return layer.prompt(site, Heads(**x), pos)

    given = {name: x for name, x in vars(heads(t)).items() if name not in ("softcap", "turn")}
    jaxpr = jax.make_jaxpr(run)(given, array(ROWS, t, dtype=jnp.int32), array(ROWS, dtype=jnp.int32))
    return sum(e.primitive.name == "dot_general" for e in equations(jaxpr.jaxpr))


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
    }

    def score(pos: jax.Array, total: jax.Array, values: dict[str, Any]) -> Any:
        return eviction.score_prompt(
            None, Observation(pos=pos, total=total, layer=0, layers=1, values=values)
        )

    jaxpr = jax.make_jaxpr(score)(array(1, t, dtype=jnp.int32), array(1, dtype=jnp.int32), line)
    largest = max(math.prod(out.aval.shape) for e in equations(jaxpr.jaxpr) for out in e.outvars)
    assert t <= largest < t * t / 8


def test_one_shot_methods_share_one_decode_step():
    def program(eviction: Eviction, when: When = "after_prompt") -> str:
        policy = Policy(eviction=eviction, budget=Uniform(64, when), recent=32)
        ring = rings.empty(ROWS, K, 32, H, jnp.dtype(jnp.float32), policy.keeps)
        cache = LayerCache(ring=ring, pages=room(ROWS, K, H, entries=4, meta=policy.keeps), summary=None)

        def run(cache: LayerCache, x: dict[str, Any], length: jax.Array, active: jax.Array) -> Any:
            site = layer.Site(policy, {}, 0, 2, None, length)
            return layer.step(site, cache, Heads(**x), length, active)

        given = {name: x for name, x in vars(heads(1)).items() if name not in ("softcap", "turn")}
        rows = array(ROWS, dtype=jnp.int32), array(ROWS, dtype=jnp.bool)
        return jax.jit(run).lower(cache, given, *rows).as_text()

    shared = program(KeepRecent())
    assert program(KNorm(), "every_step") != program(KeepRecent(), "every_step"), "kept values do not show"
    for eviction in (KNorm(), KeyDiff(), LagKV(16), H2O(32), Tova(), Scissorhands()):
        assert program(eviction) == shared, eviction
