"""Others' attention, to time beside ours: cuDNN's, JAX's own Pallas operations, PyTorch's, FlashAttention.

A rival gets the arrays of a timed call in the layout that it needs, before the clock starts. It raises if it
is not installed, is for another platform or refuses the call; ``on_device`` records why.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks.kernels import torch_rivals
from benchmarks.kernels.operations import Rival
from pallas_kernels import dispatch
from pallas_kernels.measure.work import gradient_of_sum

OPS = "jax.experimental.pallas.ops"


def _rival(name: str, prepare: Callable[..., Callable[[], Any]], *args: Any, **more: Any) -> Rival:
    return Rival(name, lambda impl: prepare(*args), **more)


def ours(name: str, run: Callable[[str], Callable[..., Any]], args: tuple[Any, ...]) -> Rival:
    """Another of our own operations, by the implementation that is being measured."""
    return Rival(name, lambda impl: _jitted(run(impl), *args))


def _swap(x: jax.Array) -> jax.Array:
    """[B, N, T, H] to [B, T, N, H] and back."""
    return x.swapaxes(1, 2)


def _jitted(run: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    compiled = jax.jit(run).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    return lambda: compiled(*args)


def _only_on(platform: str) -> None:
    """Refuse another platform than this, unless bodies are interpreted."""
    if jax.default_backend() != platform and not dispatch.interpreting():
        raise NotImplementedError(f"for {platform}; this is {jax.default_backend()}")


def _both(run: Callable[..., Any], gradient: bool) -> Callable[..., Any]:
    return gradient_of_sum(run) if gradient else run


def _vendor(kind: Literal["cudnn", "xla"], gradient: bool, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    run = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=kind)
    return _jitted(_both(run, gradient), *map(_swap, (q, k, v)))


def _pallas_gpu(gradient: bool, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    """It has no grouped heads: keys and values are repeated before the clock starts."""
    _only_on("gpu")
    mha = importlib.import_module(f"{OPS}.gpu.attention")
    sizes = mha.BlockSizes(64, 64, 32, 32, 32, 32)
    options = {"sm_scale": q.shape[-1] ** -0.5, "causal": True, "block_sizes": sizes}
    more = {**options, "interpret": dispatch.interpreting()}
    run = lambda q, k, v: mha.mha(q, k, v, None, **more)  # noqa: E731
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    return _jitted(_both(run, gradient), *map(_swap, (q, k, v)))


def _splash(gradient: bool, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    _only_on("tpu")
    splash = importlib.import_module(f"{OPS}.tpu.splash_attention")
    b, n, t, h = q.shape
    mask = splash.MultiHeadMask([splash.CausalMask((t, t))] * (n // k.shape[1]))
    read = splash.make_splash_mqa_single_device(mask, interpret=dispatch.interpreting())

    def run(q: Any, k: Any, v: Any) -> Any:
        grouped = (q * h**-0.5).reshape(b, k.shape[1], -1, t, h)
        return jax.vmap(jax.vmap(read))(grouped, k, v).reshape(q.shape)

    return _jitted(_both(run, gradient), q, k, v)


def prompt(q: jax.Array, k: jax.Array, v: jax.Array, *, gradient: bool = False) -> tuple[Rival, ...]:
    """Full causal attention; q [B, N, T, H], k and v [B, K, T, H]."""
    args = (gradient, q, k, v)

    def back(out: Any) -> Any:
        return jax.tree.map(_swap, out)

    none = None if gradient else back
    torch = {"wait": torch_rivals.wait}
    return (
        _rival("cudnn", _vendor, "cudnn", *args, like=back),
        _rival("xla", _vendor, "xla", *args, like=back),
        _rival("jax_pallas_gpu", _pallas_gpu, *args, like=none),
        _rival("jax_splash_tpu", _splash, *args, like=lambda out: out),
        _rival("torch_sdpa", torch_rivals.sdpa, *args, like=torch_rivals.back, **torch),
        _rival("flash_attn", torch_rivals.flash, *args, **torch),
    )


def _flat(q: Any, k: Any, table: Any, length: Any) -> tuple[Any, Any, Any]:
    """Each (row, KV head) as a sequence of its own over pages of one head."""
    b, kv, m = table.shape
    return q.reshape(b * kv, -1, q.shape[3]), table.reshape(b * kv, m), length.reshape(b * kv)


def _paged_gpu(q: Any, k: Any, v: Any, table: Any, length: Any, scales: Any) -> Callable[[], Any]:
    _only_on("gpu")
    if scales is not None:
        raise NotImplementedError("its int8 scales are one a token, ours one a page and channel")
    paged = importlib.import_module(f"{OPS}.gpu.paged_attention").paged_attention
    flat, lists, live = _flat(q, k, table, length)
    run = functools.partial(paged, k_splits=4, attn_logits_soft_cap=None, interpret=dispatch.interpreting())
    scaled = flat * q.shape[3] ** -0.5
    return _jitted(run, scaled.astype(q.dtype), k[None], v[None], lists, live)


def _paged_tpu(q: Any, k: Any, v: Any, table: Any, length: Any, scales: Any) -> Callable[[], Any]:
    _only_on("tpu")
    if scales is not None:
        raise NotImplementedError("its int8 scales are one a token, ours one a page and channel")
    paged = importlib.import_module(f"{OPS}.tpu.paged_attention").paged_attention
    flat, lists, live = _flat(q, k, table, length)
    run = functools.partial(paged, pages_per_compute_block=min(16, table.shape[2]))
    scaled = (flat * q.shape[3] ** -0.5).astype(q.dtype)
    tpu = importlib.import_module("jax.experimental.pallas.tpu")
    with tpu.force_tpu_interpret_mode() if dispatch.interpreting() else contextlib.nullcontext():
        return _jitted(run, scaled, k[None], v[None], live, lists)


def _contiguous(k: Any, table: Any, length: Any, scales: Any, which: int) -> jax.Array:
    """The live pages of every list one after another, [B, S, K, H]; lists are of one length."""
    b, kv, _ = table.shape
    live = int(length[0, 0]) // k.shape[1]
    x = k[table[:, :, :live]]
    if scales is not None:
        x = (x * scales[table[:, :, :live], which][..., None, :]).astype(jnp.bfloat16)
    return x.reshape(b, kv, -1, k.shape[2]).swapaxes(1, 2)


def _dense(kind: Any, q: Any, k: Any, v: Any, table: Any, length: Any, scales: Any) -> Callable[[], Any]:
    """The same keys and values without pages: what an unragged, uncompressed cache would read."""
    keys = [_contiguous(x, table, length, scales, i) for i, x in enumerate((k, v))]
    run = functools.partial(jax.nn.dot_product_attention, implementation=kind)
    return _jitted(run, _swap(q), *keys)


def _dense_torch(q: Any, k: Any, v: Any, table: Any, length: Any, scales: Any) -> Callable[[], Any]:
    keys = [_contiguous(x, table, length, scales, i) for i, x in enumerate((k, v))]
    return torch_rivals.sdpa_dense(q, *keys)


def decode(q: Any, k: Any, v: Any, table: Any, length: Any, scales: Any) -> tuple[Rival, ...]:
    """Reads of the same live slots, through pages or (lists being of one length) without."""
    args = (q, k, v, table, length, scales)
    paged = lambda out: out.reshape(q.shape)  # noqa: E731
    return (
        _rival("jax_paged_gpu", _paged_gpu, *args, like=paged),
        _rival("jax_paged_tpu", _paged_tpu, *args, like=paged),
        _rival("dense_cudnn", _dense, "cudnn", *args, like=_swap),
        _rival("dense_xla", _dense, "xla", *args, like=_swap),
        _rival("dense_torch_sdpa", _dense_torch, *args, wait=torch_rivals.wait, like=torch_rivals.back),
    )
