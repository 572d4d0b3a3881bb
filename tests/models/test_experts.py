"""Experts against NumPy; what they cost, read off the compiled program."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler import compiled_in_full

from kvjax.models import decoder, experts
from kvjax.models.mxfp4 import dequantised
from kvjax.models.spec import Experts, ModelSpec

E, C, F, D = 6, 2, 24, 16
KINDS = ("swiglu", "swiglu_clipped")


def spec_of(kind: str, count: int = E) -> ModelSpec:
    return ModelSpec(
        family="gpt_oss",
        vocab_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        model_dim=D,
        mlp_dim=F,
        max_positions=64,
        mlp=kind,
        linear_bias=kind != "swiglu",
        experts=Experts(count=count, chosen=C, width=F),
    )


def drawn(spec: ModelSpec, dtype: str = "float32") -> dict:
    """Weights of a layer; large enough that the clipped activation clips."""
    rng = np.random.default_rng(3)
    names = decoder.shapes(spec)["layers"][0]
    return {
        name: jnp.asarray(rng.standard_normal(shape) * (1.5 if name == "experts_up" else 0.7), dtype)
        for name, shape in names.items()
        if name.startswith(("experts_", "router"))
    }


def tokens(rows: int, length: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(2 * np.random.default_rng(rows + length).standard_normal((rows, length, D)), dtype)


def oracle(spec: ModelSpec, p: dict, x: jax.Array) -> np.ndarray:
    """Token by token and expert by expert, in float64."""
    w = {name: np.asarray(leaf, np.float64) for name, leaf in p.items()}
    x = np.asarray(x, np.float64)
    out = np.zeros(x.shape)
    for at in np.ndindex(x.shape[:2]):
        scores = w["router"] @ x[at] + w.get("router_bias", 0)
        best = np.argsort(-scores)[:C]
        weight = np.exp(scores[best] - scores[best].max())
        for e, share in zip(best, weight / weight.sum()):
            gate, up = (
                w[f"experts_{n}"][e] @ x[at] + w.get(f"experts_{n}_bias", np.zeros(E))[e]
                for n in ("gate", "up")
            )
            if spec.mlp == "swiglu":
                inner = gate / (1 + np.exp(-gate)) * up
            else:
                gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
                inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            down = w["experts_down"][e] @ inner + w.get("experts_down_bias", np.zeros(E))[e]
            out[at] += share * down
    return out


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 1), (2, 40)])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_go_through_their_experts(kind, rows, length):
    spec = spec_of(kind)
    p, x = drawn(spec), tokens(rows, length)
    right = oracle(spec, p, x)
    made = jax.jit(functools.partial(decoder.mlp, spec))(p, x)
    np.testing.assert_allclose(made, right, atol=2e-5 * np.abs(right).max())
    in_bf16 = jax.jit(functools.partial(decoder.mlp, spec))(drawn(spec, "bfloat16"), x.astype("bfloat16"))
    rounded = oracle(spec, drawn(spec, "bfloat16"), x.astype("bfloat16"))
    np.testing.assert_allclose(in_bf16.astype("float32"), rounded, atol=0.02 * np.abs(right).max())


@pytest.mark.parametrize("kind", KINDS)
def test_groups_give_what_turns_give(kind):
    """What runs on a GPU or TPU, computed here."""
    spec, x = spec_of(kind), tokens(2, 40)
    p = {name: leaf for name, leaf in drawn(spec).items() if name.startswith("experts_")}
    rng = np.random.default_rng(0)
    expert = np.argsort(rng.random((80, E + 2)))[:, :C].ravel()  # numbers from E on belong to nobody here
    groups = experts.Groups(jnp.argsort(expert), jnp.asarray(np.bincount(expert, minlength=E)[:E], jnp.int32))
    inputs = p, x.reshape(80, D), jnp.asarray(rng.random(80 * C), jnp.float32), groups
    in_groups = jax.jit(functools.partial(experts._in_groups, kind))(*inputs)
    in_turns = jax.jit(functools.partial(experts._in_turns, kind))(*inputs)
    np.testing.assert_allclose(in_groups, in_turns, atol=1e-3)
    pull = jnp.asarray(rng.standard_normal((80, D)), jnp.float32)
    slopes = [
        jax.grad(lambda w, x, g, run=run: (run(kind, w, x, g, groups) * pull).sum(), argnums=(0, 1, 2))(
            *inputs[:3]
        )
        for run in (experts._in_groups, experts._in_turns)
    ]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-3, rtol=1e-5), *slopes)


def test_chips_get_the_compiler_s_grouped_product():
    spec = spec_of("swiglu")
    run = jax.jit(functools.partial(decoder.mlp, spec)).trace(drawn(spec), tokens(2, 1))
    for platform in ("cuda", "tpu"):
        text = run.lower(lowering_platforms=(platform,)).as_text()
        assert text.count('"chlo.ragged_dot"') == 3, platform


def test_experts_that_are_not_chosen_are_not_read():
    """Their weights are NaN, and a product with them would be, too."""
    spec = spec_of("swiglu")
    p, x = drawn(spec), tokens(3, 1)
    run = jax.jit(functools.partial(decoder.mlp, spec))
    right = run(p, x)
    scores = np.asarray(x[:, 0] @ p["router"].T)
    used = np.unique(np.argsort(-scores, axis=-1)[:, :C])
    assert len(used) < E
    unread = np.setdiff1d(np.arange(E), used)
    poisoned = {n: leaf.at[unread].set(jnp.nan) if n != "router" else leaf for n, leaf in p.items()}
    np.testing.assert_array_equal(run(poisoned, x), right)


def cost(count: int, rows: int, length: int) -> tuple[float, int]:
    """Operations of one turn, and turns; XLA counts the body of a loop once."""
    spec = spec_of("swiglu", count)
    lowered = jax.jit(functools.partial(decoder.mlp, spec)).lower(drawn(spec), tokens(rows, length))
    program = compiled_in_full(lowered)
    analysis = program.cost_analysis()
    analysis = analysis[0] if isinstance(analysis, list) else analysis
    router = 2 * count * D * rows * length
    turns = re.findall(r'"known_trip_count":{"n":"(\d+)"', program.as_text())
    return analysis["flops"] - router, max(map(int, turns), default=1)


def test_a_step_costs_what_its_experts_cost():
    one_expert = 3 * 2 * F * D
    for count in (4, 32):
        flops, turns = cost(count, 1, 1)
        assert turns == C
        assert one_expert <= flops < 2 * one_expert + 60 * count, count  # sorting counts, too


def test_a_prompt_costs_what_its_pairs_cost():
    """Sorted into turns of up to 64 tokens of one expert; each expert may have one that is not full."""
    pairs, width = 128 * C, 3 * 2 * F * D
    for count in (4, 32):
        flops, turns = cost(count, 1, 128)
        turn = min(experts.MOST, max(experts.FEWEST, pairs // count))
        assert turns == count + pairs // turn
        assert width * turn <= flops < 2 * width * turn + 20 * pairs * (count + D), count


def test_mxfp4_numbers_are_those_of_the_standard():
    """E2M1: a sign, two bits of exponent with bias 1, one of mantissa; the scale is a power of two."""

    def number(code: int) -> float:
        sign, exponent, mantissa = -1 if code & 8 else 1, (code >> 1) & 3, code & 1
        return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 3, 2, 16), dtype=np.uint8)
    scales = rng.integers(110, 140, (2, 3, 2), dtype=np.uint8)
    values = dequantised(blocks, scales)
    assert values.shape == (2, 3, 64)
    for e, y, x in np.ndindex(values.shape):
        group, place = divmod(x, 32)
        byte = int(blocks[e, y, group, place // 2])
        code = byte >> 4 if place % 2 else byte & 15
        assert values[e, y, x] == number(code) * 2.0 ** (int(scales[e, y, group]) - 127)
