"""A fingerprint of a model, for learned weights, results of an evaluation and saved states."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
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
    model flips some.
    """
    network, digest = model.network, hashlib.sha256()
    digest.update(f"{network.num_layers} {network.num_kv_heads} {network.head_dim}".encode())
    for name, leaf in _by_name(model):
        digest.update(f"{name} {tuple(leaf.shape)}".encode())
        if leaf.ndim >= 2:
            digest.update(np.packbits(np.signbit(_sample(leaf))).tobytes())
    return digest.hexdigest()[:16]


def architecture(model: Weighted) -> str:
    """Sixteen hex digits of the name and shape of every parameter, whatever the values."""
    shapes = "".join(f"{name} {tuple(leaf.shape)}\n" for name, leaf in _by_name(model))
    return hashlib.sha256("".join(sizes(model).values()).encode() + shapes.encode()).hexdigest()[:16]


def signs(model: Weighted) -> Bool[np.ndarray, " S"]:
    """The signs that ``fingerprint`` covers, matrix after matrix: is the sampled entry negative?"""
    return np.concatenate([np.signbit(_sample(leaf)) for _, leaf in _by_name(model) if leaf.ndim >= 2])


def _by_name(model: Weighted) -> list[tuple[str, Any]]:
    """The parameters, in the order of their names."""
    leaves = jax.tree_util.tree_leaves_with_path(model.params)
    return sorted(((jax.tree_util.keystr(path), leaf) for path, leaf in leaves), key=lambda pair: pair[0])


def _sample(x: Any) -> np.ndarray:
    """Entries at fixed places all over a matrix, as float32."""
    spread = np.arange(SAMPLED, dtype=np.uint64) * np.uint64(2654435761)  # golden ratio: hits every row
    at = np.unravel_index((spread % np.uint64(x.size)).astype(np.int64), x.shape)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:  # across processes: each gets the sample
        whole = NamedSharding(x.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
        return np.asarray(jax.jit(lambda x: x[at], out_shardings=whole)(x)).astype(np.float32)
    on_cpu = isinstance(x, np.ndarray) or all(device.platform == "cpu" for device in x.devices())
    # From a device only the sample is copied.
    return np.asarray(np.asarray(x)[at] if on_cpu else x[at]).astype(np.float32)


def sizes(model: Weighted) -> dict[str, str]:
    network = model.network
    return dict(zip(SIZES, map(str, (network.num_layers, network.num_kv_heads, network.head_dim))))


def name_of(model: Weighted) -> str:
    """The model's name without the path to it."""
    return Path(getattr(model, "name", "this model")).name
