"""States on disk: every stream as it was, decoding goes on, and files that do not belong here are refused."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import io
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import decode, metrics
from kvjax.cache.pool import size_class
from kvjax.saving import StateError, _read
from kvjax.saving import _device_parts as device_parts
from kvjax.saving._atomic import check_place
from kvjax.saving._file import EACH, content_of, digest, encoded, open_file, sha
from kvjax.saving._write import write_part
from kvjax.sharding.mesh import Mesh, MeshError, sizes_of
from kvjax.sharding.reshard import _divided, on_host
from kvjax.sharding.specs import AXES, of_state

SPECS = (
    "full",
    "window(8) + sinks(2)",
    "int8(8)",
    "quest(3, chunk=4, recent=8)",
    "conf_kv(0.5, recent=8) + int8(12) + confidence(20, loose=31)",
    "snapkv(12) + uniform(20, every(4))",
    "kivi(2, recent=8, group=4)",
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


def words_of(content: bytes) -> tuple[dict, bytes]:
    """The header of a file, and what follows it."""
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def with_words(header: dict, arrays: bytes) -> bytes:
    """A file of that header; its digest is what a writer of the head's version puts there."""
    words, version = header["__metadata__"], json.loads(header["__metadata__"]["head"])["version"]
    names = header.keys() - {"__metadata__"}
    raw = {name: np.frombuffer(arrays[slice(*header[name]["data_offsets"])], np.uint8) for name in names}
    if version in (1, 2):
        words.pop("content", None)
        words["digest"] = content_of(raw)
    else:
        words["content"] = json.dumps({name: sha(x.data) for name, x in raw.items()})
        if version in (3, 4):
            words["content"] = content_of(raw)
        words["digest"] = digest(words)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + arrays


def head(content: bytes, **changes) -> bytes:
    """The file with other words in its head, as somebody writes it who knows the format."""
    header, arrays = words_of(content)
    fields = json.loads(header["__metadata__"]["head"])
    header["__metadata__"]["head"] = json.dumps(fields | changes)
    return with_words(header, arrays)


def layer(content: bytes, at: int = 0, **changes) -> bytes:
    """The file with other sizes of a layer, or of its first pool, in its head."""
    layers = json.loads(words_of(content)[0]["__metadata__"]["head"])["layers"]
    for name, value in changes.items():
        (layers[at] if name in layers[at] else layers[at]["pools"][0])[name] = value
    return head(content, layers=layers)


def array(content: bytes, name: str, change) -> bytes:
    """The file with another array of that name."""
    header, arrays = words_of(content)
    kind, shape = json.loads(header["__metadata__"]["shapes"])[name]
    place = slice(*header[name]["data_offsets"])
    fresh = np.asarray(change(np.frombuffer(arrays[place], kind).reshape(shape).copy()))
    shapes = json.loads(header["__metadata__"]["shapes"]) | {name: [str(fresh.dtype), list(fresh.shape)]}
    header["__metadata__"]["shapes"] = json.dumps(shapes)
    pieces, at = [], 0
    for other in sorted(header.keys() - {"__metadata__"}, key=lambda n: (header[n]["data_offsets"], n)):
        piece = fresh.tobytes() if other == name else arrays[slice(*header[other]["data_offsets"])]
        header[other] |= {"shape": [len(piece)], "data_offsets": [at, at + len(piece)]}
        pieces.append(piece)
        at += len(piece)
    return with_words(header, b"".join(pieces))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda x: b"", "is not a saved state"),
        (lambda x: b"PK\3\4 something else entirely", "is not a saved state"),
        (lambda x: x[:60], "is not a saved state"),
        (lambda x: x[:-9], "cut off or damaged"),
        (lambda x: x[:-9] + bytes(9), "content is not what was written"),
        (lambda x: x.replace(b"gates@1", b"gates@2"), "head is not what was written"),
        (lambda x: x.replace(rb"\"context\": 72", rb"\"context\": 76"), "head is not what was written"),
        (lambda x: head(x, version=6), "format 6"),
        (lambda x: head(x, version=True), "is not a saved state"),
        (lambda x: head(x, format="other"), "is not a saved state"),
        (lambda x: head(x, model="0" * 16), "another model"),
        (lambda x: head(x, dtype="bfloat16"), "Load it as bfloat16"),
        (lambda x: head(x, policy="telepathy(3)"), "unknown here"),
        (lambda x: head(x, structure="window(8)"), "that of another policy"),
    ],
)
def test_what_does_not_belong_here_is_refused(content, damage, words, tmp_path):
    file = tmp_path / "state"
    file.write_bytes(damage(content))
    with pytest.raises(StateError, match=words):
        kvjax.open(file, model=tiny.model())


