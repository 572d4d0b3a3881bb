"""A step over two devices is the step of one, and one device reads what two have saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from kvjax.models import module
from train import loop
from train.embedded.setup import model_spec

ROOT = Path(__file__).parents[2]
TWO = f"--xla_force_host_platform_device_count=2 {os.environ.get('XLA_FLAGS', '')}"
STEP = """
import json
import sys
from pathlib import Path
import jax
import numpy as np
import optax
from flax import nnx
from kvjax.models import module
from train import loop
from train.embedded import data, data_parallel, pretrain, speed
from train.embedded.setup import model_spec
from train.rows import ANSWER

spec = model_spec(json.loads(sys.argv[2]))
params = module.leaves(module.Decoder(spec, rngs=nnx.Rngs(params=0)))
rng = np.random.default_rng(1)

def part():
    ids = rng.integers(3, 64, (2, 32)).astype(np.int32)
    weight = np.where(np.arange(32) % 8 > 5, ANSWER, 0.5) * np.ones((2, 1))
    return {"tokens": ids, **data.choose_scored(rng, ids, weight, 24)}

cut = [part(), part()]
loss = pretrain.make_quick_loss(spec)
grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
alone = [grad(params, one) for one in cut]
where = data_parallel.make_layout(2)
whole = {name: np.stack([one[name] for one in cut]) for name in cut[0]}
state = where.settle(loop.State(params=params, opt=optax.sgd(1.0).init(params)))
shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
step = loop.make_step(optax.sgd(1.0), shardings)
before = jax.device_get(state.params)
after, seen = step(jax.tree_util.Partial(data_parallel.mean_loss(loss, where)), state, where.batch(whole))
difference = 0.0
means = jax.tree.map(lambda a, b: (a + b) / 2, alone[0][1], alone[1][1])
for was, now, mean in zip(*map(jax.tree.leaves, (before, jax.device_get(after.params), means))):
    difference = max(difference, float(np.abs((was - now) - mean).max()))
print(json.dumps({"loss": float(seen["loss"]), "mean": (float(alone[0][0][0]) + float(alone[1][0][0])) / 2,
                  "difference": difference, "norm": float(seen["grad_norm"]),
                  "after": [float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(after.params)]}))
loop.Checkpoints(Path(sys.argv[1]), keep=1).save(1, after, 0)
"""
SIZES = {"vocab_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "model_dim": 32,
         "mlp_dim": 48, "max_positions": 64, "theta": 1e4}  # fmt: skip


def stepped(folder: Path) -> dict[str, Any]:
    """What a process with two devices says of its step, which it saves."""
    run = subprocess.run(
        [sys.executable, "-c", STEP, str(folder), json.dumps(SIZES)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": TWO},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.strip().splitlines()[-1])


def read(folder: Path) -> list[np.ndarray]:
    """The weights that were saved, by this process and its one device."""
    assert jax.device_count() == 1
    params = module.leaves(module.Decoder(model_spec(SIZES), rngs=nnx.Rngs(params=0)))
    # Numpy leaves: they lie nowhere yet.
    like = loop.State(params=jax.device_get(params), opt=optax.sgd(1.0).init(params))
    _, state, _ = loop.Checkpoints(folder, keep=0, read_only=True).latest(like)
    return jax.tree.leaves(state.params)


@pytest.mark.slow
def test_two_devices_add_the_gradients_of_their_parts_and_one_goes_on_from_there(tmp_path):
    numbers = stepped(tmp_path)
    np.testing.assert_allclose(numbers["loss"], numbers["mean"], rtol=1e-5)
    assert numbers["difference"] < 1e-5 * max(1.0, numbers["norm"])
    np.testing.assert_allclose([np.abs(x).sum() for x in read(tmp_path)], numbers["after"], rtol=1e-5)
