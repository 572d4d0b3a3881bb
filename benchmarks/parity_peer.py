"""kvpress's side of ``benchmarks parity``, run by the peers' interpreter: ``parity_peer.py FOLDER``.

Reads FOLDER/request.json and FOLDER/inputs.npz, writes FOLDER/answers.npz; imports nothing of ours.

For model m, case c and ratio r: ``kept_m_c_r`` [L, K, T] says which tokens the cache holds, ``score_m_c_r``
[L, K, T] what the press gave them, ``logits_m_c_r`` [F, V] what follows, ``bytes_m_c_r`` [2] the cache's size
after the prompt and after that; or ``error_m_c_r`` what it raised.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import kvpress
import numpy as np
import torch
from kvpress.presses import kvzip_press
from kvpress.presses.fastkvzip_press import FastKVzipGate
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar


def press_of(case: dict[str, Any], ratio: float, inputs: dict[str, np.ndarray], layers: int) -> Any:
    """The press, with our filters or statistics where it would fetch its own."""
    arguments = dict(case["arguments"])
    for name in case["of_ratio"]:
        arguments[name] = ratio
    press = getattr(kvpress, case["press"])(compression_ratio=ratio, **arguments)
    if case["press"] == "KVzapPress":
        press.kvzap_model, press.post_init_from_model = kvzap(inputs), lambda model: None
    if case["press"] == "FastKVzipPress":
        press.gates = gates(inputs)
    if case["wrapper"] == "LUKVPress":
        press = kvpress.LUKVPress(press, ratio)
        press._budget_curves = np.moveaxis(inputs["removed"], 2, 0)
    elif case["wrapper"]:
        press = getattr(kvpress, case["wrapper"])(press)
    learned = {name: torch.from_numpy(inputs[name]) for name in ("filter", "mean", "covariance")}
    if case["press"] == "QFilterPress":  # its files hold the opposite sign
        press.q_filters, press.post_init_from_model = -learned["filter"], lambda model: None
    if case["press"] == "ExpectedAttentionStatsPress":
        press.mu, press.cov = learned["mean"], learned["covariance"]
    return press


def kvzap(inputs: dict[str, np.ndarray]) -> Any:
    """A network a layer with our weights: w1 [L, D, F], b1, w2 [L, K, F], b2."""
    layers, width, hidden = inputs["w1"].shape
    sizes = {"input_dim": width, "output_dim": inputs["w2"].shape[1], "n_modules": layers}
    model = KVzapModel(KVzapConfig(**sizes, hidden_dim=hidden)).eval()
    names = {"0.weight": "w1", "0.bias": "b1", "2.weight": "w2", "2.bias": "b2"}
    for index, network in enumerate(model.layers):
        own = {theirs: torch.from_numpy(inputs[ours][index]) for theirs, ours in names.items()}
        network.load_state_dict(own | {"0.weight": own["0.weight"].T})
    return model


def gates(inputs: dict[str, np.ndarray]) -> list[Any]:
    """A gate a layer with our weights; w_q [L, K, G, d, D] and the others of ``fast_kvzip``."""
    made = []
    for index in range(len(inputs["w_q"])):
        own = {name: torch.from_numpy(inputs[name][index]) for name in GATE}
        heads, group, dim, width = own["w_q"].shape
        sinks = own["sinks"].shape[1]
        gate = FastKVzipGate(index, width, heads, group, torch.float32, output_dim=dim, sink=sinks)
        weights = {
            "q_proj.weight": own["w_q"].reshape(-1, width),
            "q_proj.bias": own["b_q"].reshape(-1),
            "k_proj.weight": own["w_k"].reshape(-1, width),
            "q_norm.weight": own["scale_q"],
            "k_norm.weight": own["scale_k"],
            "k_base": own["sinks"][:, None],
            "b": own["b"][:, None],
        }
        gate.load_state_dict(weights)
        made.append(gate.eval())
    return made


GATE = ("w_q", "b_q", "w_k", "scale_q", "scale_k", "sinks", "b")


class Words:
    """A tokenizer without a chat template, whose every instruction is two ids."""

    chat_template = None

    def encode(self, text: str, **_: Any) -> torch.Tensor:
        return torch.tensor([[5, 7] if text.strip() else []], dtype=torch.long)


@contextlib.contextmanager
def drawing(sketches: np.ndarray) -> Iterator[None]:
    """``torch.randn`` gives our sketches [L, K, H, S], one layer after the other, unscaled."""
    left = iter(torch.from_numpy(sketches))

    def randn(*shape: int, **_: Any) -> torch.Tensor:
        drawn = next(left)[None] * shape[-1] ** 0.5
        assert drawn.shape == shape
        return drawn

    with mock.patch.object(torch, "randn", randn):
        yield


def attention_in_chunks(q: torch.Tensor, k: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """What kvpress computes, where no chunk needs padding: attention [B, N, T] received in the chunk."""
    pairs = zip(q.split(chunk_size, dim=2), k.split(chunk_size, dim=2))
    return torch.cat([(a @ b.mT).softmax(dim=-1).sum(dim=-2) for a, b in pairs], dim=-1)


@contextlib.contextmanager
def masks(mended: bool) -> Iterator[None]:
    """Non-causal attention without padding, if ``mended``."""
    if not mended:
        yield
        return
    right = staticmethod(attention_in_chunks)
    with mock.patch.object(kvpress.NonCausalAttnPress, "non_causal_chunked_attn", right):
        yield


def held(keys: torch.Tensor, whole: torch.Tensor) -> np.ndarray:
    """Which tokens [K, T] a cache holds: after RoPE no two keys of a head are equal."""
    kept = np.zeros(whole.shape[:2], bool)
    for head, (some, every) in enumerate(zip(keys.numpy(), whole.numpy())):
        place = {key.tobytes(): position for position, key in enumerate(every)}
        assert len(place) == len(every)
        kept[head, [place[key.tobytes()] for key in some]] = True
    return kept


@torch.inference_mode()
def answers(
    model: Any, ids: torch.Tensor, fed: torch.Tensor, press: Any, sketches: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, list[int]]:
    """What is kept of the prompt and its scores, [L, K, T] each; logits [F, V] of the tokens fed after it.

    None for the logits where the press masks and its cache stays whole. Last, the cache's bytes.
    """
    full, cache, scores = DynamicCache(), DynamicCache(), []
    model.model(input_ids=ids, past_key_values=full)
    if hasattr(press, "compress_post"):  # it scores all layers first
        cuts = press.compress_post

        def cut(model: Any) -> None:
            cuts(model)
            scores.extend(press.score_val.clone())

        press.compress_post = cut
    else:
        ranks = press if hasattr(press, "score") else press.press
        score = ranks.score

        def watched(*args: Any, **named: Any) -> torch.Tensor:
            scores.append(score(*args, **named))
            return scores[-1]

        ranks.score = watched
    with press(model), drawing(sketches):
        model.model(input_ids=ids, past_key_values=cache)
    kept = np.stack([held(some.keys[0], every.keys[0]) for some, every in zip(cache.layers, full.layers)])
    given = torch.cat([x.expand(1, *kept.shape[1:]) for x in scores])
    masks, sizes = masked(model, kept), [size(cache)]
    at = ids.shape[1] + torch.arange(fed.shape[1])[None]
    logits = model(input_ids=fed, past_key_values=cache, position_ids=at).logits[0]
    sizes.append(size(cache))
    return kept, given.float().numpy(), None if masks else logits.float().numpy(), sizes


def size(cache: DynamicCache) -> int:
    """Bytes of its keys and values."""
    return sum(x.numel() * x.element_size() for one in cache.layers for x in (one.keys, one.values))


def masked(model: Any, kept: np.ndarray) -> bool:
    """Takes the tokens that a press masked out of ``kept``, and the masks out of the model; any?"""
    found = False
    for index, layer in enumerate(model.model.layers):
        mask = getattr(layer.self_attn, "masked_key_indices", None)
        if mask is not None:
            kept[index, mask[1].numpy(), mask[2].numpy()] = False
            layer.self_attn.masked_key_indices, found = None, True
    return found


def main(folder: Path) -> None:
    """Every model under every case and ratio."""
    disable_progress_bar()
    logging.getLogger("kvpress").setLevel(logging.ERROR)  # models that it did not test
    request = json.loads((folder / "request.json").read_text())
    inputs, results = np.load(folder / "inputs.npz"), {}
    for name, source in request["models"].items():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        own = {key.partition(":")[2]: inputs[key] for key in inputs.files if key.startswith(f"{name}:")}
        ids, fed = (torch.from_numpy(own[key])[None].long() for key in ("tokens", "fed"))
        for case in request["cases"]:
            for ratio in request["ratios"]:
                key = f"{name}_{case['name']}_{ratio}"
                try:
                    press = press_of(case, ratio, own, model.config.num_hidden_layers)
                    words = mock.patch.object(
                        kvzip_press.AutoTokenizer, "from_pretrained", return_value=Words()
                    )
                    with masks(case["mended"]), words:
                        kept, scores, logits, sizes = answers(model, ids, fed, press, own["sketch"])
                except Exception as error:  # whatever kvpress does not support becomes a row
                    results[f"error_{key}"] = np.asarray(f"{type(error).__name__}: {error}")
                else:
                    results[f"kept_{key}"], results[f"score_{key}"] = np.packbits(kept), scores
                    results[f"bytes_{key}"] = np.asarray(sizes)
                    if logits is not None:
                        results[f"logits_{key}"] = logits
    np.savez(folder / "answers.npz", **results)  # type: ignore[arg-type]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
