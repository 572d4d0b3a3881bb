"""Somebody's own NNX model: it generates under policies, and ``kvjax.check`` says which law it breaks."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import own_model
import pytest
import tiny
from flax import nnx

import kvjax
import kvjax.flax
from kvjax.laws import LawError
from kvjax.models.decoder import Decoder
from kvjax.models.hf import ModelError

PROMPTS = [tiny.prompt(30, 1), tiny.prompt(17, 2)]


@functools.cache
def own() -> own_model.Own:
    return own_model.Own()


def dense_logits(module: own_model.Own, tokens: np.ndarray) -> np.ndarray:
    """The module's logits of whole rows [B, T], by attention written here."""
    b, t = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(t), (b, t))

    def attend(heads):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (heads.k, heads.v))
        s = jnp.einsum("btnh,bsnh->bnts", heads.q, k) / np.sqrt(8)
        p = jax.nn.softmax(jnp.where(np.tri(t, dtype=bool), s, -jnp.inf), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", p, v)

    x = module.embed(jnp.asarray(tokens), positions)
    for layer in module.layers:
        x = layer(x, positions, attend)
    return np.asarray(module.logits(x))


def test_it_writes_what_dense_attention_writes_and_its_arrays_are_shared():
    model = kvjax.load(own())
    tokens = kvjax.generate(model, "full", PROMPTS, max_new_tokens=8).tokens
    for prompt, new in zip(PROMPTS, tokens):
        logits = dense_logits(own(), np.asarray([[*prompt, *new]]))[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == new
    assert len(set(tokens[0])) > 2
    assert model.params["embed"] is own().tokens.embedding[...]
    assert model.params["layers"][1]["self.q.kernel"] is own().layers[1].q.kernel[...]


VOTED = "gvote(0.5, samples=2, ahead=8)"  # makes queries by ``Heads.project``


@pytest.mark.parametrize(
    "spec", ["snapkv(8) + ada(24) + int8(8)", pytest.param(VOTED, marks=pytest.mark.slow)]
)
def test_it_takes_policies(spec):
    """A policy that keeps everything writes the same; one that drops tokens holds fewer."""
    model = kvjax.load(own())
    full, run = (kvjax.generate(model, p, PROMPTS, max_new_tokens=4) for p in ("full", spec))
    assert kvjax.nbytes(run.state).total["live"] < kvjax.nbytes(full.state).total["live"]
    assert [len(row) for row in run.tokens] == [4, 4]


def test_it_runs_in_a_causal_lm():
    model = kvjax.load(own())
    right = kvjax.generate(model, "window(8) + sinks(2)", PROMPTS, max_new_tokens=5).tokens
    lm = kvjax.flax.CausalLM(model, "window(8) + sinks(2)", batch=2, context=64)
    tokens = [lm.prefill(PROMPTS).argmax(-1)]
    lm.reserve(4)
    for _ in range(4):
        tokens.append(lm(tokens[-1]).argmax(-1))
    assert np.stack(tokens, axis=1).tolist() == right


def test_two_wrappings_of_one_architecture_are_one_network():
    """So that another module's weights compile nothing."""
    one, two = (kvjax.load(own_model.Own(seed)).network for seed in (0, 1))
    assert one == two
    assert hash(one) == hash(two)
    assert one != kvjax.load(own_model.Own(layers=3)).network


def test_text_without_a_tokenizer_says_how_to_give_one():
    model = kvjax.load(own())
    with pytest.raises(ModelError, match=r"tokenizer=FOLDER"):
        model.text.encode("Hello")
    with pytest.raises(ModelError, match=r"tokenizer=FOLDER"):
        kvjax.generate(model, "full", ["Hello"])


def test_a_module_takes_the_tokenizer_of_a_folder():
    folder = kvjax.load().folder
    model = kvjax.load(own(), tokenizer=folder)
    assert model.text.decode(model.text.encode("Hello", bos=False)) == "Hello"
    assert model.text.eos == kvjax.load().spec.eos


def test_what_is_no_model_is_refused():
    class Bare(nnx.Module):
        pass

    with pytest.raises(ModelError, match=r"load\(Bare\(\.\.\.\)\).*has no embed, layers, logits"):
        kvjax.load(Bare())
    with pytest.raises(ModelError, match=r"load\(int\(\.\.\.\)\)"):
        kvjax.load(3)
    with pytest.raises(ModelError, match=r"windows names 1 layers, the model has 2"):
        kvjax.load(own_model.Own(windows=(None,)))
    with pytest.raises(ModelError, match=r"has its tokenizer beside it"):
        kvjax.load(kvjax.load().folder, tokenizer="folder")


def test_layers_with_functions_of_their_own_may_compute_alike():
    class Own(own_model.Block):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.gain = lambda y: 1.5 * y  # another object in every layer

        def __call__(self, x, positions, attend):
            return super().__call__(self.gain(x), positions, attend)

    model = kvjax.load(own_model.Own(block=Own))
    assert len(set(model.network.blocks)) == 1
    assert kvjax.check(model)


def test_layers_that_differ_need_windows_that_differ():
    class Wide(own_model.Block):
        def __call__(self, x, positions, attend):
            return super().__call__(2 * x, positions, attend)

    module = own_model.Own(layers=3)
    module.layers[1] = Wide(nnx.Rngs(1))
    with pytest.raises(ModelError, match="layers 0 and 1 differ in more than their arrays"):
        kvjax.load(module)
    module.windows = (None, 4, None)
    assert kvjax.load(module).network.windows == (None, 4, None)


# --- kvjax.check ----------------------------------------------------------------------------------


def broken(**methods) -> kvjax.laws.Laws:
    """The laws of a model whose layers have other methods."""
    return kvjax.check(kvjax.load(own_model.Own(block=type("Block", (own_model.Block,), methods))))


def names_of(laws) -> dict[str, int]:
    return {law.says: law.layer for law in laws.laws if law.layer is not None}


@pytest.mark.parametrize("windows", [(None, None), (5, None)], ids=str)
def test_a_good_network_keeps_every_law(windows):
    laws = kvjax.check(kvjax.load(own_model.Own(windows=windows)))
    assert laws, str(laws)
    assert str(laws).count("holds") == 6


def test_ours_keep_every_law():
    assert kvjax.check(tiny.model())
    assert kvjax.check(tiny.model((None, 5)))


ALONE, SINGLE = "rows alone equal rows together", "one token at a time equals the whole prompt"
APART, ALIKE = "rows at different positions do not mix", "layers of one window differ in weights only"
ROPE, QUERIES = "what heads say of RoPE is true", "what heads say of queries is true"


def call(change):
    """A layer's call with its input, positions or heads changed first."""

    def method(self, x, positions, attend):
        x, positions, altered = change(x, positions)
        return own_model.Block.__call__(self, x, positions, lambda heads: attend(altered(heads)))

    return {"__call__": method}


def same(heads):
    return heads


@pytest.mark.parametrize(
    ("change", "laws"),
    [
        (lambda x, at: (x - x.mean(axis=0), at, same), {ALONE, APART}),
        (lambda x, at: (x + 0.1 * jnp.roll(x, 1, axis=1).at[:, 0].set(0), at, same), {SINGLE, APART}),
        (lambda x, at: (x, jnp.broadcast_to(jnp.arange(x.shape[1]), at.shape), same), {SINGLE, APART}),
        (lambda x, at: (x, jnp.broadcast_to(at[:1], at.shape), same), {APART}),
        (lambda x, at: (x, at, lambda h: dataclasses.replace(h, rotate=None)), {ROPE}),
        (
            lambda x, at: (x, at, lambda h: dataclasses.replace(h, project=lambda y: 2 * h.project(y))),
            {QUERIES},
        ),
    ],
    ids=["mean over rows", "looks back", "counts from 0", "one row's positions", "no rotate", "project"],
)
def test_a_broken_law_is_named_with_its_first_layer(change, laws):
    found = broken(**call(change))
    assert not found
    assert set(names_of(found)) == laws
    assert set(names_of(found).values()) == {0}
    assert "BROKEN" in str(found)


def test_the_first_layer_that_differs_is_the_one_that_is_broken():
    module = own_model.Own(layers=3, windows=(None, 9, None))
    methods = call(lambda x, at: (x - x.mean(axis=0), at, same))
    module.layers[1] = type("Block", (own_model.Block,), methods)(nnx.Rngs(1))
    found = kvjax.check(kvjax.load(module))
    assert names_of(found)[ALONE] == 1
    assert "first at layer 1" in str(found)


@dataclasses.dataclass(frozen=True)
class Numbered(Decoder):
    """A network whose layers differ by their number."""

    def at(self, context):
        return self

    def layer(self, params, index, x, positions, attend, carry):
        return super().layer(params, index, x * (1 + index), positions, attend, carry)


def test_layers_that_count_are_found():
    model = tiny.Tiny(Numbered(tiny.model().network.spec), tiny.model().params)
    assert names_of(kvjax.check(model)) == {ALIKE: 1}


def test_a_missing_part_of_the_protocol_is_one_sentence():
    @dataclasses.dataclass(frozen=True)
    class Twice(Decoder):
        def layer(self, params, index, x, positions, attend, carry):
            x, carry = super().layer(params, index, x, positions, attend, carry)
            return super().layer(params, index, x, positions, attend, carry)

    model = tiny.Tiny(Twice(tiny.model().network.spec), tiny.model().params)
    with pytest.raises(LawError, match="layer 0 calls attend 2 times"):
        kvjax.check(model)
    params = {k: v for k, v in tiny.model().params.items() if k != "embed"}
    with pytest.raises(LawError, match=r'params\["embed"\] is not an array'):
        kvjax.check(tiny.Tiny(tiny.model().network, params))
