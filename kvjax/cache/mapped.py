"""Pages that are mapped from a file: programs read them where they are, and nobody writes them.

They are host memory that is backed by a saved context (``kvjax.open(..., host="file")``). What a program is
given for good it must be free to write, so jax would copy them first: ``jit`` donates all but them.

Why: kvjax/DESIGN.md, 39.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.hosted import IN_HOST, Hosted, Near, empty, host_memory, in_host, on_device, shapes
from kvjax.cache.pages import Pages
from kvjax.sharding.mesh import ONE

AT_A_TIME = 256
"""Pages whose keys are coded at a time."""


def of_file(
    pages: Pages, near: Near, stored: dict[str, Any], table: np.ndarray, begins: np.ndarray
) -> Hosted:
    """Hosted pages whose keys and values stay where they are.

    Args:
      pages: those of the layer that go on from them.
      near: what the device has of them.
      stored: ``k``, ``v`` and ``pos`` of all slots, of which the first two may be mapped; ``scales`` and
        ``summary`` of the pages.
      table: ids of the pages of each KV head, EMPTY behind the last.
      begins: first slot of each page.

    Keys that a selection ranks by are read once, into memory: as they are, or as their codes.
    """
    count, like = len(begins), shapes(pages, near)
    nothing: dict[str, Any] = dict.fromkeys((*IN_HOST, "scales", "summary", "keys", "key_scales"))
    bare = empty(dataclasses.replace(like, **nothing))
    bits = {name: x.view(getattr(like, name).dtype) for name, x in stored.items() if name in IN_HOST}
    keys = key_scales = None
    if near.keys:
        slots = begins[:, None] + np.arange(pages.size)
        keys, key_scales = _keys(stored["k"], slots, near)
    of_pages: dict[str, Any] = {
        "scales": stored["scales"],
        "summary": stored["summary"],
        "keys": keys,
        "key_scales": key_scales,
        "table": table,
        "owned": (table >= 0).sum(axis=-1, dtype=np.int32),
        "taken": np.int32(count),
        "begins": begins,
    }
    here = dataclasses.replace(bare, **of_pages)
    far: dict[str, Any] = {name: jax.device_put(x, host_memory()) for name, x in bits.items()}
    for name in ("k", "v"):
        if far[name].unsafe_buffer_pointer() != bits[name].ctypes.data:
            raise AssertionError(f"{name} was copied, not mapped")
    return dataclasses.replace(ONE.put(here, here.specs()), **far)


def _keys(k: np.ndarray, slots: np.ndarray, near: Near) -> tuple[Any, Any]:
    """Keys of the pages with these slots, as the selection ranks them."""
    if near.index is None:
        return k[slots], None
    code = jax.jit(jax.vmap(near.index.of_page))
    coded = [
        jax.device_get(code(jnp.asarray(k[slots[at : at + AT_A_TIME]])))
        for at in range(0, len(slots), AT_A_TIME)
    ]
    codes, scales = zip(*coded)
    return np.concatenate(codes), np.concatenate(scales)


def has_mapped(tree: Any) -> bool:
    """Is a page of this layer, or of a layer of this state, mapped?"""
    layers = getattr(tree, "layers", (tree,))
    return any(layer.hosted is not None and layer.hosted.mapped for layer in layers)


def without_mapped(tree: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The tree without what is mapped, and that."""
    far: list[dict[str, Any]] = []

    def without(node: Any) -> Any:
        if not _is_mapped(node):
            return node
        far.append(in_host(node))
        return on_device(node)

    return jax.tree.map(without, tree, is_leaf=_is_mapped), far


def with_mapped(tree: Any, far: Sequence[dict[str, Any]]) -> Any:
    """``without_mapped`` undone."""
    rest = iter(far)
    return jax.tree.map(
        lambda node: dataclasses.replace(node, **next(rest)) if _is_mapped(node) else node,
        tree,
        is_leaf=_is_mapped,
    )


def _is_mapped(node: Any) -> bool:
    return isinstance(node, Hosted) and node.mapped


class jit:  # noqa: N801, it is jax.jit
    """``jax.jit`` of a function that is given a state, or a layer's cache, for good.

    What is mapped of it is not given: it is read, and is in the result as it was.
    """

    def __init__(self, function: Callable[..., Any], *, static: Sequence[str], donate: str) -> None:
        self.__doc__, self.__wrapped__ = function.__doc__, function
        plain: Any = jax.jit(function, static_argnames=tuple(static), donate_argnames=donate)
        self._plain, self._cache_size, self.trace, self.lower = (
            plain,
            plain._cache_size,
            plain.trace,
            plain.lower,
        )
        self._names = names = [*inspect.signature(function).parameters]
        self._at = names.index(donate)

        def beside(far: Any, *args: Any, **named: Any) -> Any:
            args = (*args[: self._at], with_mapped(args[self._at], far), *args[self._at + 1 :])
            return without_mapped(function(*args, **named))[0]

        self._beside = jax.jit(
            beside,
            static_argnums=tuple(1 + names.index(name) for name in static),
            static_argnames=tuple(static),
            donate_argnums=1 + self._at,
        )

    def __call__(self, *args: Any, **named: Any) -> Any:
        """As the function."""
        args = (*args, *(named.pop(name) for name in self._names[len(args) : self._at + 1]))
        if not has_mapped(args[self._at]):
            return self._plain(*args, **named)
        given, far = without_mapped(args[self._at])
        return with_mapped(self._beside(far, *args[: self._at], given, *args[self._at + 1 :], **named), far)
