"""States on disk: every stream as it was, decoding goes on, and files that do not belong here are refused."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import decode
from kvjax.cache.pool import size_class
from kvjax.saving import StateError, _read
from kvjax.saving import _device_parts as device_parts
from kvjax.saving._atomic import check_place
from kvjax.saving._write import _write, write_part
from kvjax.sharding.mesh import Mesh, MeshError, sizes_of
from kvjax.sharding.reshard import _divided, on_host
from kvjax.sharding.specs import AXES, of_state

SPECS = (
    "full",
    "window(8) + sinks(2)",
    "int8(8)",
    "quest(3, chunk=4, recent=8)",
    "conf_kv(recent=8) + int8(12) + confidence(20, loose=31)",
)
QUICK = SPECS[2:4]


def read(spec: str) -> kvjax.KVState:
    """Two rows of different lengths."""
    policy = kvjax.policy(spec)
    prompts = [tiny.prompt(41, 1), tiny.prompt(23, 2)]
    how = {"context": 72, "chunk_size": 16, "page": tiny.PAGE, "weights": tiny.weights(policy)}
    return kvjax.prefill(tiny.model(), policy, prompts, **how)[0]


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=[] if spec in QUICK else pytest.mark.slow) for spec in SPECS]
)
def test_a_state_comes_back_and_goes_on(spec, tmp_path):
    state, policy, file = read(spec), kvjax.policy(spec), tmp_path / "state"
    extra = {"tokens": np.arange(5)}
    kvjax.save(state, file, model=tiny.model(), policy=policy, extra=extra, notes={"name": "book"})
    opened = kvjax.open(file, model=tiny.model(), policy=policy, label="")
    assert opened.policy == policy
    assert opened.notes == {"name": "book"}
    np.testing.assert_array_equal(opened.extra["tokens"], extra["tokens"])
    for layer, other in zip(state.layers, opened.state.layers, strict=True):
        assert jax.tree.structure(layer.ring) == jax.tree.structure(other.ring)
        jax.tree.map(np.testing.assert_array_equal, layer.ring, other.ring)
        for pages, others in zip(layer.pools, other.pools, strict=True):
            tiny.owned_once(others)
            np.testing.assert_array_equal(pages.length, others.length)
        held, again = tiny.held(*layer.pools), tiny.held(*other.pools)
        assert held.keys() == again.keys()
        for stream, slots in held.items():
            assert slots.keys() == again[stream].keys()
            for pos, values in slots.items():
                for value, theirs in zip(values, again[stream][pos]):
                    np.testing.assert_array_equal(value, theirs)
    assert kvjax.nbytes(opened.state).total["live"] == kvjax.nbytes(state).total["live"]
    tokens = np.asarray([tiny.prompt(6, 3), tiny.prompt(6, 4)])
    states = [decode.reserve(policy, one, 8, 1) for one in (state, opened.state)]
    (_, one), (_, two) = (tiny.feed(policy, each, tokens) for each in states)
    np.testing.assert_allclose(one, two, atol=2e-5)


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    state, file = read("full"), tmp_path / "state"
    save = {"model": tiny.model(), "policy": "full"}
    kvjax.save(state, file, **save)
    before = file.read_bytes()

    def breaks(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", breaks)
    with pytest.raises(OSError, match="disk full"):
        kvjax.save(state, file, **save)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> bytes:
    file = tmp_path_factory.mktemp("state") / "state"
    kvjax.save(read("full"), file, model=tiny.model(), policy="full", label="gates@1")
    return file.read_bytes()


def head(content: bytes, **changes) -> bytes:
    """The file with another word in its head."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    fields = json.loads(header["__metadata__"]["head"]) | changes
    header["__metadata__"]["head"] = json.dumps(fields)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda x: b"", "is not a saved state"),
        (lambda x: b"PK\3\4 something else entirely", "is not a saved state"),
        (lambda x: x[:60], "is not a saved state"),
        (lambda x: x[:-9], "cut off or damaged"),
        (lambda x: x[:-9] + bytes(9), "is not what was written"),
        (lambda x: head(x, version=3), "format 3"),
        (lambda x: head(x, format="other"), "is not a saved state"),
        (lambda x: head(x, model="0" * 16), "another model"),
        (lambda x: head(x, dtype="bfloat16"), "Load it as bfloat16"),
        (lambda x: head(x, policy="telepathy(3)"), "unknown here"),
    ],
)
def test_what_does_not_belong_here_is_refused(content, damage, words, tmp_path):
    file = tmp_path / "state"
    file.write_bytes(damage(content))
    with pytest.raises(StateError, match=words):
        kvjax.open(file, model=tiny.model())


