"""One tiny random model, its prompts and a float64 twin: what the proofs of the foundation run on.

Weights are drawn large, so that attention is peaked, logits differ between positions and greedy text
varies; everything is small, so that a program compiles in about a second. Tests share shapes on purpose.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import decode
from kvjax.algebra import Admission, Observation, Policy
from kvjax.cache import pool
from kvjax.cache.pages import Pages
from kvjax.cache.state import KVState
from kvjax.decode import _by_layer
from kvjax.decode._by_layer import outer
from kvjax.models import decoder
from kvjax.models.layout import drawn
from kvjax.models.spec import ModelSpec, Rope
from pallas_kernels.ragged_decode.api import values

PAGE = 8
CONTEXT = 72
VOCAB = 61
W = 8


@pytest.fixture(scope="module", autouse=True)
def by_layer() -> Iterator[None]:
    """Where it is imported, ``generate`` and ``stream`` write as deep models do: layers share a program.

    For tests of what is around the loop; ``test_decode`` has that one program for all layers writes the same.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_by_layer, "DEEP", 1)
        yield


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A network and its weights, as the decode loop takes them."""

    network: decoder.Decoder
    params: dict[str, Any]


@functools.cache
def model(windows: tuple[int | None, ...] = (), vocab: int = VOCAB) -> Tiny:
    """Two layers, four query and two KV heads of 8; ``windows`` makes layers slide."""
    spec = ModelSpec(
        family="llama",
        vocab_size=vocab,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        model_dim=32,
        mlp_dim=48,
        max_positions=256,
        rope=Rope(theta=100.0),
        tied=False,
        windows=windows,
    )
    random = np.random.default_rng(7)

    def draw(name: str, shape: tuple[int, ...]) -> jnp.ndarray:
        if name.endswith("norm"):
            return jnp.asarray(1 + 0.2 * random.standard_normal(shape), jnp.float32)
        inputs = {"wo": shape[0] * shape[1], "embed": 1}.get(name, shape[0])
        gain = {"wq": 1.6, "wk": 1.6, "wv": 1.5, "wo": 1.5, "head": 2.0}.get(name, 1.0)
        return jnp.asarray(gain * inputs**-0.5 * random.standard_normal(shape), jnp.float32)

    tree = decoder.shapes(spec)
    params = {name: drawn(draw, name, shape) for name, shape in tree.items() if name != "layers"}
    params["layers"] = [{n: drawn(draw, n, s) for n, s in names.items()} for names in tree["layers"]]
    return Tiny(decoder.Decoder(spec), params)


@functools.cache
def weights(policy: Policy) -> dict[str, Any]:
    """Random learned weights of the parts that learn, on a model with no ``windows``."""
    network = model().network
    return {part.place: part.example_weights(jax.random.key(1), network) for part in policy.learned}


def prompt(length: int, seed: int = 0) -> list[int]:
    """``length`` random token ids; equal seeds share a prefix."""
    return np.random.default_rng(seed).integers(0, VOCAB, 512)[:length].tolist()


def hashed(pos: Any, head: Any) -> Any:
    """A bit that looks random and depends on position and head alone."""
    return (pos * pos * 7 + pos * 3 + head * 5 + pos * head) % 11 < 4


@dataclasses.dataclass(frozen=True, repr=False)
class HashAdmit(Admission):
    """What a learned admission looks like from outside: ragged, different in every head."""

    name = "hash_admit"
    window: int = W  # type: ignore[assignment]

    def admit(self, params: Any, seen: Observation) -> jnp.ndarray:
        """The hash of position and head."""
        at = jnp.maximum(seen.pos, 0)[:, None, :] % 997
        return hashed(at, jnp.arange(2)[None, :, None])


def start(
    policy: Policy, rows: int, *, pages: int = 96, context: int = CONTEXT, tiny: Tiny | None = None
) -> KVState:
    """An empty state whose pools hold ``pages`` pages from the first token on: one program a chunk size."""
    tiny = tiny or model()
    state = decode.empty(tiny.network, policy, rows=rows, context=context, dtype=jnp.float32, page=PAGE)
    rooms = tuple(
        room if room.pages is None else dataclasses.replace(room, pages=pool.resize(room.pages, pages))
        for room in state.layers
    )
    return dataclasses.replace(state, layers=rooms)


def read(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    chunk: int,
    *,
    pages: int = 96,
    context: int = CONTEXT,
    tiny: Tiny | None = None,
) -> tuple[KVState, np.ndarray]:
    """Prefill by chunks through ``start``'s pools, which are not shrunk afterwards."""
    tiny = tiny or model()
    state = start(policy, len(prompts), pages=pages, context=context, tiny=tiny)
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    state = dataclasses.replace(state, total=jnp.asarray(lengths))
    tokens = decode.padded(prompts, -(-int(lengths.max()) // chunk) * chunk)
    last = jnp.asarray(np.zeros((len(prompts), tiny.network.spec.model_dim), np.float32))
    layers = decode.layer_calls(tiny.network, policy, tiny.params, weights(policy))
    for begin in range(0, tokens.shape[1], chunk):
        count = np.clip(lengths - begin, 0, chunk).astype(np.int32)
        piece = tokens[:, begin : begin + chunk]
        arguments = (tiny.network, policy, tiny.params, layers, state, piece, count, last)
        state, last, _ = _by_layer.read_chunk(*arguments)
    return state, np.asarray(LOGITS(tiny.network, tiny.params, last))


LOGITS = jax.jit(decoder.Decoder.logits, static_argnums=0)


def feed(
    policy: Policy, state: KVState, tokens: np.ndarray, *, tiny: Tiny | None = None, active: Any = None
) -> tuple[KVState, np.ndarray]:
    """Feed tokens [B, M] one by one; the state is used up; logits [B, M, V], of rows that are active.

    A program a layer, as ``read`` has it: layers that are alike are compiled once. That one program for all
    layers does the same is a test of its own (``test_exactness``).
    """
    tiny = tiny or model()
    active = np.ones(tokens.shape[0], bool) if active is None else np.asarray(active)
    policy = policy.after_prompt  # as what feeds tokens has it
    layers, rest = decode.layer_calls(tiny.network, policy, tiny.params, weights(policy)), outer(tiny.params)
    nothing, steps = np.zeros((len(active), tiny.network.spec.model_dim), np.float32), []
    for column in np.asarray(tokens, np.int32).T:
        x, caches = turn(tiny, policy, layers, state, column, active)
        length, last = _by_layer.after_chunk(x, state.length, active.astype(np.int32), jnp.asarray(nothing))
        logits, sure = _by_layer.last_logits(tiny.network, policy, rest, last, state.confidence, active)
        state = dataclasses.replace(state, layers=tuple(caches), length=length, confidence=sure)
        steps.append(logits)
    return state, np.stack(jax.device_get(steps), axis=1)


def turn(
    tiny: Tiny,
    policy: Policy,
    layers: Sequence[decode.LayerCall],
    state: KVState,
    tokens: np.ndarray,
    active: np.ndarray,
    program: Any = _by_layer.step_layer,
) -> tuple[jax.Array, list[Any]]:
    """One token of every active row through all layers, whose caches are donated.

    Returns:
      The last layer's output [B, 1, D], and what ``program`` gives for the cache of each layer.
    """
    network, met = tiny.network.at(state.context), []
    x = _by_layer.embed(network, outer(tiny.params), state.length, tokens)
    for site, cache in zip(layers, state.layers):
        inputs = (cache, x, state.length, ~active, state.total, state.confidence)
        x, after = program(network, *site, policy, *inputs, mesh=state.mesh)
        met.append(after)
    return x, met


def copy(state: KVState) -> KVState:
    """Buffers of its own, for states that are fed twice; by way of the host, where nothing is compiled."""
    return jax.tree.map(lambda x: jnp.array(np.asarray(x)), state)


def places(length: Any, window: int) -> np.ndarray:
    """Position in each slot of a ring after so many tokens a row, [B, window]; negative where none is."""
    newest, slot = np.asarray(length)[:, None] - 1, np.arange(window)
    return newest - (newest - slot) % window


Held = dict[tuple[int, int], dict[int, tuple[np.ndarray, ...]]]


def held(*rooms: Pages) -> Held:
    """Per stream: position -> (k, v, metadata) of every live slot of these rooms, codes multiplied out.

    Raises AssertionError where one position is held twice.
    """
    lists: Held = {}
    for pages in rooms:
        _hold(jax.device_get(pages), lists)
    return lists


def _hold(p: Pages, lists: Held) -> None:
    k, v = p.k, p.v
    if p.scales is not None:
        k, v = (np.asarray(values(x, p.scales, i)) for i, x in enumerate((k, v)))
    kept = [np.asarray(p.meta[n], np.float32).reshape(*p.pos.shape, -1) for n in sorted(p.meta)]
    meta = np.concatenate(kept, axis=-1) if kept else np.zeros((*p.pos.shape, 0))
    for (b, head, r), length in np.ndenumerate(p.length):
        tokens = lists.setdefault((b, head), {})
        for i in range(length):
            at = p.table[b, head, r, i // p.size], i % p.size
            pos = int(p.pos[at])
            assert pos not in tokens, f"position {pos} is held twice in stream {(b, head)}"
            tokens[pos] = (k[at], v[at], meta[at])


def owned_once(pages: Pages) -> None:
    """Every page is either in exactly one list or on the free stack; counts agree."""
    p: Pages = jax.device_get(pages)
    used = -(-p.length // p.size)
    inside = np.arange(p.table.shape[-1]) < used[..., None]
    owned = p.table[inside]
    assert (p.table[~inside] == -1).all(), "a page list names pages beyond its end"
    free = p.free[: int(p.n_free)]
    assert sorted([*owned.tolist(), *free.tolist()]) == list(range(p.count)), "a page is lost or owned twice"
    assert (p.refs == np.isin(np.arange(p.count), owned)).all(), "reference counts disagree with the lists"
    assert not p.overflow


# --- the model once more, in float64 -------------------------------------------------------------

Mask = Callable[[int, int], np.ndarray]
"""(layer, KV head) -> bool [T, T]: does query i see key j?"""


def causal(length: int, window: int | None = None) -> np.ndarray:
    """j <= i, and i - j < window where there is one."""
    age = np.arange(length)[:, None] - np.arange(length)[None, :]
    return (age >= 0) & (age < (window or length + 1))


Judge = Callable[[int, np.ndarray, np.ndarray], np.ndarray]
"""(layer, k_pre [T, K, H], k [T, K, H]) -> bool [T, K]: is token j admitted by a KV head?"""


def oracle(
    tokens: Sequence[int], mask: Mask, tiny: Tiny | None = None, judge: Judge | None = None
) -> np.ndarray:
    """Logits [T, V] of one text, float64 throughout, attention under ``mask``; its own RoPE and norms.

    With a ``judge``, keys it admits are visible to all later queries too, whatever the mask.
    """
    tiny = tiny or model()
    spec, p = tiny.network.spec, jax.tree.map(lambda x: np.asarray(x, np.float64), tiny.params)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.norm_eps) * weight

    half = spec.head_dim // 2
    angle = np.arange(len(tokens))[:, None] * spec.rope.theta ** (-np.arange(half) / half)
    turn = np.exp(1j * angle)[:, None, :]

    def rotate(x: np.ndarray) -> np.ndarray:
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    x = p["embed"][np.asarray(tokens)]
    for index, w in enumerate(p["layers"]):
        y = norm(x, w["attn_norm"])
        k_pre = np.einsum("td,khd->tkh", y, w["wk"])
        q, k = rotate(np.einsum("td,nhd->tnh", y, w["wq"])), rotate(k_pre)
        bits = np.zeros(k.shape[:2], bool) if judge is None else judge(index, k_pre, k)
        v = np.einsum("td,khd->tkh", y, w["wv"])
        out = np.zeros(q.shape)
        for n in range(spec.num_heads):
            head = n // spec.groups
            see = mask(index, head) | (causal(len(tokens)) & bits[:, head])
            s = np.where(see, q[:, n] @ k[:, head].T / np.sqrt(spec.head_dim), -np.inf)
            e = np.exp(s - s.max(-1, keepdims=True))
            out[:, n] = e / e.sum(-1, keepdims=True) @ v[:, head]
        x = x + np.einsum("tnh,dnh->td", out, w["wo"])
        y = norm(x, w["mlp_norm"])
        gate = y @ w["w_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["w_up"].T)) @ w["w_down"].T
    return norm(x, p["final_norm"]) @ p["head"].T


def dense(tokens: Sequence[int], tiny: Tiny | None = None) -> np.ndarray:
    """``oracle`` under the model's own attention."""
    spec = (tiny or model()).network.spec
    return oracle(tokens, lambda layer, _: causal(len(tokens), spec.windows[layer]), tiny)
