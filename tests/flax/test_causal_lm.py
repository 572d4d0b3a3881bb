"""``kvjax.flax.CausalLM``: the cache as one variable of an NNX module, beside ``kvjax.generate``."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

import kvjax
import kvjax.flax as kvflax
from kvjax import decode
from kvjax.decode import RequestError

PROMPTS = [tiny.prompt(40, 1), tiny.prompt(23, 2)]
NEW = 6
SIZES = {"page": tiny.PAGE, "chunk_size": 16}
CONTEXT = decode.bucket(40 + NEW)
STREAMING, SNAPKV = "window(8) + sinks(2)", "snapkv(8) + ada(24)"


def made(spec: str, model=None, **sizes) -> kvflax.CausalLM:
    policy = kvjax.policy(spec)
    sizes = {"batch": 2, "context": CONTEXT, **SIZES, **sizes}
    return kvflax.CausalLM(model or tiny.model(), policy, weights=tiny.weights(policy), **sizes)


def generated(spec: str, new: int = NEW) -> list[list[int]]:
    policy = kvjax.policy(spec)
    call = {"max_new_tokens": new, "weights": tiny.weights(policy), **SIZES}
    return kvjax.generate(tiny.model(), policy, PROMPTS, **call).tokens


def written(step, lm, logits, new: int = NEW) -> list[list[int]]:
    """The tokens of greedy decoding, a call of ``step(lm, tokens)`` each."""
    tokens = [logits.argmax(-1)]
    for _ in range(new - 1):
        tokens.append(step(lm, tokens[-1]).argmax(-1))
    return np.stack(tokens, axis=1).tolist()


@nnx.jit
def jitted(lm, tokens):
    return lm(tokens)


@pytest.mark.parametrize("spec", [STREAMING, pytest.param(SNAPKV, marks=pytest.mark.slow)])
def test_it_writes_what_generate_writes_inside_jit_and_outside(spec):
    """Every preset does: ``test_conformance``."""
    lm, right = made(spec), generated(spec)
    for step in (jitted, lambda lm, tokens: lm(tokens)):
        logits = lm.prefill(PROMPTS)
        lm.reserve(NEW)
        assert written(step, lm, logits) == right
    assert kvflax.state(lm).length.tolist() == [40 + NEW - 1, 23 + NEW - 1]


@functools.partial(jax.jit, donate_argnums=1)
def donating(graph, cache, rest, tokens):
    lm = nnx.merge(graph, cache, rest)
    logits = lm(tokens)
    return logits, nnx.state(lm, kvflax.KV)


def test_split_and_merge_separate_weights_cache_and_the_rest():
    policy = "write_gate(0.5, window=16) + sinks(2)"  # learns
    lm, right = made(policy), generated(policy)
    logits = lm.prefill(PROMPTS)
    lm.reserve(NEW)
    graph, params, cache, learned = nnx.split(lm, nnx.Param, kvflax.KV, ...)
    leaves = jax.tree.leaves(params)
    assert len(leaves) == len(jax.tree.leaves(tiny.model().params))
    assert jax.tree.structure(jax.tree.leaves(cache)) == jax.tree.structure(jax.tree.leaves(kvflax.state(lm)))
    assert len(jax.tree.leaves(learned)) == len(jax.tree.leaves(tiny.weights(kvjax.policy(policy))))
    again = nnx.merge(graph, params, cache, learned)
    assert written(lambda lm, tokens: lm(tokens), again, logits) == right


@pytest.mark.slow
def test_a_plain_jit_takes_the_parts():
    lm, right = made(STREAMING), generated(STREAMING)
    logits = lm.prefill(PROMPTS)
    lm.reserve(NEW)
    graph, cache, rest = nnx.split(lm, kvflax.KV, ...)
    tokens = [logits.argmax(-1)]
    for _ in range(NEW - 1):
        logits, cache = donating(graph, cache, rest, tokens[-1])
        tokens.append(logits.argmax(-1))
    assert np.stack(tokens, axis=1).tolist() == right


def test_weights_are_shared_with_the_model():
    lm = made(STREAMING)
    shared = zip(jax.tree.leaves(lm.model.params), jax.tree.leaves(tiny.model().params), strict=True)
    assert all(a is b for a, b in shared)


def test_orbax_saves_and_restores_it(tmp_path):
    from orbax.checkpoint import v1 as ocp

    lm, right = made(SNAPKV), generated(SNAPKV)
    logits = lm.prefill(PROMPTS)
    lm.reserve(NEW)
    graph, variables = nnx.split(lm)
    ocp.save(tmp_path / "lm", variables)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), variables)
    del variables
    assert written(lambda lm, tokens: lm(tokens), lm, logits) == right
    again = nnx.merge(graph, ocp.load(tmp_path / "lm", abstract))
    assert written(lambda lm, tokens: lm(tokens), again, logits) == right


def test_the_state_is_that_of_the_library(tmp_path):
    """fork, save, nbytes and stream work on it, and a state of ``prefill`` goes in."""
    policy, right = kvjax.policy(SNAPKV), generated(SNAPKV)
    lm = made(SNAPKV)
    logits = lm.prefill(PROMPTS)
    state = kvflax.state(lm)
    assert kvjax.nbytes(state).total["live"] > 0
    kvjax.save(state, tmp_path / "state.safetensors", model=tiny.model(), policy=policy)

    kvflax.set_state(lm, kvjax.fork(state, row=1, n=3))
    assert lm.batch == 3
    lm.reserve(NEW)
    three = written(lambda lm, tokens: lm(tokens), lm, jnp.stack([logits[1]] * 3))
    assert three == [right[1]] * 3

    made_there, first = kvjax.prefill(tiny.model(), policy, PROMPTS, context=CONTEXT, **SIZES)
    fresh = made(SNAPKV)
    kvflax.set_state(fresh, made_there)
    fresh.reserve(NEW)
    assert written(lambda lm, tokens: lm(tokens), fresh, first) == right

    again = kvjax.prefill(tiny.model(), policy, PROMPTS, context=CONTEXT, **SIZES)
    kvflax.set_state(fresh, again[0])
    pieces = kvjax.stream(tiny.model(), policy, kvflax.state(fresh), again[1], max_new_tokens=NEW)
    assert np.concatenate([piece for piece, _ in pieces], axis=1).tolist() == right


@pytest.mark.parametrize(
    "spec", [pytest.param(STREAMING, marks=pytest.mark.slow), "topk(5, sinks=2, tail=6)"]
)
@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["jit", "eager"])
def test_a_prompt_may_come_in_pieces_inside_jit(spec, inside):
    """Rows of different lengths, three pieces, under policies that decide on arrival."""
    run = nnx.jit(lambda lm, *arguments: lm(*arguments)) if inside else lambda lm, *arguments: lm(*arguments)
    lm, right = made(spec), generated(spec)
    lm.reserve(40, piece=16)
    lengths = np.asarray([len(prompt) for prompt in PROMPTS])
    tokens, logits = decode.padded(PROMPTS, 48), []
    for start in range(0, 48, 16):
        count = np.clip(lengths - start, 0, 16)
        logits.append(
            run(lm, jnp.asarray(tokens[:, start : start + 16]), jnp.asarray(count), jnp.asarray(lengths))
        )
    last = jnp.stack([logits[2][0], logits[1][1]])  # of the piece in which a row ends
    lm.reserve(NEW)
    assert written(run, lm, last) == right


@pytest.mark.slow
def test_rows_with_no_token_are_left_as_they_are():
    lm, right = made(STREAMING), generated(STREAMING)
    logits = lm.prefill(PROMPTS)
    lm.reserve(2 * NEW)
    only_first = lambda lm, tokens: lm(tokens, jnp.asarray([1, 0]))  # noqa: E731
    assert [row[0] for row in zip(written(only_first, lm, logits))][0] == right[0]
    assert kvflax.state(lm).length.tolist() == [40 + NEW - 1, 23]
    only_second = lambda lm, tokens: lm(tokens, jnp.asarray([0, 1]))  # noqa: E731
    assert written(only_second, lm, logits)[1] == right[1]


def test_other_weights_compile_nothing():
    """Two models of one shape share the step."""
    other = tiny.Tiny(tiny.model().network, jax.tree.map(lambda x: x * 1.01, tiny.model().params))
    count = []

    @nnx.jit
    def step(lm, tokens):
        count.append(1)
        return lm(tokens)

    for model in (tiny.model(), other):
        lm = made(STREAMING, model)
        logits = lm.prefill(PROMPTS)
        lm.reserve(NEW)
        step(lm, logits.argmax(-1))
    assert len(count) == 1


@pytest.mark.slow
def test_the_cost_of_a_call_beside_the_decode_loop():
    """Milliseconds of CPU time a token, of the embedded model's step: ``pytest -rP -m slow``."""
    model, new = kvjax.load(), 64
    prompt = [np.random.default_rng(0).integers(3, 1000, 400).tolist()]
    lm = kvflax.CausalLM(model, "snapkv + ada(0.25)", batch=1, context=1024)
    inside = nnx.jit(lambda lm, token: lm(token))

    def fed(logits, call):
        for _ in range(new):
            logits = call(logits.argmax(-1))
        return logits

    def parts(logits):
        graph, cache, rest = nnx.split(lm, kvflax.KV, ...)

        def call(token):
            nonlocal cache
            logits, cache = donating(graph, cache, rest, token)
            return logits

        logits = fed(logits, call)
        nnx.update(lm, cache)
        return logits

    ways = {
        "lm(token)": lambda logits: fed(logits, lm),
        "nnx.jit": lambda logits: fed(logits, lambda token: inside(lm, token)),
        "jax.jit of nnx.split": parts,
    }
    spent = {}
    for name, run in ways.items():
        times = []
        for _ in range(3):  # the first one compiles
            logits = lm.prefill(prompt)
            lm.reserve(new)
            begin = time.process_time()
            jax.block_until_ready(run(logits))
            times.append((time.process_time() - begin) / new)
        spent[name] = min(times[1:])
    times = []
    for _ in range(3):
        state, logits = kvjax.prefill(model, "snapkv + ada(0.25)", prompt, context=1024)
        pieces = kvjax.stream(model, "snapkv + ada(0.25)", state, logits, max_new_tokens=new + 1, stops=())
        next(pieces)  # the first token is the prompt's
        begin = time.process_time()
        next(pieces)
        times.append((time.process_time() - begin) / new)
    spent["stream"] = min(times[1:])
    print(*(f"{name}: {1e3 * seconds:.1f} ms" for name, seconds in spent.items()), sep="\n")
    assert spent["lm(token)"] < 3 * spent["stream"]


