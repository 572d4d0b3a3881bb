"""A language model and its KV cache as one Flax NNX module.

    lm = kvjax.flax.CausalLM(model, "snapkv + ada(0.25)", batch=2, context=2048)
    logits = lm.prefill(prompts)         # on the host: compresses the prompts
    lm.reserve(64)                       # on the host: pages for 64 tokens a row
    logits = lm(logits.argmax(-1))       # one token a row; also inside ``nnx.jit``

``state(lm)`` is the very ``KVState`` of ``kvjax.generate``; ``set_state`` puts one back. docs/flax.md has more.
"""

try:
    from flax import nnx as nnx
except (ImportError, AttributeError) as error:
    import flax
    import jax

    raise ImportError(
        f"import kvjax.flax: flax {flax.__version__} cannot import nnx beside jax {jax.__version__} ({error}). "
        "Install a flax that was made for this jax (pip install -U flax); kvjax.generate needs none."
    ) from error

from kvjax.flax._causal_lm import KV, CausalLM, Learned, set_state, state

__all__ = ["KV", "CausalLM", "Learned", "set_state", "state"]
