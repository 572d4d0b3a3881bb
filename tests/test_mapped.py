"""A saved context that is opened where it lies: the same answers, and its pages are read in the file."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import by_layer  # noqa: F401, a program a layer

import kvjax
from kvjax import decode, metrics
from kvjax.cache import hosted as hosting
from kvjax.cache import mapped
from kvjax.cache.state import KVState
from kvjax.decode import _by_layer
from kvjax.saving import StateError
from kvjax.saving import _file as files
from kvjax.sharding.mesh import ONE
from kvjax.sharding.reshard import on_host

pytestmark = pytest.mark.skipif(bool(hosting.absent()), reason=hosting.absent())

CONTEXT, NEW = 144, 20
SPECS = (
    "quest(3, chunk=4, dense=1, recent=8)",
    "topk(5, sinks=2, tail=6)",
    "topk(5, sinks=2, tail=6) + phi(4)",
    "topk_pages(8, chunk=4, sinks=2, tail=6)",
)

each = pytest.mark.parametrize(
    "spec", [pytest.param(s, marks=[pytest.mark.slow] * (at > 0)) for at, s in enumerate(SPECS)]
)


def policy(spec: str, cache: str = "0.5") -> kvjax.Policy:
    return kvjax.policy(f"{spec} + host(cache={cache})")


@functools.cache
def read(spec: str) -> KVState:
    """Three rows; the shortest has hardly a page."""
    part, prompts = policy(spec), [tiny.prompt(n, seed) for seed, n in enumerate((90, 42, 12))]
    sizes = {"context": CONTEXT, "page": tiny.PAGE, "chunk_size": 16, "weights": tiny.weights(part)}
    return kvjax.prefill(tiny.model(), part, prompts, **sizes)[0]


@pytest.fixture
def file(tmp_path):
    kvjax.save(read(SPECS[0]), tmp_path / "state", model=tiny.model(), policy=policy(SPECS[0]))
    return tmp_path / "state"


def opened(file, host: str | None = "file", **how) -> KVState:
    return kvjax.open(file, model=tiny.model(), host=host, **how).state


def fed(spec: str, state: KVState) -> tuple[KVState, np.ndarray]:
    tokens = np.asarray([tiny.prompt(NEW, 100 + row) for row in range(state.rows)])
    return tiny.feed(policy(spec), decode.reserve(policy(spec), state, NEW, 1), tokens)


def addresses(state: KVState) -> list[int]:
    """Where the keys and values of hosted pages lie."""
    far = [layer.hosted for layer in state.layers if layer.hosted is not None]
    return [getattr(one, name).unsafe_buffer_pointer() for one in far for name in ("k", "v")]


@each
def test_answers_are_those_of_the_state_in_memory_and_nothing_mapped_moves(spec, tmp_path):
    kvjax.save(read(spec), tmp_path / "state", model=tiny.model(), policy=policy(spec))
    there, here = opened(tmp_path / "state"), opened(tmp_path / "state", None)
    assert mapped.has_mapped(there)
    assert not mapped.has_mapped(here)
    before = addresses(there)
    (there, mine), (here, right) = fed(spec, there), fed(spec, here)
    np.testing.assert_array_equal(mine, right)
    assert addresses(there) == before
    assert all(layer.hosted.k.sharding.memory_kind == hosting.KIND for layer in there.layers if layer.hosted)
    np.testing.assert_array_equal(metrics.present(there), metrics.present(here))
    for one, other in zip(there.layers, here.layers, strict=True):
        one, other = (tiny.held(*on_host(layer, ONE).pools) for layer in (one, other))
        assert one.keys() == other.keys()
        for stream, slots in one.items():
            assert slots.keys() == other[stream].keys()
            for pos, values in slots.items():
                jax.tree.map(np.testing.assert_array_equal, values, other[stream][pos])


def test_what_is_written_later_lies_in_memory_and_is_saved_with_the_rest(file, tmp_path):
    spec, state = SPECS[0], opened(file)
    kept = file.read_bytes()
    owned = [np.asarray(layer.hosted.owned) for layer in state.layers if layer.hosted]
    state, _ = fed(spec, state)
    state, _ = fed(spec, state)
    now = [layer.hosted for layer in state.layers if layer.hosted]
    assert all((np.asarray(x.owned) == before).all() for x, before in zip(now, owned))
    assert max(int(layer.pages.length.max()) for layer in state.layers) > 2 * tiny.PAGE
    kvjax.save(state, tmp_path / "again", model=tiny.model(), policy=policy(spec))
    assert file.read_bytes() == kept
    tokens = np.asarray([tiny.prompt(6, 9), tiny.prompt(6, 10)])
    outs = [
        tiny.feed(policy(spec), decode.reserve(policy(spec), kvjax.fork(one, 1, 2), 6, 1), tokens)[1]
        for one in (state, opened(tmp_path / "again"))
    ]
    np.testing.assert_array_equal(*outs)


def test_a_program_of_all_layers_reads_it_there(file, monkeypatch):
    monkeypatch.setattr(_by_layer, "DEEP", 99)
    texts = []
    for host in ("file", None):
        state = opened(file, host)
        before, logits = addresses(state), jnp.eye(3, tiny.VOCAB)
        pieces = kvjax.stream(tiny.model(), policy(SPECS[0]), state, logits, max_new_tokens=12, every=4)
        texts.append([(piece.tolist(), addresses(state) == before) for piece, state in pieces])
    assert [piece for piece, _ in texts[0]] == [piece for piece, _ in texts[1]]
    assert all(stays for _, stays in texts[0])


def test_opening_reads_no_key_and_no_value_of_a_full_page(file):
    size, sound = file.stat().st_size, files.open_file("open", file)
    begin = sound.begins["1.pages.0.k"]
    content = bytearray(file.read_bytes())
    content[begin] ^= 1  # of the first full page
    file.write_bytes(content)
    with pytest.raises(StateError, match="content is not what was written"):
        opened(file, None)
    one = opened(file)
    taken = one.layers[1].hosted
    assert taken.mapped
    assert np.asarray(taken.k).ctypes.data == taken.k.unsafe_buffer_pointer()
    kept = sum(sound.size(f"1.pages.0.{name}") for name in "kv")
    with pytest.raises(StateError, match=r"needs \d+ bytes"):
        opened(file, most_bytes=1000)
    assert kept > size / 10


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda x: x[:-1], "cut off or damaged"),
        (lambda x: x[: len(x) // 2], "cut off or damaged"),
        (lambda x: x[:-3] + bytes([x[-3] ^ 1]) + x[-2:], "content is not what was written"),
        (lambda x: b"PK" + x[2:], "not a saved state"),
        (lambda x: x.replace(b"float32", b"float64", 1), "head is not what was written"),
    ],
)
def test_what_is_damaged_is_refused(file, harm, says):
    file.write_bytes(harm(file.read_bytes()))
    with pytest.raises(StateError, match=says):
        opened(file)


def test_what_cannot_be_mapped_is_refused(file, tmp_path, monkeypatch):
    with pytest.raises(StateError, match="host is 'file', to map pages from the file, or None"):
        opened(file, "disk")
    bare = kvjax.prefill(tiny.model(), SPECS[0], [tiny.prompt(50)], context=72, page=8, chunk_size=16)[0]
    kvjax.save(bare, tmp_path / "bare", model=tiny.model(), policy=SPECS[0])
    with pytest.raises(StateError, match=r"whose pages belong on the device.*\+ host'"):
        opened(tmp_path / "bare")
    coded = policy("quest(3, chunk=4, dense=0, recent=8) + int8(8)")
    state = kvjax.prefill(tiny.model(), coded, [tiny.prompt(51)], context=72, page=8, chunk_size=16)[0]
    kvjax.save(state, tmp_path / "coded", model=tiny.model(), policy=coded)
    with pytest.raises(StateError, match="no multiple of 64"):
        opened(tmp_path / "coded")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(StateError, match="for one CPU, and this is tpu"):
        opened(file)
