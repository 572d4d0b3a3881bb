"""Flax's ``nnx``, or one sentence that says why it cannot be imported here.

Flax 0.12.8 cannot import it beside jax 0.11.1 and newer: names that it subclasses are gone.
"""

try:
    from flax import nnx as nnx
except (ImportError, AttributeError) as error:
    import flax
    import jax

    raise ImportError(
        f"import kvjax.flax: flax {flax.__version__} cannot import nnx beside jax {jax.__version__} "
        f"({error}). Install a flax that was made for this jax (pip install -U flax); kvjax.generate needs "
        "none."
    ) from error