def test_a_file_is_read_once(content, tmp_path, monkeypatch):
    (tmp_path / "state").write_bytes(content)
    read, opens = [], Path.open

    class Counted(io.FileIO):
        def readinto(self, into) -> int:
            read.append(super().readinto(into))
            return read[-1]

    monkeypatch.setattr(Path, "open", lambda path, mode: io.BufferedReader(Counted(path), 1))
    kvjax.open(tmp_path / "state", model=tiny.model())
    monkeypatch.setattr(Path, "open", opens)
    assert sum(read) == len(content)


# --- files of somebody who knows the format ------------------------------------------------------


@pytest.fixture(scope="module")
def paged(tmp_path_factory) -> bytes:
    file = tmp_path_factory.mktemp("paged") / "state"
    kvjax.save(read(SPECS[3]), file, model=tiny.model(), policy=SPECS[3])
    return file.read_bytes()


HOSTILE = [
    (lambda x: layer(x, window=20_000_000), r"window of layer 0=20000000 .* has 8\."),
    (lambda x: layer(x, window=9), r"has window of layer 0=9 "),
    (lambda x: layer(x, entries=10**9), r"entries of 0.pages.0=1000000000 .* has 1 to 9\."),
    (lambda x: layer(x, size=10**9), r"size of pages 0.pages.0=1000000000 .* has 1 to 256\."),
    (lambda x: layer(x, size=0), r"size of pages 0.pages.0=0 "),
    (lambda x: layer(x, size=6), "do not fit: quest.* does not divide pages of 6 slots"),
    (lambda x: layer(x, size=4), r"as 0.pages.0.summary.range|0.pages.0.summary.range as"),
    (lambda x: layer(x, pools=[]), "pools of layer 0=0 .* has 1"),
    (lambda x: layer(x, summary=10**9), "summary of layer 0=1000000000 .* has 0"),
    (lambda x: layer(x, window=-1), "layers="),
    (lambda x: layer(x, window=8.0), "layers="),
    (lambda x: head(x, layers=[]), r"layers=0 in its head, .* on this model has 2\."),
    (lambda x: head(x, layers={}), "layers={}"),
    (lambda x: head(x, layers=[[]] * 2), "a head without"),
    (lambda x: head(x, context=10**9), r"context=1000000000 .* has 1 to 256\."),
    (lambda x: head(x, context=0), "context=0 "),
    (lambda x: head(x, context="72"), "context='72'"),
    (lambda x: head(x, chunk=10**9), r"chunk=1000000000 .* has 1 to 256\."),
    (lambda x: head(x, chunk=True), "chunk=True"),
    (lambda x: head(x, notes={"name": 3}), "notes="),
    (lambda x: head(x, notes=None), "a head without"),
    (lambda x: head(x, model=None), "model=None"),
    (lambda x: head(x, part={"at": 0}), "has a part of no place"),
    (lambda x: head(x, policy="full", structure="full"), "other arrays than its policy keeps"),
    (lambda x: array(x, "length", lambda n: n + 100), "length outside of 0 to 72"),
    (lambda x: array(x, "length", lambda n: n - 100), "length outside of 0 to 72"),
    (lambda x: array(x, "length", lambda n: n[:0]), "holds no rows"),
    (lambda x: array(x, "length", lambda n: np.zeros(10**6, np.int32)), r"holds \S+ as "),
    (lambda x: array(x, "length", lambda n: n.astype(np.int64)), "holds length as int64"),
    (lambda x: array(x, "total", lambda n: n + 1000), "total outside of 0 to 72"),
    (lambda x: array(x, "1.pages.0.length", lambda n: n + 1), r"holds \[\d+.* as 1.pages.0"),
    (lambda x: array(x, "1.pages.0.length", lambda n: n * 0 + 2**30), "1.pages.0.length outside"),
    (lambda x: array(x, "1.pages.0.pos", lambda n: n + 1000), "1.pages.0.pos outside of 0 to 71"),
    (lambda x: array(x, "1.ring.k", lambda k: k[:, :, :3]), r"holds \[.*\] as 1.ring.k, not|1.ring"),
    (lambda x: array(x, "1.ring.k", lambda k: k[..., :4]), "holds 1.ring.k as float32"),
    (lambda x: array(x, "1.ring.k", lambda k: k.astype(np.float16)), "holds 1.ring.k as float16"),
    (lambda x: array(x, "1.pages.0.summary.range", lambda r: r[:1]), "as 1.pages.0.summary.range, not"),
]


@pytest.mark.parametrize(("harm", "words"), HOSTILE, ids=range(len(HOSTILE)))
def test_no_size_of_a_file_is_believed(paged, harm, words, tmp_path):
    # In version 1 the digest leaves out the head, in version 3 the arrays have one together.
    for version in (5, 3, 1):
        file = tmp_path / f"state-{version}"
        file.write_bytes(harm(head(paged, version=version)))
        with pytest.raises(StateError, match=words):
            kvjax.open(file, model=tiny.model())


