"""Trains the embedded model: constructed start, curriculum, checks, export.

python -m train.embedded.pretrain --config configs/pretrain/embedded.yaml               trains, or continues
python -m train.embedded.pretrain --config configs/pretrain/embedded.yaml --export DIR  HF folder in bfloat16

``train.embedded.aims`` measures the result, ``train.embedded.card`` writes its card.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax.models import decoder
from kvjax.models.spec import ModelSpec
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.types import Params
from train import loop
from train.config import ConfigError, axes, require
from train.embedded import checks, data, data_parallel, forward, recall, tasks
from train.embedded.setup import Setup, initial_of, model_spec, options, read, round_to, setup
from train.mesh import Layout, layout
from train.needles import needle_recall

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def schedule(cycles: Sequence[dict[str, Any]]) -> optax.Schedule:
    """Per cycle a warm-up, a plateau and a linear decay over the last ``decay`` steps, to the step ``until``.

    A plateau does not depend on its cycle's length: ``until`` may be changed between two runs of the same
    folder before the decay begins.
    """
    parts: list[optax.Schedule] = []
    borders: list[int] = []
    begin, level = 0, 0.1 * float(cycles[0]["peak"])
    for cycle in cycles:
        peak, final = float(cycle["peak"]), float(cycle["final"])
        rise, fall = begin + cycle["warmup"], cycle["until"] - cycle["decay"]
        parts += [
            optax.linear_schedule(level, peak, cycle["warmup"]),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, final, cycle["decay"]),
        ]
        borders += [rise, max(rise, fall), cycle["until"]]
        begin, level = cycle["until"], final
    return optax.join_schedules(parts, borders[:-1])


def make_optimizer(settings: dict[str, Any]) -> optax.GradientTransformation:
    """AdamW under a global clip; norms and biases do not decay."""
    matrices = lambda params: jax.tree_util.tree_map_with_path(  # noqa: E731
        lambda path, leaf: str(getattr(path[-1], "key", "")).startswith(("w", "embed")), params
    )
    return optax.chain(
        optax.clip_by_global_norm(settings["clip"]),
        optax.adamw(
            schedule(settings["cycles"]),
            b2=settings["b2"],
            weight_decay=settings["weight_decay"],
            mask=matrices,
        ),
    )


def make_loss(
    spec: ModelSpec, dtype: str, *, block: int = 128, remat: bool = False, on: Mesh = ONE
) -> loop.Loss:
    """Weighted cross entropy on the scored tokens; the forward pass runs in ``dtype``.

    ``block``, ``remat`` and ``on`` are those of ``recall.blocked_attend``.
    """

    def loss(params: Params, batch: dict[str, Array]) -> tuple[Float[Array, ""], dict[str, Array]]:
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        logits = recall.scored_logits(
            spec,
            cast,
            batch["tokens"],
            batch["at"],
            block=block,
            remat=remat,
            speak=batch.get("speak"),
            on=on,
        )
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"])
        weight, answer = batch["weight"], batch["answer"]
        right = (logits.argmax(-1) == batch["target"]) & answer
        text_weight = jnp.where(answer, 0.0, weight)
        return (nll * weight).sum() / weight.sum(), {
            "answers": right.sum() / jnp.maximum(answer.sum(), 1),
            "text_nll": (nll * text_weight).sum() / jnp.maximum(text_weight.sum(), 1e-6),
        }

    return loss


AHEAD_SHARE = 0.1
"""Weight of the loss on tokens further ahead, against the mean of the scored tokens."""


def make_quick_loss(spec: ModelSpec) -> loop.Loss:
    """``make_loss`` in the products of ``forward``, plus the look-ahead loss of batches that have one.

    The state of a question's last token, times one matrix for each distance, must predict the answer's 2nd,
    3rd and 4th token, so that attention reads the whole value before its first token is written.
    """

    def loss(params: Params, batch: dict[str, Array]) -> tuple[Float[Array, ""], dict[str, Array]]:
        x = forward.states(spec, params, batch["tokens"], speak=batch.get("speak"))
        nll, hit = forward.cross_entropy(
            decoder.norm(spec, params, "final_norm", x[batch["at"]]), params["embed"], batch["target"]
        )
        weight, answer = batch["weight"], batch["answer"]
        text_weight = jnp.where(answer, 0.0, weight)
        total = (nll * weight).sum() / weight.sum()
        metrics = {
            "answers": (hit & answer).sum() / jnp.maximum(answer.sum(), 1),
            "text_nll": (nll * text_weight).sum() / jnp.maximum(text_weight.sum(), 1e-6),
        }
        if "ahead_at" in batch:
            real, target = batch["ahead_real"].T.reshape(-1), batch["ahead_target"].T.reshape(-1)
            question = x[batch["ahead_at"]]
            far = jnp.concatenate([forward.product(question, w) for w in params["ahead"]])
            normed = decoder.norm(spec, params, "final_norm", far)
            cost, right = forward.cross_entropy(normed, params["embed"], target)
            count = jnp.maximum(real.sum(), 1)
            total += AHEAD_SHARE * (cost * real).sum() / count
            metrics["ahead"] = (right & real).sum() / count
        return total, metrics

    return loss


def make_check(have: Setup, where: Layout | None = None) -> Any:
    """A check of recall on held-out words and text, which raises the level and ends the run at its target."""
    settings, gates = have.config["check"], have.config["check"]["gates"]

    def check(params: Params, step: int, level: int) -> loop.Verdict:
        params = params if where is None else where.whole(params)
        rounded = round_to(params, have.config["model"]["dtype"])
        likelihood = recall.quick_nll if quick(have.config) else recall.nll
        score = functools.partial(likelihood, have.spec, rounded)

        def needles(length: int, keys: int) -> float:
            count = settings["count"]
            return float(
                needle_recall(score, have.held, length=length, keys=keys, count=count, seed=1).mean()
            )

        one = {length: needles(length, 1) for length in settings["lengths"]}
        metrics = {f"recall_{length}": value for length, value in one.items()}
        many_length = settings["lengths"][min(1, len(settings["lengths"]) - 1)]
        metrics[f"recall_{many_length}_of_4"] = many = needles(many_length, 4)
        metrics["bits_per_byte"] = recall.bits_per_byte(score, have.books, windows=16)
        for task, row in tasks.TASKS.items() if "tasks" in settings else ():
            metrics[task] = recall.task_recall(score, row, have.held, **settings["tasks"])
        for name, size in settings.get("asked", {}).items():
            metrics[name] = recall.task_recall(score, checks.CHECKS[name], have.held, seed=1, **size)
        gate = gates[level] if level < len(gates) else None
        rise = (
            gate is not None
            and step >= gate.get("step", 0)
            and one[gate["length"]] >= gate["one"]
            and many >= gate["four"]
            and all(metrics[name] >= least for name, least in gate.get("asked", {}).items())
        )
        stop = min(float(np.mean(list(one.values()))), many) >= settings["target"]
        return loop.Verdict(metrics=metrics, level=level + rise, stop=stop)

    return check


def make_level(settings: dict[str, Any]) -> data.Level:
    """A level of the config, whose lists become tuples."""

    def frozen(value: Any) -> Any:
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    values: dict[str, Any] = {name: frozen(value) for name, value in settings.items()}
    if "hush" in values:
        values["hush"] = data.Hush(**{name: frozen(value) for name, value in values["hush"].items()})
    return data.Level(**values)


def quick(config: dict[str, Any]) -> bool:
    """Whether the run multiplies as ``train.embedded.forward`` does."""
    return config.get("loss", {}).get("products") == "float32"


def make_loss_of(config: dict[str, Any], where: Layout | None) -> loop.Loss:
    """The config's loss over the config's devices."""
    spec = model_spec(config["model"])
    if quick(config):
        loss = make_quick_loss(spec)
    else:
        on = ONE if where is None else where.mesh
        loss = make_loss(spec, config["model"]["dtype"], **config.get("attention", {}), on=on)
    if isinstance(where, data_parallel.DataParallel):
        return data_parallel.mean_loss(loss, where)
    return loss


def make_layout(config: dict[str, Any]) -> Layout | None:
    """Data parallelism over ``devices``, or a ``mesh`` that weights are sharded over; None for one device.

    Raises:
      ConfigError: both, too few devices, or a mesh that does not divide the rows of every batch or the KV
        heads, or that is given with the products of ``train.embedded.forward``.
    """
    count, (rows, heads) = config.get("devices", 1), axes(config.get("mesh", {}))
    if count > 1 and rows * heads == 1:
        return data_parallel.make_layout(count)
    if rows * heads == 1:
        return None
    rule = "shards the weights, devices replicate them. Give one of the two."
    require(count == 1, "mesh", config["mesh"], rule)
    rule = "cannot shard the products of train.embedded.forward (loss.products). Give devices instead."
    require(not quick(config), "mesh", config["mesh"], rule)
    kv = config["model"]["num_kv_heads"]
    require(kv % heads == 0, "mesh.tensor", heads, f"does not divide the {kv} KV heads.")
    for level in config["mix"]["levels"]:
        for length in level["lengths"]:
            many = max(1, level.get("tokens", config["mix"]["tokens"]) // length)
            require(
                many % rows == 0, "mesh.data", rows, f"does not divide batches of {many} rows of {length}."
            )
    try:
        return layout(rows, heads)
    except ValueError as reason:
        raise ConfigError(str(reason)) from reason


def run(have: Setup) -> loop.State:
    """Trains to the end of the plan, or continues from the newest checkpoint.

    Raises:
      ConfigError: see ``make_layout``.
    """
    config = have.config
    levels = tuple(make_level(level) for level in config["mix"]["levels"])
    where = make_layout(config)
    mix = data.Mix(
        seed=config["seed"],
        tokens=config["mix"]["tokens"],
        levels=levels,
        kv_heads=have.spec.num_kv_heads,
        parts=config.get("devices", 1),
    )
    plan, params = loop.Cadence(**config["plan"]), initial_of(have.config, have.train.text)
    return loop.train(
        params=params if where is None else where.put(params, where.backbone(params)),
        optimizer=make_optimizer(config["optimizer"]),
        loss=make_loss_of(config, where),
        layout=where,
        batches=lambda level: data.batches(have.train, mix, level, plan.steps),
        folder=Path(config["folder"]),
        plan=plan,
        check=make_check(have, where),
    )


def latest(have: Setup) -> tuple[int, Params]:
    """(step, the model's params) of the folder's newest checkpoint.

    Raises:
      ValueError: there is none.
    """
    params = initial_of(have.config)
    optimizer = make_optimizer(have.config["optimizer"])
    like = loop.State(params=params, opt=optimizer.init(params))
    saved = loop.Checkpoints(Path(have.config["folder"]), keep=0, read_only=True)
    restored = saved.latest(like)
    saved.close()
    if restored is None:
        raise ValueError(
            f"latest(folder={have.config['folder']!r}) found no checkpoint. Train first: run the same "
            "command without --export."
        )
    step, state, _ = restored
    return step, {name: leaf for name, leaf in state.params.items() if name != "ahead"}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m train.embedded.pretrain", description=__doc__.splitlines()[0]
    )
    options(parser)
    parser.add_argument("--export", type=Path, help="write an HF folder of the newest checkpoint")
    args = parser.parse_args()
    have = setup(read(args.config, args.set, args.folder))
    if args.export is None:
        run(have)
        return
    from kvjax.models import hf

    step, params = latest(have)
    hf.save(args.export, have.spec, params, tokenizer=Path(have.config["tokenizer"]), dtype="bfloat16")
    print(f"{args.export} holds the weights of step {step}")


if __name__ == "__main__":
    main()
