"""Makes golden.npz, kvpress.npz and wrapped.npz: what transformers and kvpress give on the real model.

python tests/real/make_golden.py FOLDER           # the model in Hugging Face's format
python tests/real/make_golden.py FOLDER wrapped   # these files alone

Run by an interpreter of its own (torch 2.13, transformers 5.2, kvpress 0.5.5); nothing of kvjax is imported.
Two minutes on one core.

golden.npz, for prompt i:
  ids_i [T], greedy_i [24]: the prompt, and what follows it in float32
  logprobs_i, logprobs_bf16_i [T + 23]: of each next token of both, in nats
  probe_i [64]: of every 768th token of the vocabulary where the answer begins
kvpress.npz, for the c-th pair of an eviction and a ratio:
  logprobs_c [48]: of the token after each of the fed ones
  kept_c: bits [L, K, 768], which tokens of the context the cache holds
wrapped.npz, for the c-th pair of a wrapper and a ratio: kept_c.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import kvpress
import numpy as np
import torch
from real_prompts import (
    BOOK,
    CHATS,
    CONTEXT,
    FED,
    LONG,
    NEW,
    PLAIN,
    PRESSES,
    PROBE,
    RATIOS,
    WRAPPED,
    WRAPPED_RATIOS,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

HOME = Path(__file__).parent


def next_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    """Log-probability [T - 1] of each token after the first; ``logits`` [T - 1, V]."""
    chosen = logits.float().log_softmax(dim=-1).gather(1, ids[1:, None])[:, 0]
    return chosen.numpy()


@torch.inference_mode()
def of_transformers(folder: str) -> dict[str, np.ndarray]:
    """Greedy tokens and log-probabilities of every prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    texts = [*PLAIN]
    texts += [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in CHATS]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    prompts.append(tokenizer.encode(BOOK, add_special_tokens=False)[:LONG])
    arrays = {}
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        # An end token is a token like any other: greedy decoding goes on behind it.
        whole = exact.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=-1
        )
        for name, model in (("logprobs", exact), ("logprobs_bf16", rounded)):
            logits = model(input_ids=whole[:, :-1]).logits[0]
            arrays[f"{name}_{i}"] = next_logprobs(logits, whole[0])
            if model is exact:
                first = logits[len(prompt) - 1].log_softmax(dim=-1)
                arrays[f"probe_{i}"] = first[::PROBE].numpy()
        arrays[f"ids_{i}"] = np.asarray(prompt, np.int32)
        arrays[f"greedy_{i}"] = whole[0, len(prompt) :].numpy().astype(np.int32)
        print(i, len(prompt), repr(tokenizer.decode(whole[0, len(prompt) :])), flush=True)
    return arrays


@torch.inference_mode()
def of_kvpress(folder: str) -> dict[str, np.ndarray]:
    """Log-probabilities and kept tokens under every press and ratio."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(tokenizer.encode(BOOK, add_special_tokens=False)[: CONTEXT + FED + 1])
    full = DynamicCache()
    model.model(input_ids=ids[None, :CONTEXT], past_key_values=full)
    keys = [layer.keys[0] for layer in full.layers]
    arrays, at = {}, torch.arange(CONTEXT, CONTEXT + FED)[None]
    for c, (name, ratio) in enumerate((name, ratio) for name in PRESSES for ratio in RATIOS):
        kind, arguments = PRESSES[name]
        cache = DynamicCache()
        with getattr(kvpress, kind)(compression_ratio=ratio, **arguments)(model):
            model.model(input_ids=ids[None, :CONTEXT], past_key_values=cache)
        kept = np.stack([held(layer.keys[0], whole) for layer, whole in zip(cache.layers, keys)])
        logits = model(
            input_ids=ids[None, CONTEXT : CONTEXT + FED], past_key_values=cache, position_ids=at
        ).logits[0]
        arrays[f"logprobs_{c}"] = next_logprobs(logits, ids[CONTEXT:])
        arrays[f"kept_{c}"] = np.packbits(kept)
        nats = -arrays[f"logprobs_{c}"].mean()
        print(c, name, ratio, kept.sum(axis=-1).min(), kept.sum(axis=-1).max(), nats, flush=True)
    return arrays


@torch.inference_mode()
def of_wrappers(folder: str) -> dict[str, np.ndarray]:
    """Tokens that are kept under every wrapper and ratio."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(tokenizer.encode(BOOK, add_special_tokens=False)[:CONTEXT])[None]
    full, arrays = DynamicCache(), {}
    model.model(input_ids=ids, past_key_values=full)
    tokenizer.chat_template = None  # else KVzip takes the first tokens for a template's and scores them 0
    plain = tempfile.TemporaryDirectory()
    tokenizer.save_pretrained(plain.name)
    model.config.name_or_path = plain.name  # where KVzip looks for it
    for c, (name, ratio) in enumerate((name, ratio) for name in WRAPPED for ratio in WRAPPED_RATIOS):
        outer, inner, arguments = WRAPPED[name]
        cache = DynamicCache()
        press = getattr(kvpress, inner)(compression_ratio=ratio, **arguments)
        press = getattr(kvpress, outer)(press) if outer else press
        with press(model):
            model.model(input_ids=ids, past_key_values=cache)
        kept = np.stack([held(one.keys[0], all_.keys[0]) for one, all_ in zip(cache.layers, full.layers)])
        for index, layer in enumerate(model.model.layers):  # where heads differ, it keeps all and masks
            masked = getattr(layer.self_attn, "masked_key_indices", None)
            if masked is not None:
                kept[index, masked[1].numpy(), masked[2].numpy()] = False
                layer.self_attn.masked_key_indices = None
        arrays[f"kept_{c}"] = np.packbits(kept)
        print(c, name, ratio, kept.sum(axis=-1).min(), kept.sum(axis=-1).max(), flush=True)
    return arrays


def held(keys: torch.Tensor, whole: torch.Tensor) -> np.ndarray:
    """Which tokens [K, T] a cache holds: after RoPE no two keys of a head are equal."""
    kept = np.zeros(whole.shape[:2], bool)
    for head, (some, all_) in enumerate(zip(keys.numpy(), whole.numpy())):
        place = {key.tobytes(): position for position, key in enumerate(all_)}
        assert len(place) == len(all_)
        kept[head, [place[key.tobytes()] for key in some]] = True
    return kept


if __name__ == "__main__":
    FILES = {"golden": of_transformers, "kvpress": of_kvpress, "wrapped": of_wrappers}
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(FILES):
        sys.exit(__doc__)
    for file in sys.argv[2:] or FILES:
        np.savez_compressed(HOME / f"{file}.npz", **FILES[file](sys.argv[1]))
