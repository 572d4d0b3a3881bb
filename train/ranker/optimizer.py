"""AdamW for many agents at once, each with a gradient and a clip of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from train.ranker.settings import Rate

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def optimizer(rate: Rate, steps: int) -> optax.GradientTransformation:
    """AdamW with a linear warm-up and a cosine decay; weights decay, biases do not."""
    warmup = min(rate.warmup, steps - 1)
    schedule = optax.warmup_cosine_decay_schedule(
        rate.start * rate.peak, rate.peak, warmup, max(steps, warmup + 1), rate.final
    )
    matrices = lambda tree: jax.tree_util.tree_map_with_path(  # noqa: E731
        lambda path, _: str(getattr(path[-1], "key", "")).startswith("w"), tree
    )
    adamw = optax.adamw(schedule, weight_decay=rate.weight_decay, mask=matrices)
    return optax.chain(clip_each(rate.clip), adamw)


def agent_norms(grad: Any) -> Float[Array, " A"]:
    """The norm of each agent's gradient; leaves begin with [A]."""
    return jnp.sqrt(sum(jnp.sum(g**2, axis=tuple(range(1, g.ndim))) for g in jax.tree.leaves(grad)))


def gradient_statistics(limit: float, grad: Any) -> dict[str, Float[Array, ""]]:
    """Smallest, mean and largest norm of the agents' gradients, and the share of agents that are clipped."""
    norm = agent_norms(grad)
    return {
        "agent_grad_min": norm.min(),
        "agent_grad_mean": norm.mean(),
        "agent_grad_max": norm.max(),
        "clipped": (norm > limit).mean(),
    }


def clip_each(limit: float) -> optax.GradientTransformation:
    """Shortens each agent's gradient (leaves begin with [A]) to at most ``limit``."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = agent_norms(updates)
        scale = jnp.where(norm > limit, limit / jnp.where(norm > limit, norm, 1.0), 1.0)
        return jax.tree.map(lambda g: g * scale.reshape(-1, *[1] * (g.ndim - 1)), updates), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)
