"""States on several devices give what one device gives; meshes that do not fit are refused beforehand."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import launch, layer
from kvjax.cache import hosted as hosting
from kvjax.cli import InputError
from kvjax.eval import commands
from kvjax.models import hf
from kvjax.serve import command as serving
from kvjax.serve.arguments import parse
from kvjax.sharding import lost
from kvjax.sharding.mesh import ONE, Mesh, MeshError
from kvjax.sharding.specs import AXES, of_learned

HERE = Path(__file__).parent
CLOSE = 5e-5
CANCELS = 1e-3
"""φ of random maps makes of visited tokens far more than they are: what is left of its summary is rounding.
Chunk borders alone move the same steps on one device; with a model in float64 nothing of it is left."""

FLOAT16 = 2e-3
"""KIVI rounds a group's lowest value and step outwards to float16: rounding in float32 may move them by a
thousandth. Logits moved by 0.0009."""


def lived(*words: str, processes: int = 1, program: str = "mesh_run.py", devices: int = 4) -> list[dict]:
    """What a program found, in one process of eight devices or in two."""
    together = ["-m", "kvjax.launch", "--local", str(processes), "--devices", str(devices), "--"]
    command = [sys.executable, *(together if processes > 1 else []), str(HERE / program), *words]
    path = os.pathsep.join([str(HERE.parent), str(HERE)])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(lines: list[dict]) -> None:
    assert lines
    for one in lines:
        assert "error" not in one, one
        assert len({*one["models"]}) == 1, one  # fingerprints
        # Kept sets first: where they differ logits tell nothing.
        assert one["kept"] == [0, 0], one
        assert one["text"] == 0, one
        completed = "topk" in one["policy"] and "phi" in one["policy"]
        bound = CANCELS if completed else FLOAT16 if "kivi" in one["policy"] else CLOSE
        assert one["logits"] <= bound, one
        assert min(one["held"]) > 0


# Heads that share a layer's slots; the prompt is ranked whole, what is held again; steps read ring and pages.
SHARED = "snapkv(6) + ada(20, when=every(4))"
CONF = "conf_kv(0.8, gamma=0.9, recent=4) + confidence(18, loose=26, threshold=0.5) + int8(8)"
GATES = "write_gate(0.5, window=12) + int8(8) + sinks(2)"


def test_a_mesh_gives_what_one_device_gives():
    check(lived("data=2,tensor=4", "--only", SHARED))


def test_experts_and_sinks_on_a_mesh():
    check(lived("tensor=2,context=2", "--heads", "2", "--experts", "--only", SHARED))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,tensor=4", "data=4,tensor=2", "tensor=8"])
def test_every_policy_on_a_mesh(mesh):
    check(lived(mesh))


@pytest.mark.slow
def test_every_policy_with_fewer_heads_than_devices():
    check(lived("tensor=2,context=4", "--heads", "2"))


@pytest.mark.slow
def test_two_processes_give_what_one_gives():
    check(lived("data=2,tensor=4", "--only", SHARED, CONF, GATES, processes=2))


@pytest.mark.slow
def test_no_step_moves_a_pool_between_devices():
    policies = ("full", CONF, "topk(5, sinks=2, tail=6)", SHARED, GATES)
    lines = lived("data=2,tensor=4", "--moved", "--only", *policies)
    assert len(lines) == len(policies)
    scores = "all-gather [2,8,262]"
    for one in lines:
        # Two products a layer and the embedding; what policies reduce over heads: never an axis of heads, of
        # pages or of channels. But a budget that heads share compares their scores, a float a slot.
        assert one["moved"].count("all-reduce [2,1,32]") == 5, one
        assert one["moved"].count(scores) == (2 if one["policy"] == SHARED else 0), one
        reduced = re.compile(r"all-\w+ \[(\d+(,\d+)?|\d+,1,\d+)\]")
        assert not [x for x in one["moved"] if x != scores and not reduced.fullmatch(x)], one


HOSTED = (
    "quest(3, chunk=4, dense=1, recent=8)",
    "topk(5, sinks=2, tail=6)",
    "quest(3, chunk=4, dense=0, recent=8) + int8(8)",
    "snapkv(8) + quest(2, chunk=4, dense=0, recent=8) + uniform(30)",
    "write_gate(0.5, window=16) + quest(2, chunk=4, dense=0, recent=8) + sinks(2)",
    "topk(5, sinks=2, tail=6) + phi(4)",
)


@pytest.mark.slow
@pytest.mark.skipif(bool(hosting.absent()), reason=hosting.absent())
@pytest.mark.parametrize(
    "words", [("data=2,tensor=4",), ("tensor=2,context=2", "--heads", "2")], ids=["tensor", "context"]
)
def test_pages_in_host_memory_change_nothing_on_a_mesh_either(words):
    lines = lived(*words, "--hosted", "--only", *HOSTED)
    assert len(lines) == len(HOSTED)
    for one in lines:
        assert one["logits"] == 0, one
        assert one["kept"] == [0, 0], one
        assert min(one["owned"]) > 0, one


@pytest.mark.slow
def test_evaluations_measure_on_a_mesh_what_they_measure_on_one_device():
    for one in lived("data=2,tensor=4", "--measured", "--only", SHARED, "duo(0.5, window=12, prefill=False)"):
        assert one.pop("policy")
        assert one.pop("held") > 500
        assert one.pop("nll") <= CLOSE
        assert set(one.values()) == {0.0}, one  # what is held, and what is read


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_state_saved_on_one_mesh_opens_on_another(processes):
    others = ["data=4,tensor=2"] if processes > 1 else ["data=1", "tensor=2", "data=4,tensor=2"]
    lines = lived("data=2,tensor=4", *others, "--saved", "--only", SHARED, "int8(16)", processes=processes)
    assert len(lines) == 2 * (2 + len(others))  # on its own mesh, on the others, forked
    for one in lines:
        assert one["streams"] == 0, one
        assert one["logits"] <= (0 if one["to"] == lines[0]["to"] and not one["forked"] else CLOSE), one


@pytest.mark.slow
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2)])
def test_what_processes_save_others_open(writers, readers, tmp_path):
    words = ("data=2,tensor=4", SHARED, "int8(16)", CONF)
    wrote = lived("write", str(tmp_path), *words, processes=writers, program="saved_run.py")
    said = "disk full" if writers == 1 else f"save('{tmp_path}/0'): process 1 could not write its part"
    assert said in wrote.pop()["refused"]
    assert [one.name for one in sorted(tmp_path.iterdir())] == ["0", "1", "2"]
    assert [one.is_dir() for one in sorted(tmp_path.iterdir())] == [writers > 1] * 3
    meshes = ("data=2,tensor=4", "data=4,tensor=2", *(["data=1", "tensor=2"] if readers == 1 else []))
    read = lived("read", str(tmp_path), *meshes, processes=readers, program="saved_run.py")
    assert len(read) == len(meshes) * len(wrote)
    for one in read:
        saved = wrote[int(one["at"])]
        assert one["rows"] == saved["rows"] == [45, 30, 38, 25]
        assert one["held"] == saved["held"]
        assert np.abs(np.subtract(one["logits"], saved["logits"])).max() <= CLOSE


# --- processes that differ -----------------------------------------------------------------------


KEPT = "window(8) + sinks(2)"
GIVEN_OTHERS = "process 1 got other arguments than process 0: "


def states(folder: Path) -> None:
    """Two states of the tiny model, that differ in a token."""
    folder.mkdir()
    for name, last in (("first", 1), ("other", 2)):
        options = {"context": 64, "page": 8, "chunk_size": 16}
        state, _ = kvjax.prefill(tiny.model(), KEPT, [[*tiny.prompt(15), last]], **options)
        kvjax.save(state, folder / name, model=tiny.model(), policy=KEPT)


@pytest.mark.slow
def test_processes_that_were_given_different_things_are_refused(tmp_path):
    golden = HERE / "golden" / "llama_tied"
    model = hf.load(golden)
    params = jax.tree.map(lambda x: x, model.params)
    params["layers"][1]["wq"] = params["layers"][1]["wq"] * 1.01
    hf.save(tmp_path / "trained", model.spec, params, dtype=str(params["embed"].dtype))
    hf.save(tmp_path / "first", model.spec, model.params, dtype=str(params["embed"].dtype))
    states(tmp_path / "states")
    folders = [str(tmp_path / name) for name in ("first", "trained", "states")]
    [refusals] = lived(*folders, processes=2, program="consistency_run.py", devices=1)
    assert refusals.pop("read") == refusals.pop("text") == "True"
    assert "is in another call than process 0" in refusals.pop("call")
    assert {name: said.partition(GIVEN_OTHERS)[2].partition(".")[0] for name, said in refusals.items()} == {
        "versions": f"the version of numpy (here '{np.__version__.partition('.')[0]}",
        "files": "the weights",
        "dtype": "the dtype (here 'float32')",
        "weight_dtype": "the weight_dtype (here 'int8')",
        "model": "the model (here " + refusals["model"].partition("(here ")[2].partition(".")[0],
        "policy": "the policy (here 'snapkv(8) + uniform(24)')",
        "prompts": "the prompts",
        "context": "the sizes and seeds (here (64, 256, None, 0))",
        "weights": "the learned weights",
        "mesh": "the mesh (here 'data=1,tensor=2,context=1')",
        "extend": "the prompts",
        "extend_policy": f"the policy (here {KEPT!r})",
        "open": "the file",
        "open_none": "the file",
        "open_label": "the label (here '')",
        "open_mesh": "the mesh (here 'data=1,tensor=2,context=1')",
        "save": "what is beside it",
        "save_path": "the path",
        "sampling": "the sampling",
        "two": "the policy and the sizes and seeds (here 'full', (64, 256, None, 0))",
    }


# --- refused -------------------------------------------------------------------------------------


def grid(**sizes: int) -> Mesh:
    """A mesh of devices that are not here, for what looks at sizes alone."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return Mesh(jax.sharding.AbstractMesh(shape, AXES))  # type: ignore[arg-type]


