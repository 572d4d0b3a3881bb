"""Makes tests/golden/decoding.npz: which tokens kvpress keeps while it decodes, step by step.

python tests/make_decoding_golden.py

Run by an interpreter of its own (torch 2.13, transformers 5.2, kvpress 0.5.5); nothing of kvjax is imported.

The model is golden/llama_tied. A prompt is read, then tokens are fed one at a time under DecodingPress, or
under PrefillDecodingPress with CompressionRatioDecodingPress. kvpress attends before it cuts and kvjax after,
so the activations of later tokens differ. They are recorded here, and both cut the same ones. Of K-norm and
KeyDiff the newest token stays (``newest``), which kvjax's step has yet to read; TOVA's press keeps it anyway.
SnapKV, expected attention and StreamingLLM are left out: inside DecodingPress they do not follow their own
definition (one position for all window queries; the length of a buffer; slots in order of score).

For the case NAME:
  NAME.q [L, N, T, H], NAME.k, NAME.v [L, K, T, H]: after RoPE, of the prompt and of what was fed
  NAME.kept: bits [S, L, K, T], what the cache holds after each fed token
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama import modeling_llama

HOME = Path(__file__).parent / "golden"
FED, INTERVAL = 69, 12


def newest(kind: type) -> type:
    """The press, which never drops the newest token."""

    class Newest(kind):
        def score(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            scores = super().score(*args, **kwargs).clone()
            scores[..., -1] = torch.inf
            return scores

    return Newest


KNorm, KeyDiff = newest(kvpress.KnormPress), newest(kvpress.KeyDiffPress)


def decoding(press: Any, target: int) -> Any:
    return kvpress.DecodingPress(press, compression_interval=INTERVAL, target_size=target)


CASES: dict[str, tuple[int, Any]] = {
    "knorm": (24, decoding(KNorm(), 30)),
    "keydiff": (24, decoding(KeyDiff(), 30)),
    "tova": (23, decoding(kvpress.TOVAPress(), 30)),  # kvjax decides a step later (tests/policies)
    "knorm_ratio": (
        24,
        kvpress.PrefillDecodingPress(
            KNorm(compression_ratio=0.5),
            kvpress.CompressionRatioDecodingPress(
                KNorm(), compression_interval=INTERVAL, target_compression_ratio=0.5
            ),
        ),
    ),
    "keydiff_then_knorm": (
        24,
        kvpress.PrefillDecodingPress(KeyDiff(compression_ratio=0.25), decoding(KNorm(), 18)),
    ),
}
"""Tokens of the prompt, and the press."""


@torch.inference_mode()
def recorded(prompt: int, press: Any) -> dict[str, np.ndarray]:
    """The arrays of one case."""
    model = AutoModelForCausalLM.from_pretrained(HOME / "llama_tied", dtype=torch.float32).eval()
    turned: list[tuple[torch.Tensor, torch.Tensor]] = []
    values: list[torch.Tensor] = []
    rotate = modeling_llama.apply_rotary_pos_emb
    attentions = [layer.self_attn for layer in model.model.layers]

    def keep_turned(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        turned.append(rotate(*args, **kwargs))
        return turned[-1]

    def keep_value(module: Any, inputs: Any, output: torch.Tensor) -> None:
        values.append(output.unflatten(-1, (-1, model.config.head_dim)).transpose(1, 2))

    hooks = [attention.v_proj.register_forward_hook(keep_value) for attention in attentions]
    # No two tokens are alike, so that no two keys of a layer have one norm.
    ids = torch.from_numpy(3 + np.random.default_rng(4).permutation(93)[: prompt + FED])[None]
    cache, sets, seen = DynamicCache(), [], []
    layers = len(attentions)
    modeling_llama.apply_rotary_pos_emb = keep_turned
    try:
        with press(model):
            for begin, end in [(0, prompt), *((at, at + 1) for at in range(prompt, prompt + FED))]:
                at = torch.arange(begin, end)
                model.model(
                    input_ids=ids[:, begin:end],
                    past_key_values=cache,
                    position_ids=at[None],
                    cache_position=at,
                )
                q, k = (torch.stack([one[i][0] for one in turned[-layers:]]) for i in (0, 1))
                seen.append((q, k, torch.stack([one[0] for one in values[-layers:]])))
                held = torch.cat([k for _, k, _ in seen], dim=2).numpy()
                kept = np.zeros((*held.shape[:2], prompt + FED), bool)
                for layer, of_layer in enumerate(cache.layers):
                    for head, keys in enumerate(of_layer.keys[0].numpy()):
                        place = {key.tobytes(): i for i, key in enumerate(held[layer, head])}
                        kept[layer, head, [place[key.tobytes()] for key in keys]] = True
                sets.append(kept)
    finally:
        modeling_llama.apply_rotary_pos_emb = rotate
        for hook in hooks:
            hook.remove()
    heads = {name: torch.cat(x, dim=2).numpy() for name, x in zip("qkv", zip(*seen))}
    return heads | {"kept": np.packbits(np.stack(sets[1:]))}


if __name__ == "__main__":
    arrays = {}
    for name, (length, press) in CASES.items():
        arrays |= {f"{name}.{key}": x for key, x in recorded(length, press).items()}
        t = length + FED
        bits = np.unpackbits(arrays[f"{name}.kept"])[: FED * 2 * 2 * t].reshape(FED, 2, 2, t)
        print(name, bits.sum(axis=-1)[:, 0, 0].tolist())
    np.savez_compressed(HOME / "decoding.npz", **arrays)