def test_other_policies_weights_and_states_are_refused(content, tmp_path):
    file = tmp_path / "state"
    file.write_bytes(content)
    with pytest.raises(StateError, match="cannot continue it"):
        kvjax.open(file, model=tiny.model(), policy="window(8)")
    with pytest.raises(StateError, match="weights gates@1, not with none"):
        kvjax.open(file, model=tiny.model(), label="")
    with pytest.raises(StateError, match="cannot be read"):
        kvjax.open(tmp_path / "nothing", model=tiny.model())
    state = read("full")
    with pytest.raises(StateError, match="was made under 'full'"):
        kvjax.save(state, file, model=tiny.model(), policy="window(8)")
    state.length.delete()
    with pytest.raises(StateError, match="donated"):
        kvjax.save(state, file, model=tiny.model(), policy="full")


# --- in parts, as several processes write them ---------------------------------------------------


def parted(state: kvjax.KVState, file, folder, sizes: str) -> None:
    """The state of a file as the devices of a mesh would write it, each its block."""
    (arrays, fields), mesh = _read._read(file), sizes_of(sizes)
    layers = [on_host(cache, state.mesh) for cache in state.layers]
    layers = [
        cache.with_pools([_divided(pages, mesh, size_class) for pages in cache.pools]) for cache in layers
    ]
    shared = {name: x for name, x in arrays.items() if not name[0].isdigit()}

    def block_of(x: np.ndarray, spec: jax.P, block: device_parts.Block) -> np.ndarray:
        return np.split(x, block.of)[block.at] if spec == jax.P(("data", "tensor")) else x[block.index]

    folder.mkdir()
    for block in device_parts.blocks(mesh, state.rows, state.layers[0].ring.k.shape[1]):
        own = [jax.tree.map(lambda x, s, b=block: block_of(x, s, b), one, of_state(one)) for one in layers]
        write_part(
            folder, block, shared, own, {n: fields[n] for n in fields if n not in ("layers", "digest")}
        )


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=[] if spec == SPECS[2] else pytest.mark.slow) for spec in SPECS]
)
def test_parts_are_together_what_one_file_holds(spec, tmp_path):
    state, file, folder = read(spec), tmp_path / "state", tmp_path / "parts"
    options = {"model": tiny.model(), "policy": spec, "extra": {"tokens": np.arange(5)}, "notes": {"a": "b"}}
    kvjax.save(state, file, **options)
    one, head_of_one = _read._read(file)
    # Devices of one stream, and of two that stand apart in the file.
    for sizes in ("data=2,tensor=2", "tensor=2"):
        shutil.rmtree(folder, ignore_errors=True)
        parted(state, file, folder, sizes)
        many, head_of_many = _read._read(folder)
        assert one.keys() == many.keys()
        for name, value in one.items():
            np.testing.assert_array_equal(value, many[name], err_msg=name)
            assert value.dtype == many[name].dtype
        own = {name: head_of_one[name] for name in ("version", "digest")}
        assert head_of_many | own == head_of_one
    opened = kvjax.open(folder, model=tiny.model())
    assert opened.notes == {"a": "b"}
    np.testing.assert_array_equal(opened.extra["tokens"], np.arange(5))
    kvjax.save(opened.state, folder, **options)  # a file in place of the folder
    assert _read._read(folder)[1] == head_of_one
    assert {one.name for one in tmp_path.iterdir()} == {"state", "parts"}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    home = tmp_path_factory.mktemp("parts")
    state = read("full")
    kvjax.save(state, home / "state", model=tiny.model(), policy="full")
    parted(state, home / "state", home / "parts", "data=2,tensor=2")
    return home / "parts"


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda files: files[1].unlink(), "has 3 of its 4 parts"),
        (lambda files: [file.unlink() for file in files], "is a folder without a saved state"),
        (lambda files: files[2].write_bytes(files[2].read_bytes()[:-9]), "cut off or damaged"),
        (lambda files: files[0].write_bytes(head(files[0].read_bytes(), context=80)), "of different states"),
        (lambda files: files[3].write_bytes(head(files[3].read_bytes(), version=3)), "format 3"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(parts, harm, words, tmp_path):
    shutil.copytree(parts, tmp_path / "state")
    harm(sorted((tmp_path / "state").iterdir()))
    with pytest.raises(StateError, match=words):
        kvjax.open(tmp_path / "state", model=tiny.model())


def test_a_part_is_no_state_and_a_folder_of_other_things_is_left_alone(parts, tmp_path):
    with pytest.raises(StateError, match="one part of a state, of 4. Open its folder"):
        kvjax.open(sorted(parts.iterdir())[0], model=tiny.model())
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "home").write_text("dear")
    with pytest.raises(StateError, match="is a folder, and holds more than a state"):
        kvjax.save(read("full"), tmp_path / "letters", model=tiny.model(), policy="full")
    assert (tmp_path / "letters" / "home").read_text() == "dear"


