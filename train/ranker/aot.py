"""Compiles a config's training step for a TPU slice that is not attached, without traces or weights."""

from __future__ import annotations

import functools
from typing import Any

import jax

from kvjax.sharding.specs import TENSOR
from train import aot, mesh
from train.agents import make_layout
from train.ranker import batches
from train.ranker.objective import Task, initial_agents, objective
from train.ranker.optimizer import optimizer
from train.ranker.settings import Settings


def compile_for(settings: Settings, topology: str) -> int:
    """Compiles the update of the longest batch and prints what a chip needs; exit code 0 if it fits, else 2.

    Raises:
      ConfigError: see ``train.aot``.
    """
    spec, agent, method = settings.spec or settings.model().spec, settings.agent, settings.method
    agents = spec.num_layers * spec.num_kv_heads
    target, _ = aot.tpu_slice(topology, (1, settings.devices))
    layout = make_layout(settings.devices, agents, target.devices)
    length, h = max(settings.recording.lengths), spec.head_dim
    task = Task(agent=agent, method=method, softcap=spec.attn_softcap)

    def shaped(shape: tuple[int, ...], dtype: str, cut: mesh.P | None = None) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.of(cut or mesh.P()))

    by_agent, stored = mesh.P(None, TENSOR), settings.recording.dtype
    names = [name for name in batches.stored_arrays(agent) if name not in ("q", "at")]
    batch = {name: shaped((method.rows, agents, length, h), stored, by_agent) for name in names}
    batch["q"] = shaped((method.rows, agents, spec.groups, method.queries, h), stored, by_agent)
    batch |= {"at": shaped((method.rows, method.queries), "int32"), "size": shaped((method.rows,), "int32")}
    batch["seed"] = shaped((), "uint32")
    params = jax.eval_shape(lambda: initial_agents(settings, agents, h))
    widths = {name: params[name].shape[1] for name in agent.inputs if agent.standardise}
    moments = {
        name: {moment: shaped((agents, n), "float32", mesh.P(TENSOR)) for moment in ("mean", "scale")}
        for name, n in widths.items()
    }
    loss = jax.tree_util.Partial(functools.partial(objective, task), moments)
    adamw = optimizer(settings.rate, settings.plan.steps)
    memory = aot.compiled_step(topology, target, layout, loss, params, adamw, batch)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{agents} agents of {count // agents:,} parameters: {count:,} in all")
    title = f"{settings.name}: one step of {method.rows} x {length} tokens on {topology}, {settings.devices}"
    return aot.report(f"{title} devices", memory)