def test_a_state_that_needs_more_memory_than_there_is_is_refused_before_it_is_made(paged, tmp_path):
    file = tmp_path / "state"
    file.write_bytes(paged)
    state = kvjax.open(file, model=tiny.model()).state
    size = metrics.allocated(state.layers)
    assert kvjax.open(file, model=tiny.model(), most_bytes=size).policy == kvjax.policy(SPECS[3])
    # The last bound is above what the file stores, and below what the caches need.
    for most in (10, size // 2, size - size // 20):
        with pytest.raises(StateError, match=rf"needs \d+ bytes, and may take {most}"):
            kvjax.open(file, model=tiny.model(), most_bytes=most)


def fingerprint_of(saved: kvjax.Saved) -> str:
    """Of everything that was saved, to the bit."""
    state, sha = saved.state, hashlib.sha256()
    words = (repr(saved.policy), saved.label, saved.notes, state.context, state.chunk, state.structure)
    sha.update(repr((words, jax.tree.structure(state), sorted(saved.extra))).encode())
    for leaf in jax.tree.leaves((state, saved.extra)):
        sha.update(f"{leaf.dtype} {leaf.shape}".encode() + np.asarray(leaf).tobytes())
    return sha.hexdigest()


def outcomes(content: bytes, bits: list[int], file: Path, state: Path | None = None) -> collections.Counter:
    """What comes out of a state in whose file (or part) one bit is another, for each of these bits."""
    file.write_bytes(content)
    right = fingerprint_of(kvjax.open(state or file, model=tiny.model()))
    table: collections.Counter = collections.Counter()
    for bit in bits:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        try:
            opened = fingerprint_of(kvjax.open(state or file, model=tiny.model()))
            table["equal" if opened == right else "other"] += 1
        except StateError as error:
            table[re.sub(r"^open\(.*?\) |[:(=].*|\d+ .*|, .*", "", str(error), flags=re.DOTALL)] += 1
    return table


def header_bits(content: bytes, count: int) -> list[int]:
    """So many bits all over the header, and all of the format's version and its name."""
    end = 8 + int.from_bytes(content[:8], "little")
    spread = np.random.default_rng(11).permutation(8 * end)[:count].tolist()
    at = content.index(b"version")
    return [*range(64), *range(8 * at, 8 * at + 8 * len(b'version\\": 3')), *spread]


@pytest.mark.parametrize("count", [200, pytest.param(4000, marks=pytest.mark.slow)])
def test_a_flipped_bit_of_the_header_is_a_state_error_or_changes_nothing(content, paged, count, tmp_path):
    for one in (content, paged):
        table = outcomes(one, header_bits(one, count), tmp_path / "state")
        print(dict(table.most_common()))
        assert table["other"] == 0
        assert table.total() == count + 64 + 8 * 12


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_a_flipped_bit_anywhere_is_a_state_error_or_changes_nothing(spec, tmp_path):
    file = tmp_path / "state"
    kvjax.save(read(spec), file, model=tiny.model(), policy=spec, extra={"tokens": np.arange(5)})
    whole = file.read_bytes()
    bits = np.random.default_rng(12).permutation(8 * len(whole))[:1000].tolist()
    assert outcomes(whole, [*bits, *header_bits(whole, 1000)], file)["other"] == 0


GOLDEN = Path(__file__).parent / "golden" / "state"
"""A state in the formats 1 (whole) and 2 (parts), as they were written before 3."""


@pytest.mark.parametrize("name", ["whole.kv", "parts"])
def test_files_of_older_formats_still_open(name):
    opened = kvjax.open(GOLDEN / name, model=tiny.model(), policy=SPECS[4], label="")
    assert opened.notes == {"name": "book"}
    np.testing.assert_array_equal(opened.extra["tokens"], np.arange(5))
    again = read(SPECS[4])
    assert kvjax.nbytes(opened.state).total["live"] == kvjax.nbytes(again).total["live"]
    for layer, other in zip(again.layers, opened.state.layers, strict=True):
        held, theirs = tiny.held(*layer.pools), tiny.held(*other.pools)
        assert {stream: [*slots] for stream, slots in held.items()} == {s: [*x] for s, x in theirs.items()}
        np.testing.assert_allclose(layer.ring.k, other.ring.k, atol=1e-4)


PART = {"at": 0, "of": 4, "rows": [0, 1], "heads": [0, 1], "whole": [2, 2]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": []}, "layers=0 in its head"),
        ({"context": 10**9}, "context=1000000000"),
        (
            {"part": {"at": 0, "of": 10**9, "rows": [0, 1], "heads": [0, 1], "whole": [2, 2]}},
            "has 4 of its 10",
        ),
        ({"part": {"at": 0, "of": 4, "rows": [0, 2], "heads": [0, 1], "whole": [2, 2]}}, "different states"),
        ({"part": {"at": 0, "of": 4, "rows": [0], "heads": [0, 1], "whole": [2, 2]}}, "has a part at"),
        ({"part": {"at": 0, "of": 4}}, "has a part of no place"),
    ],
)
def test_parts_of_somebody_who_knows_the_format_are_refused(changes, words, tmp_path):
    shutil.copytree(GOLDEN / "parts", tmp_path / "state")
    files = sorted((tmp_path / "state").iterdir())
    for file in files if "part" not in changes else files[:1]:
        file.write_bytes(head(file.read_bytes(), **changes))
    with pytest.raises(StateError, match=words):
        kvjax.open(tmp_path / "state", model=tiny.model())


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


