"""Makes tests/golden/gguf.npz and tests/golden/sentencepiece.json, in an environment of its own:

    python -m venv gold
    gold/bin/pip install torch==2.13.0 transformers==5.2.0 gguf==0.19.0 sentencepiece==0.2.3
    gold/bin/python tests/make_gguf_golden.py

gguf.npz holds the logits that transformers computes in float32 from the tiny files of ``gguf_files.tiny``,
which tests write again: of each architecture NAME/tokens [2, 24], NAME/positions [2, 24] (row 1 jumps far
ahead half-way) and NAME/logits [2, 24, V]. transformers reads the weights; what its reading of metadata
leaves out (head sizes of Qwen3, windows, softcaps, rope factors) is in the config that is written out here.

sentencepiece.json holds two tiny vocabularies that the sentencepiece package trained on this repository's
LICENSE, with the pieces that it makes of some lines: "prefix" with a space before every text, "plain" without
one and with blanks and line breaks as tokens of their own, as Gemma has them.
"""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import gguf_files as files
import numpy as np
import sentencepiece
import torch
import transformers
from transformers import AutoModelForCausalLM

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

GOLDEN = Path(__file__).parent / "golden"
LICENSE = Path(__file__).parents[1] / "LICENSE"

LINES = (
    "The quick brown fox jumps over 12 lazy dogs.",
    " leading and trailing ",
    "two  blanks,   three,\n\nand\nlines",
    "Ünïcödé, 日本語 and 🙂 go by bytes",
    "aaaaaaaaaaa banana ananas",
    "License distribution redistributions licensor's",
    "\ttabs\tand a  \n mixture ",
)


def config(arch: str) -> Any:
    """The config of a tiny file, in transformers' words."""
    layers = files.LAYERS.get(arch, 2)
    one = {
        "vocab_size": files.VOCAB,
        "hidden_size": files.HIDDEN,
        "intermediate_size": files.MLP,
        "num_hidden_layers": layers,
        "num_attention_heads": files.HEADS,
        "num_key_value_heads": files.KV_HEADS,
        "head_dim": files.head_dim(arch),
        "max_position_embeddings": files.LONGEST,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": arch not in ("llama", "phi3"),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "attn_implementation": "eager",
    }
    if arch == "llama":
        band = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope = {"rope_type": "llama3", **band, "original_max_position_embeddings": 8192}
        return transformers.LlamaConfig(**one | {"rope_parameters": {**rope, "rope_theta": 10_000.0}})
    if arch == "qwen2":
        return transformers.Qwen2Config(**one)
    if arch == "qwen3":
        return transformers.Qwen3Config(**one)
    if arch == "phi3":
        factors = {
            "short_factor": list(files.SHORT),
            "long_factor": list(files.LONG),
            "attention_factor": 1.25,
        }
        rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0, **factors}
        rope["original_max_position_embeddings"] = files.ORIGINAL
        more = {"sliding_window": files.WINDOW, "original_max_position_embeddings": files.ORIGINAL}
        return transformers.Phi3Config(**one | more | {"rope_parameters": rope})
    gemma = {"query_pre_attn_scalar": files.head_dim(arch), "sliding_window": files.WINDOW}
    if arch == "gemma2":
        return transformers.Gemma2Config(**one | gemma)
    ropes = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
    both = {name: {"rope_type": "default", "rope_theta": theta} for name, theta in ropes.items()}
    return transformers.Gemma3TextConfig(**one | gemma | {"rope_parameters": both})


def logits(arch: str) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        files.tiny(Path(folder) / "tiny.gguf", arch)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file="tiny.gguf", config=config(arch), dtype=torch.float32
        ).eval()
    rng = np.random.default_rng(files.hash_of(arch))
    tokens = rng.integers(0, files.VOCAB, (2, 24))
    positions = np.stack([np.arange(24), np.concatenate([np.arange(12), 1000 + np.arange(12)])])
    with torch.no_grad():  # row by row: which factors a LongRoPE takes depends on the longest position
        rows = [
            model(torch.from_numpy(tokens[[i]]), position_ids=torch.from_numpy(positions[[i]])).logits
            for i in range(2)
        ]
    found = torch.cat(rows).float().numpy()
    return {f"{arch}/tokens": tokens, f"{arch}/positions": positions, f"{arch}/logits": found}


def sentences(**more: Any) -> dict[str, Any]:
    file = io.BytesIO()
    text = LICENSE.read_text().splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=file,
        model_type="bpe",
        vocab_size=480,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **more,
    )
    one = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    ids = range(one.vocab_size())

    def kind(i: int) -> int:
        if one.is_byte(i):
            return 6
        if i in user:
            return 4
        return 2 if one.is_unknown(i) else 3 if one.is_control(i) else 1

    user = {one.piece_to_id(piece) for piece in more.get("user_defined_symbols", ())}
    # As llama.cpp's converter writes user-defined pieces: with blanks.
    tokens = [one.id_to_piece(i).replace("▁", " ") if i in user else one.id_to_piece(i) for i in ids]
    return {
        "tokens": tokens,
        "scores": [one.get_score(i) for i in ids],
        "token_type": [kind(i) for i in ids],
        "lines": list(LINES),
        "ids": [one.encode(line) for line in LINES],
    }


def main() -> None:
    found: dict[str, np.ndarray] = {}
    for arch in files.ARCHITECTURES:
        found |= logits(arch)
    np.savez_compressed(GOLDEN / "gguf.npz", **found)
    blanks = ["▁▁", "▁▁▁", "\n", "\n\n", "\t"]
    both = {"prefix": sentences(), "plain": sentences(add_dummy_prefix=False, user_defined_symbols=blanks)}
    (GOLDEN / "sentencepiece.json").write_text(json.dumps(both, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
