"""``check``: does a network keep the laws that every KV cache relies on?

A cache feeds a text in other portions than a model was trained on, among other rows, at other positions. The
check runs the network's own layers under a plain dense attention, on twelve random tokens, and compares.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import UserError
from kvjax.types import Heads, Network, Params, Weighted, of_layer

if TYPE_CHECKING:
    from jaxtyping import Array, Int

TOKENS, ROWS = 12, 3
PREFIX = (3, 7, 10)
"""Tokens that each row has seen when it is fed another one."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest difference allowed, in shares of the largest absolute value."""


class LawError(UserError):
    """A network that lacks a part of the protocol, so that no law can be tried."""


@dataclasses.dataclass(frozen=True)
class Law:
    """One law, tried.

    Attributes:
      says: the law.
      difference: the largest found, in shares of the largest value.
      layer: the first that differs; -1 is the embedding, L the logits; None if the law holds.
      hint: what the likely fault is.
    """

    says: str
    difference: float
    layer: int | None
    hint: str


@dataclasses.dataclass(frozen=True)
class Laws:
    """What ``check`` found. ``bool(laws)``: do all hold?"""

    laws: tuple[Law, ...]
    layers: int

    def __bool__(self) -> bool:
        return all(law.layer is None for law in self.laws)

    def __str__(self) -> str:
        return "\n".join(self._line(law) for law in self.laws)

    def _line(self, law: Law) -> str:
        if law.layer is None:
            return f"holds   {law.says}"
        names = {-1: "the embedding", self.layers: "the logits"}
        place = names.get(law.layer, f"layer {law.layer}")
        return f"BROKEN  {law.says}: first at {place} ({law.difference:.0e}). {law.hint}"


def check(model: Weighted, *, seed: int = 0) -> Laws:
    """Whether a network gives the same result however a text is fed; seconds, on a CPU too.

    The laws: one token at a time equals the whole prompt; rows alone equal rows together; rows at different
    positions do not mix; ``rotate`` and ``project`` of a layer's heads are what the layer computes; layers
    of one window differ in weights only. ``print`` shows each with the first layer that differs.

    Args:
      model: a network and its weights, such as ``kvjax.load(module)``.
      seed: of the random tokens.

    Raises:
      LawError: a part of the protocol is missing or has another shape (``kvjax.Network``).
    """
    _check_protocol(model)
    network, params = model.network.at(TOKENS), model.params
    tokens = (
        np.random.default_rng(seed).integers(0, params["embed"].shape[0], (ROWS, TOKENS)).astype(np.int32)
    )
    feed = functools.partial(_feed, network, params)
    start = np.zeros(ROWS, np.int32)
    whole, stated, _ = feed(tokens, start, None)
    alone = [feed(tokens[row : row + 1], start[:1], None)[0] for row in range(ROWS)]
    together = [jnp.concatenate(parts) for parts in zip(*alone)]
    steps, memory = [], None
    for at in range(TOKENS):
        one, _, memory = feed(tokens[:, at : at + 1], start + at, memory)
        steps.append(one)
    single = [jnp.concatenate(parts, axis=1) for parts in zip(*steps)]
    prefix = np.asarray(PREFIX)
    _, _, memory = feed(tokens, start, None)  # what lies beyond a row's prefix is hidden, and written again
    rows = np.arange(ROWS)
    mixed, _, _ = feed(tokens[rows, prefix][:, None], prefix.astype(np.int32), memory)
    expected = [x[rows, prefix][:, None] for x in whole]
    odd = _odd_layers(network, params, whole[0])
    numbered = feed(tokens, start, None, odd)[0] if odd else whole

    most = TOLERANCE[str(params["embed"].dtype)]
    compare = functools.partial(_law, most)
    laws = (
        compare(
            "rows alone equal rows together",
            together,
            whole,
            "A row reads its neighbours: look for a mean, a sum or a reshape over the batch.",
        ),
        compare(
            "one token at a time equals the whole prompt",
            single,
            whole,
            "The layer uses other tokens of the call, or counts positions from 0: use `positions`, and let "
            "tokens meet in `attend` alone.",
        ),
        compare(
            "rows at different positions do not mix",
            mixed,
            expected,
            "The layer takes one row's positions for all: use `positions` [B, T] row by row.",
        ),
        compare(
            "layers of one window differ in weights only",
            numbered,
            whole,
            "The layer's number changes its mathematics: give such layers another window, or put the "
            "difference into their weights.",
        ),
        _stated("what heads say of RoPE is true", stated, "rotate", most),
        _stated("what heads say of queries is true", stated, "project", most),
    )
    return Laws(laws, network.num_layers)


