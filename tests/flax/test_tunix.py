"""Models of google-tunix give the same logits here, and share their arrays. In an environment of its own.

    python -m venv DIR && DIR/bin/pip install -e '.[test]' google-tunix==0.1.7
    DIR/bin/python -m pytest -m tunix tests/flax/test_tunix.py

Tried with google-tunix 0.1.7, flax 0.12.8 and jax 0.10.2. Weights are random, float32.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import kvjax
from kvjax.models import decoder
from kvjax.models.hf import ModelError

pytestmark = pytest.mark.tunix
pytest.importorskip("tunix", reason="google-tunix is in an environment of its own; see above")

SIZES = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
MOST = 2e-4


def made(family: str, **more):
    """A random model; every parameter is drawn, norms and biases too."""
    from flax import nnx

    sizes = SIZES | more
    if family == "llama3":
        from tunix.models.llama3 import model as of

        config = of.ModelConfig(**{"vocab_size": 61, "rope_theta": 1_000_000, "norm_eps": 1e-5} | sizes)
        module = of.Llama3(config, rngs=nnx.Rngs(0))
    elif family in ("qwen2", "qwen3"):
        import importlib

        of = importlib.import_module(f"tunix.models.{family}.model")
        floats = {"dtype": jnp.float32, "param_dtype": jnp.float32}
        tied = {"use_tied_embedding": family == "qwen2"}
        rule = {"vocab_size": 61, "rope_theta": 1_000_000, "norm_eps": 1e-6}
        config = of.ModelConfig(**rule | tied | floats | sizes)
        module = getattr(of, family.capitalize())(config, rngs=nnx.Rngs(0))
    else:
        from tunix.models.gemma3 import model as of

        sizes |= {"num_layers": 6}  # the sixth attends fully
        bases = {
            "local_base_frequency": 10_000,
            "global_base_frequency": 1_000_000,
            "global_scale_factor": 8.0,
        }
        rule = {"num_embed": 61, "sliding_window_size": 9, "param_dtype": jnp.float32}
        config = of.ModelConfig(**rule | bases | sizes)
        module = of.Gemma3(config, rngs=nnx.Rngs(0))
    random = np.random.default_rng(3)
    graph, state = nnx.split(module)
    drawn = lambda x: jnp.asarray(0.3 * random.standard_normal(x.shape) + (x.ndim == 1), jnp.float32)  # noqa: E731
    return nnx.merge(graph, jax.tree.map(drawn, state))


def theirs(module, tokens: np.ndarray) -> np.ndarray:
    """Logits of whole rows by the module itself."""
    b, t = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(t), (b, t))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, t, t))
    return np.asarray(module(jnp.asarray(tokens), positions, None, mask)[0])


TOKENS = np.asarray([tiny.prompt(24, 1), tiny.prompt(24, 2)])

CASES = {
    "llama3": ("llama3", {}),
    "llama3, tied": ("llama3", {"weight_tying": True}),
    "qwen2": ("qwen2", {}),
    "qwen2, untied": ("qwen2", {"use_tied_embedding": False}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {}),
    "gemma3, one KV head": ("gemma3", {"num_kv_heads": 1}),
    "gemma3, as many KV heads": ("gemma3", {"num_kv_heads": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_theirs_and_arrays_are_shared(case, record_property):
    family, more = CASES[case]
    module = made(family, **more)
    with pytest.warns(UserWarning, match=r"copies [\d,]+ of [\d,]+ bytes") as said:
        model = kvjax.load(module)
    leaves = jax.tree_util.tree_leaves_with_path(model.params)
    copied = sum(x.nbytes for path, x in leaves if path[-1].key.startswith(("w", "b", "head")))
    assert model.copied == copied
    assert any(f"copies {copied:,} of" in str(w.message) for w in said)
    right = theirs(module, TOKENS)
    ours = np.asarray(decoder.dense_logits(model.spec, model.params, jnp.asarray(TOKENS)))
    apart = float(np.abs(ours - right).max())
    print(f"{case}: largest difference {apart:.1e} of logits up to {np.abs(right).max():.1f}")
    assert np.abs(right).max() > 1, "the logits are flat: the test says little"
    assert apart <= MOST

    of_module = {
        id(x) for x in jax.tree.leaves(jax.tree.map(lambda v: v, jax.tree.leaves(module_state(module))))
    }
    shared = sum(x.nbytes for x in jax.tree.leaves(model.params) if id(x) in of_module)
    assert shared + copied == sum(x.nbytes for x in jax.tree.leaves(model.params))


def module_state(module):
    from flax import nnx

    return nnx.split(module)[1]


@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_the_cache_writes_what_the_module_writes(family):
    module = made(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kvjax.load(module)
        prompts = [row.tolist() for row in TOKENS]
        tokens = kvjax.generate(model, "full", prompts, max_new_tokens=6).tokens
        assert kvjax.check(model)
        assert len(kvjax.generate(model, "snapkv(4) + uniform(12)", prompts, max_new_tokens=3).tokens) == 2
    for prompt, new in zip(prompts, tokens):
        logits = theirs(module, np.asarray([[*prompt, *new]]))[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == new


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_the_base_of_rope_is_the_one_that_the_module_computes_with(family):
    """0.1.7 gives the config's only in Qwen2; where the two differ ``load`` says so."""
    module = made(family, rope_theta=500_000)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = kvjax.load(module)
    told = [str(w.message) for w in said if "rope_theta" in str(w.message)]
    assert bool(told) == (model.spec.rope.theta != 500_000)
    ours = decoder.dense_logits(model.spec, model.params, jnp.asarray(TOKENS))
    np.testing.assert_allclose(np.asarray(ours), theirs(module, TOKENS), atol=MOST)


def test_a_dtype_casts_and_counts_the_copies():
    module = made("qwen3")
    with pytest.warns(UserWarning, match="copies"):
        model = kvjax.load(module, "bfloat16")
    assert {str(x.dtype) for x in jax.tree.leaves(model.params)} == {"bfloat16"}
    assert model.copied == sum(x.nbytes for x in jax.tree.leaves(model.params))


def test_text_needs_a_tokenizer():
    module = made("llama3")
    with pytest.raises(ModelError, match=r"this Llama3 was loaded without a tokenizer.*tokenizer=FOLDER"):
        kvjax.load(module).text  # noqa: B018
    folder = kvjax.load().folder
    model = kvjax.load(module, tokenizer=folder)
    assert model.text.decode(model.text.encode("Hello", bos=False)) == "Hello"
    assert model.spec.eos == kvjax.load().spec.eos


def test_experts_are_refused():
    from flax import nnx
    from tunix.models.qwen3 import model as of

    sizes = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 61}
    config = of.ModelConfig(**sizes, rope_theta=1_000_000, norm_eps=1e-6)
    with pytest.raises(ModelError, match="has 4 experts"):
        kvjax.load(of.Qwen3(config, rngs=nnx.Rngs(0)))