def test_one_device_is_no_mesh():
    assert kvjax.mesh() == kvjax.mesh("data=1") == ONE
    assert kvjax.mesh(tensor=1, context=1) == ONE
    assert kvjax.mesh(ONE) is ONE


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("data", r"'data' is not an axis and its size. Write it as 'data=2,tensor=4'"),
        ("data=2.5", "'data=2.5' is not an axis"),
        ("rows=2", r"'rows' is not an axis. The axes are data, tensor, context"),
        ("data=0", "data=0 is not a number of devices"),
        ("tensor=4096", r"mesh\('tensor=4096'\) needs 4096 devices, .* are here. Make the axes smaller"),
    ],
)
def test_a_mesh_that_cannot_be_made_is_refused(name, said):
    with pytest.raises(MeshError, match=said):
        kvjax.mesh(name)


@pytest.mark.parametrize(
    ("sizes", "rows", "said"),
    [
        ({"data": 2}, 3, "data=2 does not divide 3 rows. Give a multiple of 2 rows"),
        ({"tensor": 4}, 2, "tensor=4 does not divide the model's 2 KV heads. Take tensor=2,context=2"),
        ({"tensor": 2, "context": 4}, 2, "tensor=2 x context=4 does not divide the model's 4 query heads"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused_before_anything_runs(monkeypatch, sizes, rows, said):
    monkeypatch.setattr(jax, "jit", None)
    network = tiny.model().network
    with pytest.raises(MeshError, match=re.escape(said)):
        grid(**sizes).check("prefill", rows=rows, heads=network.num_heads, kv_heads=network.num_kv_heads)


def test_experts_that_do_not_divide_are_refused():
    said = "tensor=2 x context=2 does not divide the model's 6 experts. Take fewer devices along these axes"
    with pytest.raises(MeshError, match=re.escape(said)):
        kvjax.load(HERE / "golden" / "qwen3_moe", mesh=grid(tensor=2, context=2))


def test_prefill_refuses_rows_that_do_not_divide():
    with pytest.raises(MeshError, match="prefill: data=2 does not divide 3 rows"):
        kvjax.prefill(tiny.model(), "full", [tiny.prompt(4)] * 3, mesh=grid(data=2))


def test_load_refuses_heads_that_do_not_divide_before_it_reads(monkeypatch):
    monkeypatch.setattr(hf, "read_weights", None)
    with pytest.raises(MeshError, match=r"load\(.*\): tensor=3 does not divide the model's 4 KV heads"):
        kvjax.load(mesh=grid(tensor=3))


def test_commands_of_one_process_are_refused_in_several(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(serving, "load_model", None)
    with pytest.raises(InputError, match="kvjax.eval runs in one process, and these are 2. Start it without"):
        commands.model_of({"model": "embedded"})
    with pytest.raises(InputError, match="a chat runs in one process, and these are 2"):
        serving.run(parse([]))


def test_what_is_cut_and_what_is_whole():
    mesh, network = grid(tensor=2, context=2), tiny.model().network
    specs = mesh.of_model(network, tiny.model().params)
    layer = specs["layers"][0]
    assert layer["wk"] == jax.P(("tensor",), None, None)
    assert layer["wq"] == jax.P(("tensor", "context"), None, None)
    assert layer["attn_norm"] == jax.P()
    assert specs["embed"] == jax.P()  # 61 tokens divide by nothing


def test_learned_weights_lie_by_head():
    network = types.SimpleNamespace(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
    policy = kvjax.policy("write_gate(0.1) + phi(4) + kvp + uniform(0.25)")
    shown = {part.place: part.weight_shapes(network) for part in policy.learned}
    specs = layer.of_learned(policy, shown)
    assert specs["admission"][1]["w1"] == specs["completion"][1]["line_q"] == jax.P("tensor")
    assert specs["admission"][0]["norm"] == specs["completion"][0]["length"] == jax.P()  # of all heads
    assert {*jax.tree.leaves(specs["eviction"])} == {jax.P("tensor")}
    # Which of all heads retrieve is decided by all layers together; what comes of it is each head's own.
    duo, alpha = kvjax.policy("duo(0.5)"), [{"alpha": np.zeros(2)}] * 2
    assert {*jax.tree.leaves(layer.of_learned(duo, {"admission": alpha}))} == {jax.P()}
    of_layer = duo.admission.at_layer(alpha, 0)
    assert of_learned(duo.parts, {"admission": of_layer}) == {"admission": {"retrieves": jax.P("tensor")}}
    rows = of_learned(duo.parts, {"admission": layer.OfRows(of_layer)})["admission"]
    assert rows.tree == {"retrieves": jax.P("data", "tensor")}


# --- launching -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--local", "2"], "launch has no program to run"),
        (["--local", "2", "--process-id", "0", "--", "x.py"], "--local starts all processes itself"),
        (["--devices", "2", "--", "x.py"], "--devices makes virtual devices for processes of this machine"),
        (["--coordinator", "here:1", "--", "x.py"], "go together. Give all three"),
        (["--local", "0", "--", "x.py"], "--local 0 is out of range"),
    ],
)
def test_a_launch_that_makes_no_sense_is_refused(capsys, words, said):
    assert launch.main(words) == 2
    assert said in capsys.readouterr().err


def test_only_what_the_program_prints_is_shown():
    pieces = iter([b"[Gloo] Rank ", b"0 is connected\n{1}\nmore ", b"[Gloo]\nend", b""])
    source, shown = types.SimpleNamespace(read1=lambda: next(pieces)), io.StringIO()
    launch.pass_on(source, shown)
    assert shown.getvalue() == "{1}\nmore [Gloo]\nend"


def test_a_second_signal_does_not_leave_processes_behind():
    """``timeout`` sends its own beside the terminal's; what ends the others must go on."""
    sleepers = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    before = signal.signal(signal.SIGTERM, launch.stop)
    try:
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        launch.end(sleepers)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert all(process.returncode is not None for process in sleepers)


@pytest.mark.slow
def test_a_killed_process_of_a_running_program_is_named(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, time, jax\n"
        "jax.process_index() and os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "kvjax.launch", "--local", "2", "--devices", "1", "--", str(program)]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert "error: process 1 was killed by SIGKILL; the others were ended." in done.stderr


@pytest.mark.parametrize("said", [b"", struct.pack("!I", 7)], ids=["closed", "told"])
def test_a_lost_process_is_told_to_all_others(said, monkeypatch):
    """Sockets of two others: one closes without a word, or says who was lost."""
    mine, theirs = zip(*(socket.socketpair() for _ in range(2)))
    ended = []

    def end(number: int) -> None:
        ended.append(number)
        sys.exit()

    monkeypatch.setattr(lost, "_links", {mine[0]: 3, mine[1]: 5})
    monkeypatch.setattr(lost, "_end", end)
    theirs[0].sendall(said)
    theirs[0].close()
    with pytest.raises(SystemExit):
        lost._listen()
    assert ended == [7 if said else 3]
    theirs[1].settimeout(5)
    assert theirs[1].recv(4) == struct.pack("!I", ended[0])


def test_processes_that_end_by_themselves_are_not_lost(monkeypatch):
    mine, theirs = zip(*(socket.socketpair() for _ in range(2)))
    monkeypatch.setattr(lost, "_links", dict(zip(mine, (1, 2))))
    monkeypatch.setattr(lost, "_end", None)
    for one in theirs:
        one.sendall(struct.pack("!I", lost.BYE))
        one.close()
    lost._listen()


def test_only_processes_that_know_the_key_are_connected(monkeypatch):
    monkeypatch.setattr(lost, "CONNECT", 5.0)
    with lost._listener("localhost") as listener:
        address = listener.getsockname()
        words = [b"GET / HTTP/1.1", struct.pack("!3I", 1, 3, 1), struct.pack("!3I", 1, 2, 4)]
        callers = [socket.create_connection(address) for _ in words]
        for caller, word in zip(callers, words):
            caller.sendall(word)
        assert list(lost._accepted(listener, [1, 2], 1).values()) == [4]


DECODES = """
import jax, kvjax
model = kvjax.load(mesh="tensor=2")
for turn in range(1000):
    kvjax.generate(model, "full", [[5, 6, 7, 8]], max_new_tokens=32, stops=())
    if jax.process_index() == 0:
        print("decoding", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_without_the_launcher_a_killed_process_ends_the_others_with_a_sentence(victim, tmp_path):
    (tmp_path / "program.py").write_text(DECODES)
    with socket.create_server(("localhost", 0)) as free_port:
        port = free_port.getsockname()[1]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
    start = [
        sys.executable,
        "-m",
        "kvjax.launch",
        "--coordinator",
        f"localhost:{port}",
        "--num-processes",
        "2",
    ]
    running = []
    for index in range(2):
        command = [*start, "--process-id", str(index), "--", str(tmp_path / "program.py")]
        to = {"stdout": subprocess.PIPE, "stderr": (tmp_path / f"{index}").open("w"), "text": True}
        running.append(subprocess.Popen(command, cwd=HERE.parent, env=os.environ | flags, **to))
    try:
        said = (line for line in running[0].stdout if line.startswith("decoding"))
        assert [next(said) for _ in range(2)]
        running[victim].kill()
        assert running[1 - victim].wait(timeout=15) == 1
    finally:
        launch.end(running)
    sentence = (
        f"error: process {victim} of this program was lost, and the others end. Start all of them again."
    )
    lines = (tmp_path / f"{1 - victim}").read_text().splitlines()
    assert lines[-1] == sentence
    assert not any("Traceback" in line for line in lines), lines  # what XLA says as it starts is not ours


# --- the example of docs/devices.md, with the gates that the embedded model ships ----------------


EXAMPLE = (
    "python -m kvjax.launch --local 2 --devices 4 -- -m kvjax.serve --mesh tensor=2,context=4 --prompt Hello"
)


def run(command: str) -> str:
    program = [sys.executable, *command.split()[1:]]
    done = subprocess.run(program, cwd=HERE.parent, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_example_of_the_document_serves_with_shipped_gates():
    assert f"    {EXAMPLE}\n" in (HERE.parent / "docs" / "devices.md").read_text()
    options = "--prompt Hello --policy wg-kv --max-new-tokens 12"
    text = run(f"{EXAMPLE} {options.partition('Hello ')[2]}")
    assert text == run(f"python -m kvjax.serve {options}")
    assert text.strip()


@pytest.mark.slow
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2)])
def test_a_state_of_shipped_gates_is_opened_by_other_processes(writers, readers, tmp_path):
    mesh, file = {1: "data=1", 2: "tensor=2,context=4"}, tmp_path / "state"
    [wrote] = lived(str(file), "write", mesh[writers], processes=writers, program="gates_run.py")
    assert file.is_dir() == (writers > 1)
    [read] = lived(str(file), "read", mesh[readers], processes=readers, program="gates_run.py")
    assert read == wrote
    assert wrote["model"] == "be1f086e2ec6727b"


def test_a_killed_process_ends_the_others_and_is_named():
    wait = [sys.executable, "-c", "import time; time.sleep(60)"]
    running = [subprocess.Popen(wait) for _ in range(2)]
    os.kill(running[1].pid, signal.SIGKILL)
    begun = time.monotonic()
    bad = launch.first_to_fail(running)
    launch.end(running)
    assert bad == 1
    assert launch.outcome(running[1]) == "was killed by SIGKILL"
    assert all(process.returncode is not None for process in running)
    assert time.monotonic() - begun < launch.GRACE + 1