def _feed(
    network: Network,
    params: Params,
    tokens: Int[np.ndarray, "B T"],
    start: Int[np.ndarray, " B"],
    memory: list[Any] | None,
    odd: frozenset[int] = frozenset(),
) -> tuple[list[Array], list[dict[str, Array]], list[Any]]:
    """T tokens of each row at positions ``start`` and on, after what ``memory`` holds.

    As in the decode loop the first layer of a window stands for all of them, so that they share a program;
    those that are ``odd`` run under their own number.

    Returns:
      What the embedding, each layer and the logits give; how wrong each layer's heads are; the memory after.
    """
    b, t = tokens.shape
    positions = jnp.asarray(start[:, None] + np.arange(t), jnp.int32)
    x = network.embed(params, jnp.asarray(tokens), positions)
    if memory is None:
        empty = jnp.zeros((b, TOKENS, network.num_kv_heads, network.head_dim), x.dtype)
        memory = [(empty, empty)] * network.num_layers
    given, wrong, after = [x], [], []
    for index, (block, held) in enumerate(zip(params["layers"], memory)):
        like = network, index
        if index not in odd:
            like = of_layer(network, index), network.windows.index(network.windows[index])
        x, (held, errors) = _layer(*like, block, x, positions, held)
        given.append(x)
        wrong.append(errors)
        after.append(held)
    return [*given, network.logits(params, x)], wrong, after


def _odd_layers(network: Network, params: Params, x: Array) -> frozenset[int]:
    """Layers whose number seems to change what they compute; traced, not compiled."""

    def program(network: Network, number: int, block: Params) -> str:
        empty = jnp.zeros((len(x), TOKENS, network.num_kv_heads, network.head_dim), x.dtype)
        positions = jnp.zeros(x.shape[:2], jnp.int32)
        run = functools.partial(_run_layer, network, number)
        return re.sub(r" at 0x\w+", "", str(jax.make_jaxpr(run)(block, x, positions, (empty, empty))))

    firsts = [network.windows.index(window) for window in network.windows]
    blocks = enumerate(params["layers"])
    return frozenset(
        i
        for i, block in blocks
        if i != firsts[i] and program(network, i, block) != program(of_layer(network, i), firsts[i], block)
    )


def _run_layer(
    network: Network, index: int, block: Params, x: Array, positions: Array, held: tuple[Array, Array]
) -> tuple[Array, Any]:
    window = network.windows[index]

    def attend(_: int, heads: Heads, carry: Any) -> tuple[Array, Any]:
        (k, v), _ = carry
        b, t, n, h = heads.q.shape
        at = (jnp.arange(b)[:, None], positions)
        k, v = k.at[at].set(heads.k.astype(k.dtype)), v.at[at].set(heads.v.astype(v.dtype))
        q = heads.q.reshape(b, t, k.shape[2], -1, h)
        s = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * h**-0.5
        s = s if heads.softcap is None else heads.softcap * jnp.tanh(s / heads.softcap)
        age = positions[:, :, None] - jnp.arange(TOKENS)
        visible = (age >= 0) if window is None else (age >= 0) & (age < window)
        s = jnp.where(visible[:, None, None], s, -jnp.inf)
        if heads.sinks is not None:
            sinks = heads.sinks.astype(jnp.float32).reshape(k.shape[2], -1, 1, 1)
            s = jnp.concatenate([s, jnp.broadcast_to(sinks, (*s.shape[:-1], 1))], axis=-1)
        p = jax.nn.softmax(s, axis=-1)[..., :TOKENS].astype(v.dtype)
        return jnp.einsum("bkgts,bskh->btkgh", p, v).reshape(b, t, n, h), ((k, v), _wrong(heads, positions))

    return network.layer(block, index, x, positions, attend, (held, {}))


_layer = jax.jit(_run_layer, static_argnums=(0, 1))


