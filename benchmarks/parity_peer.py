"""kvpress's side of ``benchmarks parity``, run by the peers' interpreter: ``parity_peer.py FOLDER``.

Reads FOLDER/request.json and FOLDER/inputs.npz, writes FOLDER/answers.npz; imports nothing of ours.

For model m, case c and ratio r: ``kept_m_c_r`` [L, K, T] says which tokens the cache holds, ``score_m_c_r``
[L, K, T] what the press gave them, ``logits_m_c_r`` [F, V] what follows, or ``error_m_c_r`` what it raised.
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
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar


def press_of(case: dict[str, Any], ratio: float, inputs: dict[str, np.ndarray], layers: int) -> Any:
    """The press, with our filters or statistics where it would fetch its own."""
    arguments = dict(case["arguments"])
    for name in case["of_ratio"]:
        arguments[name] = ratio
    press = getattr(kvpress, case["press"])(compression_ratio=ratio, **arguments)
    learned = {name: torch.from_numpy(inputs[name]) for name in ("filter", "mean", "covariance")}
    if case["press"] == "QFilterPress":  # its files hold the opposite sign
        press.q_filters, press.post_init_from_model = -learned["filter"], lambda model: None
    if case["press"] == "ExpectedAttentionStatsPress":
        press.mu, press.cov = learned["mean"], learned["covariance"]
    return press


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
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is kept of the prompt and its scores, [L, K, T] each; logits [F, V] of the tokens fed after it."""
    full, cache, scores = DynamicCache(), DynamicCache(), []
    model.model(input_ids=ids, past_key_values=full)
    score = press.score

    def watched(*args: Any, **named: Any) -> torch.Tensor:
        scores.append(score(*args, **named))
        return scores[-1]

    press.score = watched
    with press(model), drawing(sketches):
        model.model(input_ids=ids, past_key_values=cache)
    kept = [held(some.keys[0], every.keys[0]) for some, every in zip(cache.layers, full.layers)]
    shape = np.stack(kept).shape
    given = torch.cat([x.expand(1, shape[1], shape[2]) for x in scores])
    at = ids.shape[1] + torch.arange(fed.shape[1])[None]
    logits = model(input_ids=fed, past_key_values=cache, position_ids=at).logits[0]
    return np.stack(kept), given.float().numpy(), logits.float().numpy()


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
                    with masks(case["mended"]):
                        kept, scores, logits = answers(model, ids, fed, press, own["sketch"])
                except Exception as error:  # whatever kvpress does not support becomes a row
                    results[f"error_{key}"] = np.asarray(f"{type(error).__name__}: {error}")
                else:
                    results[f"kept_{key}"], results[f"score_{key}"] = np.packbits(kept), scores
                    results[f"logits_{key}"] = logits
    np.savez(folder / "answers.npz", **results)  # type: ignore[arg-type]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
