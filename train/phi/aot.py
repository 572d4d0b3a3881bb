"""Compiles a config's training step for a TPU slice that is not attached, without traces or weights."""

from __future__ import annotations

import functools
from typing import Any

import jax

from kvjax.sharding.specs import TENSOR
from train import aot, mesh
from train.agents import make_layout
from train.phi.maps import initial
from train.phi.objective import Task, objective
from train.phi.settings import Settings
from train.ranker.optimizer import optimizer


def compile_for(settings: Settings, topology: str) -> int:
    """Compiles one update and prints what a chip needs; exit code 0 if it fits, else 2.

    Raises:
      ConfigError: see ``train.aot``.
    """
    base, target = settings.base, settings.target
    spec = base.spec or base.model().spec
    heads, h = spec.num_layers * spec.num_kv_heads, spec.head_dim
    compiler, _ = aot.tpu_slice(topology, (1, base.devices))
    layout = make_layout(base.devices, heads, compiler.devices)
    by_head, stored = layout.of(mesh.P(None, TENSOR)), base.recording.dtype

    def shaped(shape: tuple[int, ...], dtype: str, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    keys = (target.rows, heads, settings.tokens, h)
    batch = {name: shaped(keys, stored, by_head) for name in ("k", "v")}
    batch["q"] = shaped((target.rows, heads, spec.groups, target.queries, h), stored, by_head)
    batch["at"] = shaped((target.rows, target.queries), "int32", layout.of(mesh.P()))
    if target.policy is not None:
        batch["dropped"] = shaped(keys[:3], "bool", by_head)
    params = jax.eval_shape(lambda: initial(jax.random.key(0), heads, spec.groups, h, settings.maps))
    task = Task(loss=settings.loss, target=target, prompt=settings.prompt, softcap=spec.attn_softcap)
    loss = jax.tree_util.Partial(functools.partial(objective, task))
    adamw = optimizer(base.rate, base.plan.steps)
    memory = aot.compiled_step(topology, compiler, layout, loss, params, adamw, batch)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"maps of {heads} KV heads and their query heads: {count:,} parameters")
    title = f"{base.name}: one step of {target.rows} x {settings.tokens} tokens on {topology}"
    return aot.report(f"{title}, {base.devices} devices", memory)