# --- what is refused ------------------------------------------------------------------------------


def test_a_prompt_under_a_policy_that_sees_it_whole_needs_prefill():
    lm = made(SNAPKV)
    for run in (jitted, lambda lm, tokens: lm(tokens)):
        for tokens in (jnp.zeros((2, 4), jnp.int32), jnp.zeros(2, jnp.int32)):
            with pytest.raises(RequestError, match=r"Call lm\.prefill\(prompts\) first"):
                run(lm, tokens)


def test_rows_and_tokens_beyond_the_cache_are_refused_while_tracing():
    lm = made(STREAMING)
    for run in (jitted, lambda lm, tokens: lm(tokens)):
        with pytest.raises(RequestError, match=r"lm\(tokens of shape 3\): the cache has 2 rows"):
            run(lm, jnp.zeros(3, jnp.int32))
        with pytest.raises(RequestError, match=r"lm\(tokens of shape 2x17\) brings more than the 16 tokens"):
            run(lm, jnp.zeros((2, 17), jnp.int32))


def test_a_pool_that_was_too_small_is_raised_at_the_next_reserve():
    lm = made("topk(5, sinks=2, tail=6)")  # keeps every token
    lm.prefill(PROMPTS)
    jitted_piece = nnx.jit(lambda lm, tokens: lm(tokens))
    jitted_piece(lm, jnp.ones((2, 16), jnp.int32))
    with pytest.raises(RequestError, match=r"since the last reserve layers \[0, 1\] ran out of pages"):
        lm.reserve(1)
    lm.prefill(PROMPTS)  # begins again
    lm.reserve(1)


