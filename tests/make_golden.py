"""Makes the golden models of tests/golden with PyTorch and transformers, and the shipped models' outputs.

The library and its tests never need torch; this script does, in an environment of its own:

    python -m venv gold && gold/bin/pip install torch==2.13.0 transformers==5.23.0
    gold/bin/python tests/make_golden.py                 # rewrites tests/golden
    gold/bin/python tests/make_golden.py gemma2 gpt2     # these alone
    gold/bin/python tests/make_golden.py embedded  # after every change of kvjax/assets

Made with Python 3.11.7, torch 2.13.0+cpu, transformers 5.23.0 (qwen2_yarn, smollm3, granite, gpt2_odd, olmo2,
the mixtures of experts and gpt_oss: 5.2.0), safetensors 0.8.0. Each NAME/ is a tiny random model as
``save_pretrained`` writes it (gpt_oss_mxfp4's experts are packed afterwards), each NAME.npz holds:

  tokens [2, 48]     positions [2, 48]: row 0 counts up, row 1 jumps far ahead half-way
  logits [2, 48, V]  float32, from the stored weights computed in float32
  logits_bf16        the same computed in bfloat16
  prompt [8]         greedy [32]: what transformers' own ``generate`` appends
  batch [2, 11]      right-padded prompts of 11 and 5 tokens; transformers was given them left-padded
  batch_logits       [2, 11, V], zeros at padding     batch_greedy [2, 32]
  long_prompt [70]   long_greedy [32]: where the rope has factors for texts of more than 64 tokens

embedded.npz holds what transformers makes of kvjax/assets/embedded as it lies there and of this
repository's LICENSE:

  weights            SHA-256 of model.safetensors, so that a golden of other weights is noticed
  tokens [2048]      BOS and the first tokens of the text, by the folder's own tokenizer
  positions [12]     logits [12, V]: float32, spread over the text
  surprise [2047]    -log p(next token) in nats at every position, so that every logit counts
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils import logging

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "kvjax" / "assets"
SHIPPED = ("embedded",)
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
# With 8 frequencies from 1 down, 32 / 4 and 32 / 1 leave one wavelength short, one between and six long.
STRETCH = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# With 4 frequencies from 1 down by tens, a fast pair is kept, slow ones are stretched, those between blended.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 16.0,
    "truncate": False,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
LENGTHS = (11, 5)


def longrope(pairs: int) -> dict:
    """LongRoPE whose two sets of factors differ visibly, for an original length of 64."""
    short, long = [1.0 + 0.1 * i for i in range(pairs)], [1.5 + 1.5 * i for i in range(pairs)]
    return {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long}


def configs() -> dict[str, PreTrainedConfig]:
    """The golden models by name."""
    return {**llama_and_qwen2(), **later_families()}


def later_families() -> dict[str, PreTrainedConfig]:
    """Every window is shorter than the prompts, every option that a family has is in use."""
    sizes = {**SIZES, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    gemma = {**sizes, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}
    original = {"original_max_position_embeddings": 64}
    gpt_oss = {
        **{**sizes, "intermediate_size": 32},
        **{"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    }
    local, far = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "linear", "factor": 8.0}
    both = {"sliding_attention": local, "full_attention": {**far, "rope_theta": 1e6}}
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return {
        "qwen3": Qwen3Config(**sizes, head_dim=16, rope_parameters=PLAIN),
        "mistral": MistralConfig(**sizes, head_dim=16, sliding_window=6, rope_parameters=PLAIN),
        "phi3": Phi3Config(**sizes, sliding_window=6),
        "phi3_long": Phi3Config(**sizes, **original, rope_parameters=longrope(4)),
        "phi4_mini": Phi3Config(
            **sizes,
            **original,
            tie_word_embeddings=True,
            rope_parameters={**longrope(3), "partial_rotary_factor": 0.75},
        ),
        "gemma2": Gemma2Config(**gemma, attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
        "gemma3": Gemma3TextConfig(
            **{**gemma, "num_hidden_layers": 4}, layer_types=types, rope_parameters=both
        ),
        "qwen2_yarn": Qwen2Config(**sizes, tie_word_embeddings=True, rope_parameters=YARN),
        "smollm3": SmolLM3Config(**{**sizes, "num_hidden_layers": 4}, rope_parameters=PLAIN),
        "granite": GraniteConfig(
            **sizes,
            attention_multiplier=0.2,
            embedding_multiplier=3.0,
            residual_multiplier=0.4,
            logits_scaling=0.25,
        ),
        "olmo2_bf16_sharded": Olmo2Config(**sizes, rope_parameters=PLAIN),
        "qwen3_moe": Qwen3MoeConfig(
            **{**sizes, "num_hidden_layers": 3},
            head_dim=16,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            mlp_only_layers=[1],
            rope_parameters=PLAIN,
        ),
        "qwen3_moe_bf16_sharded": Qwen3MoeConfig(
            **sizes,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            norm_topk_prob=True,
            rope_parameters=PLAIN,
        ),
        "mixtral": MixtralConfig(
            **{**sizes, "intermediate_size": 24}, num_local_experts=4, num_experts_per_tok=2, sliding_window=6
        ),
        "gpt_oss": GptOssConfig(**gpt_oss, rope_parameters={**YARN, "rope_theta": 1.5e4}),
        "gpt_oss_mxfp4": GptOssConfig(**gpt_oss, rope_parameters={**YARN, "rope_theta": 1.5e4}),
        "gpt2": GPT2Config(
            vocab_size=96,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_inner=40,
            n_positions=512,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "gpt2_odd": GPT2Config(
            vocab_size=96,
            n_embd=28,
            n_layer=2,
            n_head=4,
            n_inner=40,
            n_positions=512,
            bos_token_id=1,
            eos_token_id=2,
        ),
    }


def llama_and_qwen2() -> dict[str, PreTrainedConfig]:
    """The families that came first."""
    llama = {**SIZES, "bos_token_id": 1, "eos_token_id": 2}
    qwen = {**SIZES, "bos_token_id": 1, "eos_token_id": [2, 3], "rope_parameters": PLAIN}
    return {
        "llama3": LlamaConfig(
            **llama, head_dim=16, rms_norm_eps=1e-5, tie_word_embeddings=False, rope_parameters=STRETCH
        ),
        "llama_tied": LlamaConfig(**llama, tie_word_embeddings=True),
        "qwen2": Qwen2Config(**qwen, tie_word_embeddings=True),
        "qwen2_window": Qwen2Config(
            **qwen, tie_word_embeddings=False, use_sliding_window=True, sliding_window=6, max_window_layers=1
        ),
        "llama_bf16_sharded": LlamaConfig(**llama, tie_word_embeddings=False),
    }


def rng_of(name: str) -> np.random.Generator:
    """Another stream of numbers for every golden."""
    return np.random.default_rng([7, *name.encode()])


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that attention is peaked and every tensor shows in the logits."""
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        fresh = torch.randn(weight.shape)
        if "norm" in name and model.config.model_type.startswith("gemma"):
            fresh = 0.3 * fresh + 4 * (name == "model.norm.weight")  # what is stored is the scale minus one
        elif ("norm" in name or "ln_" in name) and name.endswith("weight"):
            fresh = (1 + 0.3 * fresh) * (3 if "ln_f" in name else 1)
        elif name.endswith(("bias", "sinks")):
            fresh = (1.5 if name.endswith("sinks") else 0.5) * fresh
        elif "embed" in name and model.config.model_type.startswith("gemma"):
            fresh = (
                0.2 * fresh * weight.shape[-1] ** -0.5
            )  # it is scaled up, and tied: else it repeats itself
        elif "embed" in name and model.config.model_type == "olmo2":
            pass  # nothing normalises it before it meets what attention gives
        elif name.endswith(("wte.weight", "wpe.weight")):
            fresh = (0.3 if "wte" in name else 1.0) * fresh * weight.shape[-1] ** -0.5
        elif "c_" in name:  # [in, out]
            fresh = fresh * (1.6 if "c_attn" in name else 1.0) * weight.shape[0] ** -0.5
        elif model.config.model_type == "gpt_oss" and name.endswith("experts.gate_up_proj"):  # [E, in, out]
            fresh = 4 * fresh * weight.shape[1] ** -0.5  # large enough to be clipped
        elif model.config.model_type == "gpt_oss" and name.endswith("experts.down_proj"):
            fresh = 0.1 * fresh * weight.shape[1] ** -0.5
        elif "mlp.gate.weight" in name or "router.weight" in name:
            fresh = 2 * fresh * weight.shape[-1] ** -0.5
        elif "qkv_proj" in name or "q_proj" in name or "k_proj" in name:
            fresh = fresh * 1.6 * weight.shape[-1] ** -0.5
        else:
            fresh = fresh * weight.shape[-1] ** -0.5
        weight.data.copy_(fresh)


