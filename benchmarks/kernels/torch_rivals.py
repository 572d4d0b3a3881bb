"""PyTorch's attention and FlashAttention on the arrays of a timed call, shared without a copy if possible."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def _torch() -> Any:
    return importlib.import_module("torch")


def _theirs(x: jax.Array) -> Any:
    torch = _torch()
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        raise NotImplementedError(f"torch {torch.__version__} sees no GPU here")
    return torch.from_dlpack(jax.block_until_ready(x))


def wait(out: Any) -> Any:
    """Until the work behind ``out`` is done."""
    torch = _torch()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return out


def back(out: Any) -> Any:
    """Results as NumPy arrays; float32, which is what NumPy knows of them."""
    if isinstance(out, tuple):
        return tuple(map(back, out))
    return np.asarray(out.detach().float().cpu())


def _warm(call: Callable[[], Any]) -> Callable[[], Any]:
    wait(call())
    return call


def _timed(run: Callable[..., Any], gradient: bool, arrays: list[Any]) -> Callable[[], Any]:
    if not gradient:
        return _warm(lambda: run(*arrays))
    torch, leaves = _torch(), [x.detach().requires_grad_() for x in arrays]
    return _warm(lambda: torch.autograd.grad(run(*leaves).float().sum(), leaves))


def sdpa(gradient: bool, *qkv: jax.Array) -> Callable[[], Any]:
    """torch.nn.functional.scaled_dot_product_attention, causal; q [B, N, T, H], k and v [B, K, T, H]."""
    attend = _torch().nn.functional.scaled_dot_product_attention
    arrays = [_theirs(x) for x in qkv]
    return _timed(lambda q, k, v: attend(q, k, v, is_causal=True, enable_gqa=True), gradient, arrays)


def sdpa_dense(q: jax.Array, k: jax.Array, v: jax.Array) -> Callable[[], Any]:
    """The same, every query seeing all keys; q [B, N, T, H], k and v [B, S, K, H]."""
    attend = _torch().nn.functional.scaled_dot_product_attention
    arrays = [_theirs(q), *(_theirs(x).transpose(1, 2).contiguous() for x in (k, v))]
    return _warm(lambda: attend(*arrays, enable_gqa=True))


def flash(gradient: bool, *qkv: jax.Array) -> Callable[[], Any]:
    """flash_attn.flash_attn_func, causal."""
    attend = importlib.import_module("flash_attn").flash_attn_func
    arrays = [_theirs(x).transpose(1, 2).contiguous() for x in qkv]
    return _timed(lambda q, k, v: attend(q, k, v, causal=True), gradient, arrays)
