"""Trains the embedded model: tokenizer, constructed start, curriculum, evaluation, export.

python -m train.pretrain --config configs/pretrain/small.yaml               train, or go on
python -m train.pretrain --config configs/pretrain/small.yaml --evaluate    table of recall, bits per byte
  ... --evaluate --model kvjax/assets/small                                 the same of an exported folder
python -m train.pretrain --config configs/pretrain/small.yaml --export DIR  HF folder in bfloat16
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import yaml
from flax import nnx

from kvjax.models import module
from kvjax.models.spec import ModelSpec, Rope
from kvjax.types import Params
from train import data, loop, recall, rows, start, text

if TYPE_CHECKING:
    from jaxtyping import Array, Float
    from tokenizers import Tokenizer

FINAL_COUNT = 200
"""Needles a cell behind a claim."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A config with its data read.

    Attributes:
      config: the YAML tree.
      spec: the model.
      tokenizer: BPE, trained on the training text.
      train: training text and key words.
      held: the held-out haystack and key words.
      books: held-out books for bits per byte.
    """

    config: dict[str, Any]
    spec: ModelSpec
    tokenizer: Tokenizer
    train: rows.Source
    held: rows.Source
    books: rows.Source


def setup(config: dict[str, Any]) -> Setup:
    """Reads the texts, the tokenizer (trained at the first call) and the token arrays (cached)."""
    corpus = text.corpus(text.data_folder(), seed=config["seed"])
    size = config["model"]["vocab_size"]
    tokenizer = text.load_tokenizer(Path(config["tokenizer"]), corpus.train, size)
    cache = Path(config["folder"]).parent / "cache"
    # Raw text and the same text without line breaks: haystacks come in both forms.
    both = corpus.train + tuple(text.unwrap(book) for book in corpus.train)
    tokens = text.token_array(tokenizer, both, cache)
    essays = text.token_array(tokenizer, (text.unwrap(corpus.essays),), cache)
    books = text.token_array(tokenizer, corpus.held, cache)
    return Setup(
        config=config,
        spec=model_spec(config["model"]),
        tokenizer=tokenizer,
        train=rows.make_source(tokenizer, tokens, corpus.words, held_out=False),
        held=rows.make_source(tokenizer, essays, corpus.words, held_out=True),
        books=rows.make_source(tokenizer, books, corpus.words, held_out=True),
    )


def model_spec(sizes: dict[str, Any]) -> ModelSpec:
    """The config's model as a Qwen2 spec with tied embeddings."""
    names = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "model_dim", "mlp_dim")
    return ModelSpec(
        family="qwen2",
        max_positions=sizes["max_positions"],
        rope=Rope(theta=float(sizes["theta"])),
        qkv_bias=True,
        tied=True,
        bos=text.BOS,
        eos=(text.EOS,),
        **{name: sizes[name] for name in names},
    )


def initial(spec: ModelSpec, seed: int) -> Params:
    """Fresh weights with the constructed start."""
    return start.construct(spec, module.leaves(module.Decoder(spec, rngs=nnx.Rngs(params=seed))), seed)


def schedule(settings: dict[str, Any], steps: int) -> optax.Schedule:
    """Warm-up, a plateau, a linear fall over the last ``decay`` steps.

    The plateau has no memory of the run's length: ``plan.steps`` may be changed between two runs of
    the same folder while the fall has not begun.
    """
    peak, final = float(settings["peak"]), float(settings["final"])
    warmup, decay = settings["warmup"], settings["decay"]
    return optax.join_schedules(
        [
            optax.linear_schedule(0.1 * peak, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, final, decay),
        ],
        [warmup, max(warmup, steps - decay)],
    )


def make_optimizer(settings: dict[str, Any], steps: int) -> optax.GradientTransformation:
    """AdamW under a global clip; norms and biases do not decay."""
    matrices = lambda params: jax.tree_util.tree_map_with_path(  # noqa: E731
        lambda path, leaf: str(getattr(path[-1], "key", "")).startswith(("w", "embed")), params
    )
    return optax.chain(
        optax.clip_by_global_norm(settings["clip"]),
        optax.adamw(
            schedule(settings, steps),
            b2=settings["b2"],
            weight_decay=settings["weight_decay"],
            mask=matrices,
        ),
    )


