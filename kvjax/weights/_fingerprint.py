"""A fingerprint of a model, for learned weights, results of an evaluation and saved states."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.types import Weighted

if TYPE_CHECKING:
    from jaxtyping import Bool

SAMPLED = 256
"""Entries of each weight matrix that the fingerprint covers."""

SIZES = ("layers", "kv_heads", "head_dim")


def fingerprint(model: Weighted) -> str:
    """Sixteen hex digits that identify a model, the same for every dtype it is loaded in.

    SHA-256 over layers, KV heads and head dim, the name and shape of every parameter, and the signs of 256
    entries spread over each weight matrix: rounding to another float type keeps signs, any training of the
    model flips some. Of quantised weights the signs are those that their model holds (``signs``), of the
    file's values.
    """
    network, digest = model.network, hashlib.sha256()
    digest.update(f"{network.num_layers} {network.num_kv_heads} {network.head_dim}".encode())
    for name, shape, signs in _parameters(model):
        digest.update(f"{name} {shape}".encode())
        if signs is not None:
            digest.update(np.packbits(signs).tobytes())
    return digest.hexdigest()[:16]


def architecture_and_signs(model: Weighted) -> tuple[str, Bool[np.ndarray, " S"]]:
    """Sixteen hex digits of the names and shapes of all parameters; the signs that ``fingerprint`` covers."""
    parameters = list(_parameters(model))
    shapes = "".join(f"{name} {shape}\n" for name, shape, _ in parameters)
    digest = hashlib.sha256((" ".join(sizes(model).values()) + "\n" + shapes).encode()).hexdigest()[:16]
    return digest, np.concatenate([signs for _, _, signs in parameters if signs is not None])


def _parameters(model: Weighted) -> Iterator[tuple[str, tuple[int, ...], np.ndarray | None]]:
    """(name, shape, signs of sampled entries; None but for matrices) of each, in the order of names.

    Shapes and entries are counted in the order of axes that the network names, where a leaf lies otherwise.
    """
    hashed = getattr(model.network, "fingerprint_axes", {})
    quantised = lambda x: hasattr(x, "codes")  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(model.params, is_leaf=quantised)
    for path, leaf in sorted(leaves, key=lambda pair: jax.tree_util.keystr(pair[0])):
        name, axes = jax.tree_util.keystr(path), hashed.get(getattr(path[-1], "key", None), range(leaf.ndim))
        if quantised(leaf):
            signs = model.signs[name]  # type: ignore[attr-defined]
        else:
            signs = sampled_signs(leaf, axes) if leaf.ndim >= 2 else None
        yield name, tuple(leaf.shape[axis] for axis in axes), signs


def sampled_signs(x: Any, axes: Sequence[int]) -> Bool[np.ndarray, " S"]:
    """Sign bits of entries at fixed places all over a matrix whose axes are counted in that order."""
    spread = np.arange(SAMPLED, dtype=np.uint64) * np.uint64(2654435761)  # golden ratio: hits every row
    places = np.unravel_index((spread % np.uint64(x.size)).astype(np.int64), [x.shape[axis] for axis in axes])
    at = tuple(place for _, place in sorted(zip(axes, places)))
    if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and len(x.sharding.device_set) > 1:
        whole = NamedSharding(x.sharding.mesh, PartitionSpec())  # so that each process gets the sample
        return np.asarray(_gather(whole)(x, at)).astype(bool)
    on_cpu = isinstance(x, np.ndarray) or all(device.platform == "cpu" for device in x.devices())
    # From a device only the sample is copied.
    return np.signbit(np.asarray(np.asarray(x)[at] if on_cpu else x[at]).astype(np.float32))


@functools.lru_cache(maxsize=8)
def _gather(whole: NamedSharding) -> Callable[..., jax.Array]:
    """Sign bits of entries of a matrix that is cut over devices.

    Gathered are integers: each device adds zeros for the entries of the others, and 0 + (-0.0) is 0.
    """
    return jax.jit(lambda x, at: jnp.signbit(x).astype(jnp.int8)[at], out_shardings=whole)


def sizes(model: Weighted) -> dict[str, str]:
    network = model.network
    return dict(zip(SIZES, map(str, (network.num_layers, network.num_kv_heads, network.head_dim))))


def name_of(model: Weighted) -> str:
    """The model's name without the path to it."""
    return Path(getattr(model, "name", "this model")).name
