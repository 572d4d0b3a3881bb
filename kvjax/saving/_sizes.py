"""What a state's head and arrays must be by the model and the policy, checked before caches are made.

A digest tells damage, not malice: the writer of a file also writes its digest. So no number of a file is
believed. Arrays are as long as the file; every other size follows from the model, the policy and the lengths
of lists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from kvjax.algebra import Native, Policy, PolicyError
from kvjax.cache.pool import size_class
from kvjax.cache.zeros import of_slots
from kvjax.saving._file import Shape
from kvjax.saving._format import StateError, named_scales
from kvjax.types import Network

WORDS = ("model", "policy", "structure", "weights", "dtype")

LEAST = 256
"""A chunk and a page may have so many tokens, whatever the positions of the model: the defaults."""

OWN_SUMMARIES = 4
"""From this version on what a selection keeps for a page has the dtype of the keys, before it was float32."""

GIVE = "Give a file that save wrote."

Expected = dict[str, tuple[np.dtype[Any], tuple[int | str, ...]]]
"""Dtype and shape of each array; a word stands for a number that the state's content decides."""


def check_head(call: str, head: Mapping[str, Any]) -> None:
    """Refuses a head whose values are not of the kinds that ``save`` writes."""

    def whole(*numbers: Any) -> bool:
        return all(type(number) is int and number >= 0 for number in numbers)

    def is_layer(layer: Any) -> bool:
        pools = [(pool["size"], pool["entries"]) for pool in layer["pools"]]
        return whole(layer["window"], layer["summary"]) and all(whole(*pool) for pool in pools)

    try:
        sound = {
            **{name: isinstance(head[name], str) for name in WORDS},
            **{name: whole(head[name]) for name in ("context", "chunk")},
            "notes": all(isinstance(word, str) for word in head["notes"].values()),
            "layers": isinstance(head["layers"], list) and all(map(is_layer, head["layers"])),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{call} has a head without {error}. {GIVE}") from error
    for name in sound:
        if not sound[name]:
            raise StateError(f"{call} has {name}={head[name]!r} in its head. {GIVE}")


def expected(
    call: str,
    head: Mapping[str, Any],
    policy: Policy,
    network: Network,
    dtype: Any,
    *,
    rows: int,
    heads: int,
    first: bool = True,
) -> Expected:
    """The arrays of a state, or of a part of one.

    Args:
      call: for errors.
      head: of the file.
      policy: it was made under.
      network: of the model.
      dtype: of the model's weights.
      rows, heads: of the file.
      first: is it a whole state, or the first part?

    Raises:
      StateError: a size in the head that is not of this model, policy and context.
    """
    context, most = head["context"], network.max_positions

    def check(name: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            rule = f"{low}" if low == high else f"{low} to {high}"
            raise StateError(
                f"{call} has {name}={value} in its head, and '{policy!r}' on this model has {rule}. {GIVE}"
            )

    check("context", context, 1, most)
    check("chunk", head["chunk"], 1, max(most, LEAST))
    check("layers", len(head["layers"]), network.num_layers, network.num_layers)
    int32, float32 = np.dtype(np.int32), np.dtype(np.float32)
    arrays: Expected = {"length": (int32, (rows,)), "total": (int32, (rows,))}
    arrays |= {"peak": (float32, (2,))} if first else {}
    arrays |= {"confidence": (float32, (rows,))} if policy.budget.needs_logits else {}
    lists, dim = 2 if policy.selection.splits else 1, network.head_dim
    for index, (layer, own_window) in enumerate(zip(head["layers"], network.windows)):
        low, high, pools = _layout(policy, context, own_window, layer["window"])
        check(f"window of layer {index}", layer["window"], low, high)
        check(f"pools of layer {index}", len(layer["pools"]), len(pools), len(pools))
        ring: Any = (rows, heads, f"{index}.ring")
        arrays |= {f"{index}.ring.{name}": (dtype, (*ring, dim)) for name in "kv"}
        arrays[f"{index}.ring.admit"] = np.dtype(bool), ring
        arrays |= _kept(f"{index}.ring.meta", policy, ring)
        per_row = heads * network.num_heads // network.num_kv_heads
        for name in policy.queries if pools else ():
            arrays[f"{index}.ring.queries.{name}"] = dtype, (rows, per_row, "queries", dim)
        summary = []
        if pools:
            summary = jax.tree.leaves(
                jax.eval_shape(lambda: policy.completion.empty(rows, heads, dim, context))
            )
        check(f"summary of layer {index}", layer["summary"], len(summary), len(summary))
        arrays |= {f"{index}.summary.{at}": (leaf.dtype, leaf.shape) for at, leaf in enumerate(summary)}
        for kind, (storage, pool) in enumerate(zip(pools, layer["pools"])):
            at = f"{index}.pages.{kind}"
            check(f"size of pages {at}", pool["size"], 1, max(most, LEAST))
            check(f"entries of {at}", pool["entries"], 1, -(-context // pool["size"]))
            slots: Any = (f"{at}.slots",)
            stored = storage.dtype(dtype), (*slots, storage.width(dim))
            arrays |= {f"{at}.length": (int32, (rows, heads, lists)), f"{at}.pos": (int32, slots)}
            arrays |= {f"{at}.k": stored, f"{at}.v": stored} | _kept(f"{at}.meta", policy, slots)
            try:
                scales = named_scales(storage.scales(pool["size"], dim))
                shapes = policy.selection.summary_shapes(pool["size"], dim)
            except PolicyError as error:
                raise StateError(f"{call} has pages that do not fit: {error}") from error
            arrays |= {f"{at}.{n}": (x.dtype, (f"{at}.pages", *x.shape)) for n, x in scales.items()}
            of_pages = storage.read_dtype(dtype) if head["version"] >= OWN_SUMMARIES else float32
            arrays |= {
                f"{at}.summary.{n}": (of_pages, (f"{at}.pages", *shape)) for n, shape in shapes.items()
            }
    return {name: (np.dtype(kind), shape) for name, (kind, shape) in arrays.items()}


def _layout(policy: Policy, context: int, own: int | None, window: int) -> tuple[int, int, tuple[Any, ...]]:
    """The least and the widest window of a layer, and the storage of each of its pools."""
    if own is not None:
        return min(own, context), min(own, context), ()
    if all(part.idle for part in policy.parts):  # a ring; or with pages, of the engine's running batches
        return 1, context, (Native(),) if window < context else ()
    most = policy.window(context)
    if not policy.paged(context):
        return most, most, ()
    return most, most, (Native(), policy.storage)[0 if policy.exact_slots(most) else 1 :]


def _kept(at: str, policy: Policy, slots: tuple[Any, ...]) -> dict[str, Any]:
    """What parts keep with each slot."""
    kinds = of_slots(slots, policy.keeps, policy.arrays)
    return {f"{at}.{name}": (dtype, shape) for name, (shape, dtype) in kinds.items()}


def check_shapes(call: str, shapes: Mapping[str, Shape], wanted: Expected) -> None:
    """Refuses a file with other arrays than the expected ones and those beside the state."""
    own = {name: shape for name, shape in shapes.items() if not name.startswith("extra.")}
    if own.keys() != wanted.keys():
        odd = sorted(own.keys() ^ wanted.keys())
        raise StateError(f"{call} has other arrays than its policy keeps ({odd[0]}). {GIVE}")
    for name, (dtype, shape) in own.items():
        kind, size = wanted[name]
        fits = len(shape) == len(size) and all(isinstance(m, str) or n == m for n, m in zip(shape, size))
        if dtype != kind or not fits:
            raise StateError(
                f"{call} holds {name} as {dtype} {list(shape)}, and this model and policy have {kind} "
                f"{list(size)}. {GIVE}"
            )


def check_content(
    call: str,
    arrays: Mapping[str, np.ndarray],
    wanted: Expected,
    head: Mapping[str, Any],
    policy: Policy,
    written: int,
) -> int:
    """Checks arrays whose length the content decides.

    Args:
      call: for errors.
      arrays: of a file, which passed ``check_shapes``.
      wanted: what they should be.
      head: of the file.
      policy: it was made under.
      written: most tokens that a row of the whole state has seen.

    Returns:
      Bytes that its caches will take.

    Raises:
      StateError: lists, positions or sizes that no state has.
    """
    context = head["context"]
    most = max(policy.queries.values(), default=0)
    numbers = {"queries": min(most, written)}  # that the file must have
    whole = {"queries": most}  # in the caches
    tables = 0
    _check_range(call, "length", arrays["length"], context)
    _check_range(call, "total", arrays["total"], context)
    for index, layer in enumerate(head["layers"]):
        numbers[f"{index}.ring"], whole[f"{index}.ring"] = min(layer["window"], written), layer["window"]
        for kind, pool in enumerate(layer["pools"]):
            at = f"{index}.pages.{kind}"
            length = arrays[f"{at}.length"]
            _check_range(call, f"{at}.length", length, min(context, pool["size"] * pool["entries"]))
            _check_range(call, f"{at}.pos", arrays[f"{at}.pos"], context - 1)
            pages = int((-(-length // pool["size"])).sum())
            numbers |= {f"{at}.slots": int(length.sum()), f"{at}.pages": pages}
            count = size_class(max(1, pages))
            whole |= {f"{at}.slots": count * pool["size"], f"{at}.pages": count}
            tables += 4 * length.size * pool["entries"]
    size = tables
    for name, (dtype, shape) in wanted.items():
        right = tuple(numbers[n] if isinstance(n, str) else n for n in shape)
        if arrays[name].shape != right:
            raise StateError(f"{call} holds {list(arrays[name].shape)} as {name}, not {list(right)}. {GIVE}")
        size += dtype.itemsize * math.prod(whole[n] if isinstance(n, str) else n for n in shape)
    return size


def _check_range(call: str, name: str, values: np.ndarray, most: int) -> None:
    if values.size and not (values.min() >= 0 and values.max() <= most):
        raise StateError(f"{call} holds {name} outside of 0 to {most}. {GIVE}")