def pack(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Experts drawn as MXFP4, blocks and scales by name; the model gets what transformers makes of them."""
    rng, stored = np.random.default_rng(seed), {}
    for name, weight in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = weight.shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        exponent = 124 if "gate_up" in name else 120
        scales = rng.integers(exponent, exponent + 3, blocks.shape[:3], dtype=np.uint8)
        stored |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
        made = convert_moe_packed_tensors(
            stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32
        )
        weight.data.copy_(made)
    return stored


def save_packed(folder: Path, stored: dict[str, torch.Tensor]) -> None:
    """The experts of a saved folder as MXFP4, in two files."""
    plain = load_file(folder / "model.safetensors")
    kept = {name: x for name, x in plain.items() if f"{name}_blocks" not in stored}
    (folder / "model.safetensors").unlink()
    files = {"model-00001-of-00002.safetensors": kept, "model-00002-of-00002.safetensors": stored}
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def logits(model: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    # The mask is given, else transformers reads a jump of the positions as a packed second text.
    return model(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens)).logits


def opened(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """A folder as transformers computes it plainly."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The 32 tokens generate appends, and the smallest lead of a chosen token over the next best."""
    model.generation_config.eos_token_id = None
    out = model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt)[None], do_sample=False, max_new_tokens=32
    )
    best = model(out).logits[0, len(prompt) - 1 : -1].topk(2, dim=-1).values
    return out[0, len(prompt) :], float((best[:, 0] - best[:, 1]).min())


