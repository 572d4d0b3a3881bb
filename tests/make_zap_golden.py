"""Makes tests/golden/zap, KVzap and Fast KVzip as kvpress 0.5.5 runs them, with the peers' interpreter.

The weights are random, in the files that the authors' code writes (transformers 5.2.0, torch 2.13.0). The
model is tests/golden/llama3.

  kvzap-linear.safetensors, kvzap-mlp.safetensors   KVzapModel.save_pretrained
  fast-kvzip.pt                                     as FastKVzip's optim.py saves it
  answers.npz   tokens [T + F]; for each kind of KVzap: scores_KIND [L, K, T + F], kept_KIND_RATIO
                [L, K, T] of KVzapPress, dropped_KIND [L, K, T + F] of DMSPress while F tokens are decoded;
                fast_scores [L, K, T], 1 where protected;
                fast_RATIO [L, K, T], kept by FastKVzipPress(layerwise=True)
"""

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from kvpress import DMSPress, FastKVzipPress, KVzapPress
from kvpress.presses.fastkvzip_press import FastKVzipGate
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
from transformers import AutoModelForCausalLM, DynamicCache

GOLDEN = Path(__file__).parent / "golden"
OUT = GOLDEN / "zap"
T, FED, WINDOW, THRESHOLD = 160, 12, 16, -5.0
RATIOS = (0.25, 0.5, 0.75)


def kvzap(model, hidden, name):
    """Random weights whose scores spread, as a file and as a press."""
    c = model.config
    torch.manual_seed(3)
    net = KVzapModel(
        KVzapConfig(
            input_dim=c.hidden_size,
            output_dim=c.num_key_value_heads,
            n_modules=c.num_hidden_layers,
            hidden_dim=hidden,
        )
    )
    with torch.no_grad():
        for layer in net.layers:
            last = layer if hidden is None else layer[2]
            last.weight.mul_(3.0)
            last.bias.fill_(THRESHOLD)
    with tempfile.TemporaryDirectory() as folder:
        net.save_pretrained(folder)
        shutil.copyfile(Path(folder) / "model.safetensors", OUT / f"kvzap-{name}.safetensors")

    def press(ratio=0.0):
        made = KVzapPress(compression_ratio=ratio, model_type=name)
        made.post_init_from_model, made.kvzap_model = lambda model: None, net
        return made

    return press


def gates(model):
    c = model.config
    torch.manual_seed(4)
    group = c.num_attention_heads // c.num_key_value_heads
    made = [
        FastKVzipGate(i, c.hidden_size, c.num_key_value_heads, group, torch.float32, output_dim=8, sink=4)
        for i in range(c.num_hidden_layers)
    ]
    with torch.no_grad():
        for gate in made:
            gate.k_base.normal_()
            gate.b.normal_()
            gate.q_norm.weight.uniform_(0.5, 2.5)
            gate.k_norm.weight.uniform_(0.5, 2.5)
    saved = {"module": [gate.state_dict() for gate in made]}
    saved |= {name: np.ones((2, 2)) for name in ("loss", "acc", "loss_train", "acc_train")}
    torch.save(saved, OUT / "fast-kvzip.pt")
    return made


@torch.inference_mode()
def main():
    OUT.mkdir(exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "llama3", dtype=torch.float32).eval()
    c = model.config
    shape = c.num_hidden_layers, c.num_key_value_heads
    ids = torch.from_numpy(np.random.default_rng(8).integers(4, 96, T + FED))[None]
    answers = {"tokens": ids[0].numpy()}
    full = DynamicCache()
    model.model(input_ids=ids[:, :T], past_key_values=full)
    for hidden, name in ((None, "linear"), (12, "mlp")):
        press = kvzap(model, hidden, name)
        for ratio in RATIOS:
            cache, some = DynamicCache(), press(ratio)
            with some(model):
                model.model(input_ids=ids[:, :T], past_key_values=cache)
            kept = np.zeros((*shape, T), bool)
            for i, j in np.ndindex(shape):
                every = {key.tobytes(): at for at, key in enumerate(full.layers[i].keys[0, j].numpy())}
                kept[i, j, [every[key.tobytes()] for key in cache.layers[i].keys[0, j].numpy()]] = True
            answers[f"kept_{name}_{ratio}"] = kept
        cache, scores = DynamicCache(), [[] for _ in range(shape[0])]
        inner = press()
        score = inner.score

        def watched(module, *rest, score=score, scores=scores):
            scores[module.layer_idx].append(score(module, *rest))
            return scores[module.layer_idx][-1]

        inner.score = watched
        dms = DMSPress(inner, threshold=THRESHOLD, sliding_window_size=WINDOW, decoding=True)
        dropped = np.zeros((*shape, T + FED), bool)
        with dms(model):
            model.model(input_ids=ids[:, :T], past_key_values=cache)
            for at in range(T, T + FED):
                position = torch.tensor([at])
                model.model(
                    input_ids=ids[:, at : at + 1],
                    past_key_values=cache,
                    position_ids=position[None],
                    cache_position=position,
                )
            for i, layer in enumerate(model.model.layers):
                _, heads, places = (x.numpy() for x in layer.self_attn.masked_key_indices)
                dropped[i, heads, places] = True
                layer.self_attn.masked_key_indices = None
        answers[f"dropped_{name}"] = dropped
        answers[f"scores_{name}"] = np.stack([torch.cat(x, -1)[0].numpy() for x in scores])
    fast = gates(model)
    for ratio in RATIOS:
        press = FastKVzipPress(compression_ratio=ratio, layerwise=True)
        press.gates = fast
        kept = np.ones((*shape, T), bool)
        with press(model):
            model.model(input_ids=ids[:, :T], past_key_values=DynamicCache())
        answers["fast_scores"] = press.score_val[:, 0].numpy()
        for i, layer in enumerate(model.model.layers):
            _, heads, places = (x.numpy() for x in layer.self_attn.masked_key_indices)
            kept[i, heads, places] = False
            layer.self_attn.masked_key_indices = None
        answers[f"fast_{ratio}"] = kept
    np.savez_compressed(OUT / "answers.npz", **answers)


if __name__ == "__main__":
    sys.exit(main())
