"""The training step of a config, compiled for a TPU slice that is not here: no traces or weights are read."""

from __future__ import annotations

import functools
from typing import Any

import jax

from kvjax.sharding.specs import TENSOR
from train import mesh, plan
from train.agents import make_layout
from train.ranker import batches
from train.ranker.agents import first
from train.ranker.objective import Task, objective
from train.ranker.optimizer import optimizer
from train.ranker.settings import Settings


def fit(settings: Settings, topology: str) -> int:
    """Compiles the update of the longest batch and prints what a chip needs; 0 where it fits and 2 where not.

    Raises:
      ConfigError: see ``train.plan``.
    """
    spec, agent, method = settings.spec or settings.model().spec, settings.agent, settings.method
    agents = spec.num_layers * spec.num_kv_heads
    target, _ = plan.slice_of(topology, (1, settings.devices))
    layout = make_layout(settings.devices, agents, target.devices)
    length, h = max(settings.recording.lengths), spec.head_dim
    task = Task(agent=agent, method=method, softcap=spec.attn_softcap)
    whole = layout.of(mesh.P())

    def shaped(shape: tuple[int, ...], dtype: str, by: mesh.P | None = None) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole if by is None else layout.of(by))

    own, stored = mesh.P(None, TENSOR), settings.recording.dtype
    names = [name for name in batches.names(agent) if name not in ("q", "at")]
    batch = {name: shaped((method.rows, agents, length, h), stored, own) for name in names}
    batch["q"] = shaped((method.rows, agents, spec.groups, method.queries, h), stored, own)
    batch |= {"at": shaped((method.rows, method.queries), "int32"), "size": shaped((method.rows,), "int32")}
    batch["seed"] = shaped((), "uint32")
    params = jax.eval_shape(lambda: first(settings, agents, h))
    wide = {name: params[name].shape[1] for name in agent.inputs if agent.standardise}
    moments = {
        name: {what: shaped((agents, n), "float32", mesh.P(TENSOR)) for what in ("mean", "scale")}
        for name, n in wide.items()
    }
    loss = jax.tree_util.Partial(functools.partial(objective, task), moments)
    chosen = optimizer(settings.rate, settings.plan.steps)
    needed = plan.compiled(topology, target, layout, loss, params, chosen, batch)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{agents} agents of {count // agents:,} parameters: {count:,} in all")
    title = f"{settings.name}: one step of {method.rows} x {length} tokens on {topology}, {settings.devices}"
    return plan.report(f"{title} devices", needed)
