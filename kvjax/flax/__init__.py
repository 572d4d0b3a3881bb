"""A language model and its KV cache as one Flax NNX module.

    lm = kvjax.flax.CausalLM(model, "snapkv + ada(0.25)", batch=2, context=2048)
    logits = lm.prefill(prompts)         # on the host: compresses the prompts
    lm.reserve(64)                       # on the host: pages for 64 tokens a row
    logits = lm(logits.argmax(-1))       # one token a row; also inside ``nnx.jit``

``state(lm)`` is the very ``KVState`` of ``kvjax.generate``; ``set_state`` puts one back. More: docs/flax.md.
"""

from kvjax.flax._causal_lm import KV, CausalLM, Learned, set_state, state

__all__ = ["KV", "CausalLM", "Learned", "set_state", "state"]