def test_a_folder_of_parts_is_there_whole_or_not_at_all(tmp_path):
    folder, leftover = tmp_path / "state", tmp_path / ".state.parts.orbax-checkpoint-tmp"

    def writes(word: str):
        return lambda place: (place / device_parts.NAME.format(at=0, of=1)).write_text(word)

    def breaks(place):
        writes("cut off")(place)
        raise OSError("disk full")

    folder.write_text("an older state, of one process")
    leftover.mkdir()  # of a save that was killed
    for word in ("first", "second"):
        device_parts.write_together(folder, writes(word))
        assert [one.name for one in tmp_path.iterdir()] == ["state"]
        assert next(folder.glob("part-*")).read_text() == word
        check_place(folder)  # another state may take its place
    with pytest.raises(OSError, match="disk full"):
        device_parts.write_together(folder, breaks)
    assert next(folder.glob("part-*")).read_text() == "second"
    assert [one.name for one in tmp_path.iterdir()] == ["state"]


# --- meshes --------------------------------------------------------------------------------------


def test_rows_that_a_mesh_does_not_divide_are_refused(content, tmp_path):
    file = tmp_path / "state"
    file.write_bytes(content)
    mesh = Mesh(jax.sharding.AbstractMesh((3, 1, 1), AXES))  # of devices that are not here
    with pytest.raises(MeshError, match="data=3 does not divide 2 rows. Give a multiple of 3 rows"):
        kvjax.open(file, model=tiny.model(), mesh=mesh)
    state = dataclasses.replace(kvjax.open(file, model=tiny.model()).state, mesh=mesh)
    with pytest.raises(MeshError, match=r"fork\(n=2\): data=3 does not divide 2 rows"):
        kvjax.fork(state, 0, 2)


def test_dtypes_of_all_kinds_are_kept(tmp_path):
    arrays = {"b": np.asarray(jnp.ones((2, 3), jnp.bfloat16)), "u": np.zeros((0, 4), np.uint8)}
    _write(tmp_path / "x", arrays, {"head": json.dumps({"format": "kvjax-state", "version": 1})})
    read, _ = _read._read(tmp_path / "x")
    for name, value in arrays.items():
        assert read[name].dtype == value.dtype
        np.testing.assert_array_equal(read[name], value)
