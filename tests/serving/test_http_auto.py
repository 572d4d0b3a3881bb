"""``auto(...)`` over HTTP: what measured best on the served model, from the file in its folder."""

from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("fastapi", reason="pip install 'kvjax[serve]'")

import kvjax
from kvjax.algebra import PolicyError
from kvjax.serve.http.arguments import parse, settled
from kvjax.serve.http.errors import ApiError, as_api_error
from kvjax.serve.http.log import Log
from kvjax.serve.http.service import AllowedPolicies
from kvjax.weights import _auto, fingerprint

ENTRY = {"length": 512, "protocol": "agnostic", "tasks": 3}
FRONT = [
    ENTRY | {"policy": "snapkv(32) + uniform(128)", "share": 0.25, "kept": 0.25, "score": 50.0},
    ENTRY | {"policy": "full", "share": 1.0, "kept": 1.0, "score": 100.0},
]


@pytest.fixture
def model(tiny_folder, tmp_path, monkeypatch):
    """The tiny model with measurements in its folder."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    model_there = kvjax.load(folder)
    facts = {"fingerprint": fingerprint(model_there), "command": "python -m it", "model": "tiny"}
    (folder / "front.json").write_text(json.dumps(facts | {"front": FRONT}))
    monkeypatch.setattr(_auto, "SHIPPED", ())
    return model_there


def test_a_request_may_ask_for_what_measured_best(model):
    lines: list[bytes] = []
    log = Log(lines.append)
    policies = AllowedPolicies(model, "full", None, log)
    assert policies.policy("auto(0.25)") == kvjax.policy("snapkv(32) + uniform(0.25)")
    assert policies.policy("auto(0.25)") is policies.policy("auto(0.25)")
    assert log.flush(10)
    (note,) = [json.loads(line)["text"] for line in lines]
    assert "measured on this model (python -m it)" in note


def test_it_may_be_the_servers_own_policy_and_among_those_allowed(model):
    options = parse(["--policy", "auto(0.25)", "--allow-policies", "auto(1); window(16)"])
    policies = AllowedPolicies(model, options.policy, options.allow_policies, Log())
    assert settled(options, policies.default).policy == kvjax.policy("snapkv(32) + uniform(0.25)")
    assert policies.allowed == ["snapkv(32) + uniform(0.25)", "full", "window(16)"]
    assert policies.policy("auto(0.5)") == kvjax.policy("snapkv(32) + uniform(0.5)")
    only = AllowedPolicies(model, "full", ["window(16)"], Log())
    with pytest.raises(ApiError, match="not among the policies") as refused:
        only.policy("auto(0.25)")
    assert refused.value.status_code == 403


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"front": [{}]}', '{"front": [{"policy": "snapkw"}]}'])
def test_damaged_measurements_are_the_callers_400_and_no_fault(model, content):
    (model.folder / "front.json").write_text(content)
    with pytest.raises(PolicyError, match=r"front.json .* cannot be used .* or name a policy") as refused:
        AllowedPolicies(model, "full", None, Log()).policy("auto(0.25)")
    assert as_api_error(refused.value).status_code == 400
    assert as_api_error(refused.value).code == "invalid_policy"


def test_the_engine_takes_it_too(model):
    with kvjax.engine.Engine(model, policy="auto(0.25)", context=96) as engine:
        assert engine.policy == kvjax.policy("snapkv(32) + uniform(0.25)")