def make_loss(spec: ModelSpec, dtype: str) -> loop.Loss:
    """Weighted cross entropy on the scored tokens; the forward pass runs in ``dtype``."""

    def loss(params: Params, batch: dict[str, Array]) -> tuple[Float[Array, ""], dict[str, Array]]:
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        logits = recall.scored_logits(spec, cast, batch["tokens"], batch["at"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"])
        weight, answer = batch["weight"], batch["answer"]
        right = (logits.argmax(-1) == batch["target"]) & answer
        text_weight = jnp.where(answer, 0.0, weight)
        return (nll * weight).sum() / weight.sum(), {
            "answers": right.sum() / jnp.maximum(answer.sum(), 1),
            "text_nll": (nll * text_weight).sum() / jnp.maximum(text_weight.sum(), 1e-6),
        }

    return loss


def make_check(have: Setup) -> Any:
    """Recall on held-out words and text: opens levels, ends the run at the target."""
    settings, gates = have.config["check"], have.config["check"]["gates"]

    def check(params: Params, step: int, level: int) -> loop.Verdict:
        rounded = round_to(params, have.config["model"]["dtype"])
        measure = lambda length, keys: float(  # noqa: E731
            recall.needle_recall(
                have.spec, rounded, have.held, length=length, keys=keys, count=settings["count"], seed=1
            ).mean()
        )
        one = {length: measure(length, 1) for length in settings["lengths"]}
        metrics = {f"recall_{length}": value for length, value in one.items()}
        many_length = settings["lengths"][min(1, len(settings["lengths"]) - 1)]
        metrics[f"recall_{many_length}_of_4"] = many = measure(many_length, 4)
        metrics["bits_per_byte"] = recall.bits_per_byte(have.spec, rounded, have.books, windows=16)
        gate = gates[level] if level < len(gates) else None
        rise = (
            gate is not None
            and step >= gate.get("step", 0)
            and one[gate["length"]] >= gate["one"]
            and many >= gate["four"]
        )
        stop = min(float(np.mean(list(one.values()))), many) >= settings["target"]
        return loop.Verdict(metrics=metrics, level=level + rise, stop=stop)

    return check


def round_to(params: Params, dtype: str) -> Params:
    """Params as they are stored in ``dtype``, back in float32: what the exported file computes."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(dtype).astype(jnp.float32), params)


def make_level(settings: dict[str, Any]) -> data.Level:
    """A level as the config writes it: lists where the dataclass has tuples."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    return data.Level(**values)


def run(have: Setup) -> loop.State:
    """Trains to the end of the plan, or goes on from the newest checkpoint."""
    config = have.config
    levels = tuple(make_level(level) for level in config["mix"]["levels"])
    mix = data.Mix(seed=config["seed"], tokens=config["mix"]["tokens"], levels=levels)
    plan = loop.Plan(**config["plan"])
    return loop.train(
        params=initial(have.spec, config["seed"]),
        optimizer=make_optimizer(config["optimizer"], plan.steps),
        loss=make_loss(have.spec, config["model"]["dtype"]),
        batches=lambda level: data.batches(have.train, mix, level, plan.steps),
        folder=Path(config["folder"]),
        plan=plan,
        check=make_check(have),
    )


def latest(have: Setup) -> tuple[int, Params]:
    """(step, params) of the folder's newest checkpoint.

    Raises:
      ValueError: when nothing has been trained there.
    """
    params = initial(have.spec, have.config["seed"])
    optimizer = make_optimizer(have.config["optimizer"], have.config["plan"]["steps"])
    like = loop.State(params=params, opt=optimizer.init(params))
    saved = loop.Checkpoints(Path(have.config["folder"]), keep=0, read_only=True)
    found = saved.latest(like)
    saved.close()
    if found is None:
        raise ValueError(
            f"latest(folder={have.config['folder']!r}) found no checkpoint. Train first: run the same "
            "command without --evaluate or --export."
        )
    return found[0], found[1].params


def evaluate(have: Setup, params: Params, *, count: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Recall of the bfloat16-rounded weights by length, depth and number of keys; bits per byte.

    Rows are other draws than those the training run's checks use.
    """
    rounded = round_to(params, "bfloat16")
    table: dict[str, Any] = {"n": count, "depths": recall.DEPTHS, "cells": {}}
    for keys in (1, 4):
        for length in lengths:
            found = recall.needle_recall(
                have.spec, rounded, have.held, length=length, keys=keys, count=count, seed=2
            )
            by_depth = [round(float(row.mean()), 3) for row in found]
            table["cells"][f"{keys} of {length}"] = {"mean": round(float(found.mean()), 4), "depth": by_depth}
            print(f"keys {keys}  length {length:5d}  {found.mean():.3f}  by depth {by_depth}", flush=True)
    table["bits_per_byte"] = round(recall.bits_per_byte(have.spec, rounded, have.books, windows=128), 4)
    print("bits per byte, held-out books:", table["bits_per_byte"])
    return table


def evaluate_folder(config: dict[str, Any], folder: Path, count: int) -> None:
    """The table of an exported model, with the tokenizer that lies beside it."""
    from kvjax.models import hf

    model = hf.load(folder, dtype="float32")
    have = setup(config | {"tokenizer": str(folder / "tokenizer.json")})
    evaluate(have, model.params, count=count, lengths=tuple(config["check"]["lengths"]))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--evaluate", action="store_true", help="print the table of the newest checkpoint")
    parser.add_argument("--model", type=Path, help="evaluate this HF folder instead of a checkpoint")
    parser.add_argument("--count", type=int, default=FINAL_COUNT, help="needles a cell of the table")
    parser.add_argument("--export", type=Path, help="write an HF folder of the newest checkpoint")
    args = parser.parse_args()
    config = yaml.safe_load(args.config.read_text())
    if args.model is not None:
        evaluate_folder(config, args.model, args.count)
        return
    have = setup(config)
    if not args.evaluate and args.export is None:
        run(have)
        return
    step, params = latest(have)
    print(f"checkpoint of step {step}")
    if args.evaluate:
        lengths = tuple(have.config["check"]["lengths"])
        table = {"step": step, **evaluate(have, params, count=args.count, lengths=lengths)}
        (Path(have.config["folder"]) / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    if args.export is not None:
        from kvjax.models import hf

        hf.save(args.export, have.spec, params, tokenizer=Path(have.config["tokenizer"]), dtype="bfloat16")


if __name__ == "__main__":
    main()
