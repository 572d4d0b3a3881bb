"""Plans that compile: a sharded step of a small model for every generation of chips. ``-m aot``."""

from __future__ import annotations

import json

import jax
import pytest
from chips import chip_or_skip

import kvjax
from kvjax.models.hf_config import read_config
from kvjax.plan import __main__ as command
from kvjax.plan import _programs
from kvjax.plan._deployment import Deployment
from kvjax.sharding.mesh import mesh

pytestmark = pytest.mark.aot

SIZES = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
CHIPS = {"v5e": "--tpu v5e:2x2", "v6e": "--tpu v6e:2x2", "v5p": "--tpu v5p:2x2x1", "tpu7x": "--tpu 7x:2x2x1"}
CHIPS |= {"h200": "--gpu h200:4"}


@pytest.mark.parametrize("chip", CHIPS)
def test_a_step_for_several_chips_of_each_generation(chip, tmp_path, capsys):
    refused = chip == "h200" and jax.__version_info__ < (0, 8)
    if not refused:
        chip_or_skip(chip, None if chip != "h200" else "h200:4")
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    mesh = "tensor=8" if chip == "tpu7x" else "tensor=4"  # two devices a chip
    words = f"--policy snapkv+uniform(1024) --context 4096 --rows 4 --mesh {mesh}"
    out = tmp_path / "plan.json"
    code = command.main(["--model", str(tmp_path), *words.split(), *CHIPS[chip].split(), "--out", str(out)])
    if refused:
        assert code == 2
        assert "Plan for GPUs in an environment with a newer jax." in capsys.readouterr().err
        return
    message, plan = capsys.readouterr().out, json.loads(out.read_text())
    assert code == 0, message
    assert "fits" in message
    assert plan["compiled_layers"] == [2]
    assert plan["kernels"] == "xla"
    # Two products a layer and the embedding are summed, a few numbers beside them; no cache is moved.
    summed = [one for one in plan["collectives"] if one["nbytes"] == 4 * 1024 * 2]
    assert sum(one["count"] for one in summed) == 5
    assert {one["kind"] for one in summed} == {"all-reduce"}
    assert all(one["nbytes"] <= 4 * 4096 * 4 for one in plan["collectives"])
    step = plan["step"]
    assert 0 < step["live"] <= step["allocated"]
    assert step["weights"] + step["allocated"] < step["total"] < plan["memory"]


@pytest.mark.parametrize("policy", ["full", "snapkv + uniform(1024)"])
def test_what_is_extrapolated_is_what_the_whole_depth_has(policy):
    """Arguments, results and collectives to the byte; what lies between within a tenth, and little of all."""
    target = chip_or_skip("v5e", "v5e:2x2")
    spec = read_config(SIZES | {"num_hidden_layers": 8}, {}, "config")
    case = Deployment(spec, kvjax.policy(policy), mesh("data=2,tensor=2", devices=target.devices), 4, 8192)
    line, whole = (_programs.step(case, target, exact=exact) for exact in (False, True))
    assert line.depths == (1, 2)
    assert whole.depths == (8,)
    assert (line.arguments, line.padding) == (whole.arguments, whole.padding)
    assert (line.outputs, line.collectives) == (whole.outputs, whole.collectives)
    assert abs(line.temporary - whole.temporary) <= 0.01 * whole.arguments