def test_tokens_beyond_the_context_are_refused_or_raised_at_the_next_reserve():
    lm = made(STREAMING)
    lm.prefill(PROMPTS)
    with pytest.raises(RequestError, match=rf"row 0 would reach {CONTEXT + 1} tokens"):
        lm.reserve(CONTEXT - 39)
    for _ in range(CONTEXT - 39):
        jitted(lm, jnp.ones(2, jnp.int32))
    with pytest.raises(RequestError, match=rf"was fed {CONTEXT + 1} tokens, .* context={CONTEXT}"):
        lm.reserve(1)


def test_host_calls_inside_jit_are_refused():
    lm = made(STREAMING)
    with pytest.raises(RequestError, match="prefill inside jit"):
        nnx.jit(lambda lm: lm.prefill(PROMPTS))(lm)
    with pytest.raises(RequestError, match="reserve inside jit"):
        nnx.jit(lambda lm: lm.reserve(1))(lm)


def test_a_state_of_another_model_or_policy_is_refused():
    deeper = tiny.Tiny(
        type(tiny.model().network)(
            dataclasses.replace(tiny.model().network.spec, num_layers=1, windows=(None,))
        ),
        tiny.model().params | {"layers": tiny.model().params["layers"][:1]},
    )
    policy = kvjax.policy(STREAMING)
    state, logits = kvjax.prefill(deeper, policy, PROMPTS, context=CONTEXT, **SIZES)
    lm = made(STREAMING)
    says = r"made by a model with 1 layers of 2 KV heads of 8, this one has 2 layers"
    with pytest.raises(RequestError, match=f"set_state: .*{says}"):
        kvflax.set_state(lm, state)
    with pytest.raises(RequestError, match=f"stream: .*{says}"):
        kvjax.stream(tiny.model(), policy, state, logits, max_new_tokens=1)
    with pytest.raises(RequestError, match="set_state: the state was made under"):
        kvflax.set_state(made(SNAPKV), tiny.start(policy, 2))


def test_sizes_and_prompts_that_do_not_fit_are_refused():
    with pytest.raises(RequestError, match=r"CausalLM\(batch=0, .*holds nothing"):
        made(STREAMING, batch=0)
    with pytest.raises(RequestError, match="trained for 256 positions"):
        made(STREAMING, context=257)
    with pytest.raises(RequestError, match=r"prefill: 1 prompts for a CausalLM of batch=2"):
        made(STREAMING).prefill(PROMPTS[:1])


def test_a_flax_without_nnx_is_one_sentence():
    code = "import sys; sys.modules['flax.nnx'] = None; import kvjax.flax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: import kvjax.flax: flax ")
    assert "cannot import nnx beside jax" in last
    assert "pip install -U flax" in last
