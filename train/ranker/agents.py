"""The agents of a run, one for each KV head of each layer."""

from __future__ import annotations

import jax

from kvjax.policies import kvp
from kvjax.types import Params
from train.ranker.settings import Settings


def first(settings: Settings, agents: int, head_dim: int) -> Params:
    """Untrained agents, leaves [A, ...] with A = L x K."""
    agent, key = settings.agent, jax.random.key(settings.seed)
    return kvp.initial(
        key, agents, head_dim, 1, inputs=agent.inputs, hidden=agent.hidden, layers=agent.layers
    )[0]