@torch.no_grad()
def batch(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[dict[str, np.ndarray], float]:
    """Two prompts of different lengths, left-padded as transformers wants them; and the smallest lead."""
    width, lengths = max(LENGTHS), torch.tensor(LENGTHS)
    mask = (torch.arange(width) >= width - lengths[:, None]).long()
    left = torch.zeros(2, width, dtype=torch.long)
    right, aligned = left.clone(), np.zeros((2, width, SIZES["vocab_size"]), np.float32)
    for row, n in enumerate(LENGTHS):
        left[row, width - n :] = right[row, :n] = tokens[row, :n]
    out = model(left, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    for row, n in enumerate(LENGTHS):
        aligned[row, :n] = out[row, width - n :].numpy()
    made = model.generate(
        left,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=32,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(made.logits).topk(2, dim=-1).values
    arrays = {"batch": right.numpy().astype(np.int32), "batch_logits": aligned}
    arrays["batch_greedy"] = made.sequences[:, width:].numpy().astype(np.int32)
    return arrays, float((best[..., 0] - best[..., 1]).min())


def make(name: str, config: PreTrainedConfig) -> None:
    """Writes one model and its outputs; takes the first seed whose greedy tokens are not close calls."""
    rng = np.random.default_rng(len(name))
    tokens = torch.from_numpy(rng.integers(4, SIZES["vocab_size"], (2, 48)))
    count = torch.arange(48)
    positions = torch.stack([count, torch.where(count < 24, count, count + 400)])
    prompt = torch.cat([torch.tensor([1]), tokens[0, :7]])
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    for seed in range(100):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        randomise(model, seed)
        model.config.dtype = dtype
        stored = pack(model, seed) if "mxfp4" in name else {}
        shards = {"max_shard_size": "24KB"} if "sharded" in name else {}
        model.to(dtype).save_pretrained(GOLDEN / name, **shards)
        # Read anew: .to(bfloat16) has rounded the rope's frequencies too, which opening the file does not.
        model = opened(GOLDEN / name, torch.float32)
        answer, lead = greedy(model, prompt)
        rows, row_lead = batch(model, tokens)
        if isinstance(config, Phi3Config) and config.rope_parameters["rope_type"] == "longrope":
            rows["long_prompt"] = rng_of(name).integers(4, SIZES["vocab_size"], 70).astype(np.int32)
            long_answer, long_lead = greedy(model, torch.from_numpy(rows["long_prompt"]).long())
            rows["long_greedy"] = long_answer.numpy().astype(np.int32)
            row_lead = min(row_lead, long_lead)
        apart = (0.004, 0.004, 7) if name.startswith(("gemma", "gpt2")) else (0.01, 0.02, 8)
        if min(lead, row_lead) > apart[0] and lead > apart[1] and len(set(answer.tolist())) > apart[2]:
            break
    else:
        sys.exit(f"{name}: every seed makes a close call or a dull text. Change its weights in randomise().")
    out = logits(model, tokens, positions)
    rows["logits_bf16"] = logits(opened(GOLDEN / name, torch.bfloat16), tokens, positions).float().numpy()
    if stored:
        save_packed(GOLDEN / name, stored)
    np.savez_compressed(
        GOLDEN / f"{name}.npz",
        tokens=tokens.numpy().astype(np.int32),
        positions=positions.numpy().astype(np.int32),
        logits=out.numpy(),
        prompt=prompt.numpy().astype(np.int32),
        greedy=answer.numpy().astype(np.int32),
        **rows,
    )
    print(f"{name}: seed {seed}, smallest lead {min(lead, row_lead):.3f}, logits std {out.std():.2f}")


@torch.no_grad()
def shipped(name: str) -> None:
    """Writes NAME.npz: the folder opened as it is, real text of the longest trained length."""
    folder = ASSETS / name
    model = opened(folder, torch.float32)
    # AutoTokenizer of transformers 5 takes Qwen2's own class for every qwen2 folder, and its splitting rules.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = tokenizer((ROOT / "LICENSE").read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    tokens = torch.tensor([model.config.bos_token_id, *text])[:2048]
    out = model(tokens[None]).logits[0]
    positions = np.unique(np.geomspace(1, 2048, 12).astype(int)) - 1
    surprise = torch.nn.functional.cross_entropy(out[:-1], tokens[1:], reduction="none")
    np.savez_compressed(
        GOLDEN / f"{name}.npz",
        weights=hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        tokens=tokens.numpy().astype(np.int32),
        positions=positions.astype(np.int32),
        logits=out[positions].numpy(),
        surprise=surprise.numpy(),
    )
    print(f"{name}: {len(tokens)} tokens, {surprise.mean():.3f} nats a token, logits std {out.std():.2f}")


if __name__ == "__main__":
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    everything = {**configs(), **dict.fromkeys(SHIPPED)}
    parser.add_argument("names", nargs="*", metavar="NAME", help="goldens to make; all by default")
    for golden_name in parser.parse_args().names or everything:
        golden_config = everything[golden_name]
        shipped(golden_name) if golden_config is None else make(golden_name, golden_config)
