"""A step over two devices is the step of one: losses and gradients are the mean over the parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
TWO = f"--xla_force_host_platform_device_count=2 {os.environ.get('XLA_FLAGS', '')}"
PROGRAM = """
import json
import jax
import numpy as np
import optax
from flax import nnx
from kvjax.models import module
from train import data, loop, parts, pretrain, speed
from train.setup import model_spec

SIZES = {"vocab_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "model_dim": 32,
         "mlp_dim": 48, "max_positions": 64, "theta": 1e4}
spec = model_spec(SIZES)
params = module.leaves(module.Decoder(spec, rngs=nnx.Rngs(params=0)))
rng = np.random.default_rng(1)

def part():
    ids = rng.integers(3, 64, (2, 32)).astype(np.int32)
    weight = np.where(np.arange(32) % 8 > 5, data.ANSWER, 0.5) * np.ones((2, 1))
    return {"tokens": ids, **data.choose_scored(rng, ids, weight, 24)}

cut = [part(), part()]
loss = pretrain.make_quick_loss(spec)
alone = [jax.value_and_grad(loss, has_aux=True)(params, one) for one in cut]
where = parts.parts(2)
whole = {name: np.stack([one[name] for one in cut]) for name in cut[0]}
state = where.settle(loop.State(params=params, opt=optax.sgd(1.0).init(params)))
shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
step = loop.make_step(optax.sgd(1.0), shardings)
before = jax.device_get(state.params)
after, seen = step(jax.tree_util.Partial(parts.over(loss, where)), state, where.batch(whole))
apart = 0.0
means = jax.tree.map(lambda a, b: (a + b) / 2, alone[0][1], alone[1][1])
for was, now, mean in zip(*map(jax.tree.leaves, (before, jax.device_get(after.params), means))):
    apart = max(apart, float(np.abs((was - now) - mean).max()))
print(json.dumps({"loss": float(seen["loss"]), "mean": (float(alone[0][0][0]) + float(alone[1][0][0])) / 2,
                  "apart": apart, "norm": float(seen["grad_norm"])}))
"""


def test_two_devices_add_the_gradients_of_their_parts():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"XLA_FLAGS": TWO, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.strip().splitlines()[-1])
    np.testing.assert_allclose(found["loss"], found["mean"], rtol=1e-5)
    assert found["apart"] < 1e-5 * max(1.0, found["norm"])
