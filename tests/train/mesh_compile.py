"""Training steps of shipped configs, compiled for a mesh of virtual devices: a program.

    python tests/train/mesh_compile.py DATA TENSOR CONFIG ...

What the partitioner has to say goes to standard error. "control" instead of a config is a program that makes
it warn.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import compiler  # noqa: E402

compiler.take_the_short_way()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import yaml  # noqa: E402

from kvjax.models import decoder  # noqa: E402
from kvjax.sharding import specs  # noqa: E402
from train import aot, gate_settings, gates, loop, mesh  # noqa: E402
from train.embedded import pretrain  # noqa: E402
from train.embedded.setup import model_spec  # noqa: E402

HERE = types.SimpleNamespace(lowering=("cpu",))


def gate_step(path: Path, layout: mesh.Layout) -> None:
    settings = gate_settings.read(path)
    spec = settings.spec or gate_settings.backbone(settings).spec
    loss, params = gates.abstract_loss(settings, spec, layout, "xla")
    length = max(settings.data["lengths"])
    rows = max(settings.data["tokens"] // length, layout.mesh.size(specs.DATA))
    tokens = jax.ShapeDtypeStruct((rows, length), "int32", sharding=layout.of(specs.ROWS))
    chosen = gate_settings.optimizer(settings.rate, settings.plan.steps)
    aot.compiled_step("v5e:2x4", HERE, layout, loss, params, chosen, {"tokens": tokens})


def pretrain_step(path: Path, data: int, tensor: int) -> None:
    config = yaml.safe_load(path.read_text()) | {"mesh": {"data": data, "tensor": tensor}}
    layout = pretrain.make_layout(config)
    spec, level = model_spec(config["model"]), config["mix"]["levels"][-1]
    optimizer = pretrain.make_optimizer(config["optimizer"])
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, "float32"), decoder.shapes(spec), is_leaf=is_shape
    )
    state = loop.State(params=params, opt=jax.eval_shape(optimizer.init, params))
    where = layout.backbone(state)
    length, scored = level["lengths"][-1], level["scored"]
    rows = level.get("tokens", config["mix"]["tokens"]) // length
    shapes = {"tokens": ((rows, length), "int32"), "at": ((scored,), "int32"), "target": ((scored,), "int32")}
    shapes |= {"weight": ((scored,), "float32"), "answer": ((scored,), "bool")}
    batch = layout.batch({name: np.zeros(*one) for name, one in shapes.items()})
    step: Any = loop.make_step(optimizer, where)
    loss = jax.tree_util.Partial(pretrain.make_loss_of(config, layout))
    step.lower(loss, aot.sharded_shapes(state, where), batch).compile()


def control(layout: mesh.Layout) -> None:
    """A table cut along the dimension that is looked up whole, as no config does."""
    table = jax.ShapeDtypeStruct(
        (512, 64), "float32", sharding=layout.of(jax.sharding.PartitionSpec(None, (specs.DATA, specs.TENSOR)))
    )
    tokens = jax.ShapeDtypeStruct((8, 32), "int32", sharding=layout.of(specs.ROWS))

    def loss(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return jnp.sum(layout.mesh.pinned(jnp.sin(table[tokens]), specs.RESIDUAL) ** 2)

    jax.jit(jax.grad(loss)).lower(table, tokens).compile()


def main() -> None:
    jax.config.update("jax_enable_compilation_cache", False)  # what is read from the disk warns of nothing
    data, tensor = map(int, sys.argv[1:3])
    layout = mesh.layout(data, tensor)
    for name in sys.argv[3:]:
        print(f"# {name}", file=sys.stderr, flush=True)
        if name == "control":
            control(layout)
        elif "pretrain" in name:
            pretrain_step(Path(name), data, tensor)
        else:
            gate_step(Path(name), layout)


if __name__ == "__main__":
    main()
