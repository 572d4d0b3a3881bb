"""Makes a folder in Hugging Face's format of a Llama in GGUF, with the ``gguf`` package and without torch.

Independent of what kvjax reads GGUF with: a golden of transformers needs such a folder, too::

    python tests/real/real_folder.py FILE.gguf FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
CONTROL = 3


def write_folder(file: Path, folder: Path) -> None:
    """Weights in bfloat16, config, tokenizer and chat template."""
    reader = gguf.GGUFReader(file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            # GGUF interleaves the two halves of each head, whose RoPE then turns neighbours.
            halves = weight.reshape(heads[part], -1, 2, weight.shape[-1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        tensors[hub_name(tensor.name)] = weight.astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(facts).save(str(folder / "tokenizer.json"))
    ends = {
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
    }
    tokens = facts["tokenizer.ggml.tokens"]
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ends["bos_token_id"]],
        "eos_token": tokens[ends["eos_token_id"]],
        "add_bos_token": facts["tokenizer.ggml.add_bos_token"],
        "chat_template": facts["tokenizer.chat_template"],
    }
    for name, tree in (
        ("config.json", config(facts) | ends),
        ("generation_config.json", ends),
        ("tokenizer_config.json", names),
    ):
        (folder / name).write_text(json.dumps(tree), encoding="utf-8")


def hub_name(name: str) -> str:
    """The tensor's name in Hugging Face's format."""
    if name in (plain := {"token_embd.weight": "model.embed_tokens", "output_norm.weight": "model.norm"}):
        return f"{plain[name]}.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.weight"


def config(facts: dict[str, Any]) -> dict[str, Any]:
    """What config.json says, but for the token ids."""
    sizes = {
        "vocab_size": "llama.vocab_size",
        "num_hidden_layers": "llama.block_count",
        "hidden_size": "llama.embedding_length",
        "intermediate_size": "llama.feed_forward_length",
        "num_attention_heads": "llama.attention.head_count",
        "num_key_value_heads": "llama.attention.head_count_kv",
        "head_dim": "llama.rope.dimension_count",
        "max_position_embeddings": "llama.context_length",
        "rope_theta": "llama.rope.freq_base",
    }
    return {ours: facts[theirs] for ours, theirs in sizes.items()} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,  # stored as float32
        "tie_word_embeddings": True,
    }


def tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE whose digits stand alone: what the file's ``smollm`` stands for."""
    assert facts["tokenizer.ggml.pre"] == "smollm"
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds) if kind == CONTROL]
    bpe.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return bpe


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    write_folder(Path(sys.argv[1]), Path(sys.argv[2]))