def _wrong(heads: Heads, positions: Array) -> dict[str, Array]:
    """How far what heads say of themselves is from what they are."""
    rotate = heads.rotate or (lambda x, positions: x)
    pairs = [(rotate(heads.q_pre, positions), heads.q), (rotate(heads.k_pre, positions), heads.k)]
    errors = {"rotate": jnp.stack([_apart(a, b) for a, b in pairs]).max()}
    if heads.project is not None:
        errors["project"] = _apart(heads.project(heads.hidden), heads.q_pre)
    return errors


def _apart(a: Array, b: Array) -> Array:
    """The largest difference, in shares of the largest value; infinite where one is not finite."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    share = jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-30)
    return jnp.where(jnp.isfinite(share), share, jnp.inf)


def _law(most: float, says: str, left: Sequence[Array], right: Sequence[Array], hint: str) -> Law:
    apart = [float(_apart(a, b)) for a, b in zip(left, right)]
    broken = [at for at, share in enumerate(apart) if share > most]
    if broken:
        return Law(says, apart[broken[0]], broken[0] - 1, hint)
    return Law(says, max(apart), None, hint)


def _stated(says: str, layers: Sequence[dict[str, Array]], name: str, most: float) -> Law:
    hint = {
        "rotate": "`rotate(q_pre, positions)` must be q, and so for k.",
        "project": "`project(hidden)` must be q_pre.",
    }[name]
    apart = [float(layer[name]) if name in layer else 0.0 for layer in layers]
    broken = [at for at, share in enumerate(apart) if share > most]
    return Law(says, apart[broken[0]] if broken else max(apart), broken[0] if broken else None, hint)


# --- the protocol's shapes ------------------------------------------------------------------------


def _check_protocol(model: Weighted) -> None:
    network, params = model.network, model.params

    def require(holds: bool, rule: str) -> None:
        if not holds:
            raise LawError(
                f"check({type(network).__name__}): {rule} docs/flax.md shows a model that keeps it."
            )

    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions", "windows"):
        require(hasattr(network, name), f"the network has no {name}.")
    require(_hashes(network), "the network is not hashable, and jit takes it as a static argument.")
    groups = network.num_heads % network.num_kv_heads == 0
    require(groups, f"{network.num_heads} query heads do not divide over {network.num_kv_heads} KV heads.")
    table = isinstance(params, dict) and getattr(params.get("embed"), "ndim", 0) == 2
    require(table, 'params["embed"] is not an array [vocabulary, width].')
    layers = params.get("layers")
    require(
        isinstance(layers, list) and len(layers) == network.num_layers == len(network.windows),
        f'params["layers"] and windows need an entry for each of {network.num_layers} layers.',
    )
    width, seen = params["embed"].shape[1], []

    def attend(index: int, heads: Heads, carry: None) -> tuple[Any, None]:
        seen.append(heads)
        return jnp.zeros(heads.q.shape, heads.v.dtype), carry

    at = jnp.zeros((1, 2), jnp.int32)

    def run(params: Params) -> Any:
        x = network.embed(params, at, at)
        x, _ = network.layer(params["layers"][0], 0, x, at, attend, None)
        return x, network.logits(params, x)

    x, logits = jax.eval_shape(run, params)
    require(len(seen) == 1, f"layer 0 calls attend {len(seen)} times; it must call it once.")
    n, k, h = network.num_heads, network.num_kv_heads, network.head_dim
    shapes = {
        "q": (1, 2, n, h),
        "q_pre": (1, 2, n, h),
        "k": (1, 2, k, h),
        "k_pre": (1, 2, k, h),
        "v": (1, 2, k, h),
    }
    for name, shape in shapes.items():
        got = getattr(seen[0], name).shape
        require(
            got == shape, f"layer 0 gives attend {name} of shape {got}; it must be {shape}, [B, T, heads, H]."
        )
    require(
        x.shape == (1, 2, width), f"layer 0 gives {x.shape} for x of {(1, 2, width)}; it must keep the shape."
    )
    right = logits.shape == (1, 2, params["embed"].shape[0]) and logits.dtype == jnp.float32
    require(right, f"logits are {logits.dtype} {logits.shape}; they must be float32 [..., vocabulary].")


def _hashes(network: Any) -> bool:
    try:
        hash(network)
    except TypeError:
        return False
    return True
