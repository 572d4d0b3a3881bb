"""The training step of a config, compiled for a TPU slice that is not here: no traces or weights are read."""

from __future__ import annotations

import functools
from typing import Any

import jax

from kvjax.sharding.specs import TENSOR
from train import mesh, plan
from train.agents import make_layout
from train.phi.maps import initial
from train.phi.objective import Task, objective
from train.phi.settings import Settings
from train.ranker.optimizer import optimizer


def fit(settings: Settings, topology: str) -> int:
    """Compiles one update and prints what a chip needs; 0 where it fits and 2 where it does not.

    Raises:
      ConfigError: see ``train.plan``.
    """
    base, target = settings.base, settings.target
    spec = base.spec or base.model().spec
    heads, h = spec.num_layers * spec.num_kv_heads, spec.head_dim
    compiler, _ = plan.slice_of(topology, (1, base.devices))
    layout = make_layout(base.devices, heads, compiler.devices)
    own, stored = layout.of(mesh.P(None, TENSOR)), base.recording.dtype

    def shaped(shape: tuple[int, ...], dtype: str, where: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    keys = (target.rows, heads, settings.tokens, h)
    batch = {name: shaped(keys, stored, own) for name in ("k", "v")}
    batch["q"] = shaped((target.rows, heads, spec.groups, target.queries, h), stored, own)
    batch["at"] = shaped((target.rows, target.queries), "int32", layout.of(mesh.P()))
    if target.policy is not None:
        batch["dropped"] = shaped(keys[:3], "bool", own)
    params = jax.eval_shape(lambda: initial(jax.random.key(0), heads, spec.groups, h, settings.maps))
    task = Task(loss=settings.loss, target=target, prompt=settings.prompt, softcap=spec.attn_softcap)
    loss = jax.tree_util.Partial(functools.partial(objective, task))
    needed = plan.compiled(
        topology, compiler, layout, loss, params, optimizer(base.rate, base.plan.steps), batch
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"maps of {heads} KV heads and their query heads: {count:,} parameters")
    title = f"{base.name}: one step of {target.rows} x {settings.tokens} tokens on {topology}"
    return plan.report(f"{title}, {base.devices} devices", needed)