def whole(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    """The arrays and the head of a state, in a file or in parts."""
    files = _read._files("open", path)
    policy = kvjax.policy(files[0].head["policy"])
    parts, _ = _read._parts(files, policy, tiny.model())
    return _read._arrays(parts, policy, None), {n: x for n, x in files[0].head.items() if n != "part"}


def parted(state: kvjax.KVState, file, folder, sizes: str) -> None:
    """The state of a file as the devices of a mesh would write it, each its block."""
    (arrays, fields), mesh = whole(file), sizes_of(sizes)
    layers = [on_host(cache, state.mesh) for cache in state.layers]
    layers = [
        cache.with_pools([_divided(pages, mesh, size_class) for pages in cache.pools]) for cache in layers
    ]
    shared = {name: x for name, x in arrays.items() if not name[0].isdigit()}

    kv_heads = state.layers[0].ring.k.shape[1]

    def block_of(x: np.ndarray, spec: jax.P, block: device_parts.Block) -> np.ndarray:
        if spec == jax.P(("data", "tensor")):
            return np.split(x, block.of)[block.at]
        rows, heads = block.index
        each = x.shape[1] // kv_heads  # several of queries
        return x[rows, heads.start * each : heads.stop * each]

    folder.mkdir()
    for block in device_parts.blocks(mesh, state.rows, kv_heads):
        own = [jax.tree.map(lambda x, s, b=block: block_of(x, s, b), one, of_state(one)) for one in layers]
        write_part(folder, block, shared, own, {n: fields[n] for n in fields if n != "layers"})


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=[] if spec == SPECS[2] else pytest.mark.slow) for spec in SPECS]
)
def test_parts_are_together_what_one_file_holds(spec, tmp_path):
    state, file, folder = read(spec), tmp_path / "state", tmp_path / "parts"
    options = {"model": tiny.model(), "policy": spec, "extra": {"tokens": np.arange(5)}, "notes": {"a": "b"}}
    kvjax.save(state, file, **options)
    one, head_of_one = whole(file)
    # Devices of one stream, and of two that stand apart in the file.
    for sizes in ("data=2,tensor=2", "tensor=2"):
        shutil.rmtree(folder, ignore_errors=True)
        parted(state, file, folder, sizes)
        many, head_of_many = whole(folder)
        assert one.keys() == many.keys()
        for name, value in one.items():
            np.testing.assert_array_equal(value, many[name], err_msg=name)
            assert value.dtype == many[name].dtype
        assert head_of_many == head_of_one
    opened = kvjax.open(folder, model=tiny.model())
    assert opened.notes == {"a": "b"}
    np.testing.assert_array_equal(opened.extra["tokens"], np.arange(5))
    kvjax.save(opened.state, folder, **options)  # a file in place of the folder
    assert whole(folder)[1] == head_of_one
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
        (lambda files: files[3].write_bytes(head(files[3].read_bytes(), version=6)), "format 6"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(parts, harm, words, tmp_path):
    shutil.copytree(parts, tmp_path / "state")
    harm(sorted((tmp_path / "state").iterdir()))
    with pytest.raises(StateError, match=words):
        kvjax.open(tmp_path / "state", model=tiny.model())


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_flipped_bit_of_the_header_of_a_part_is_a_state_error_or_changes_nothing(parts, count, tmp_path):
    shutil.copytree(parts, tmp_path / "state")
    part = sorted((tmp_path / "state").iterdir())[2]
    table = outcomes(part.read_bytes(), header_bits(part.read_bytes(), count), part, tmp_path / "state")
    print(dict(table.most_common()))
    assert table["other"] == 0


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
    (tmp_path / "x").write_bytes(b"".join(encoded({"format": "kvjax-state", "version": EACH}, arrays)))
    read = open_file("open", tmp_path / "x").arrays()
    for name, value in arrays.items():
        assert read[name].dtype == value.dtype
        np.testing.assert_array_equal(read[name], value)
