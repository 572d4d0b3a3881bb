"""Trains KVzap's maps or Fast KVzip's gates on KVzip's scores of a frozen model's texts.

python -m train.zap --config configs/zap/kvzap.yaml                 trains, or continues
python -m train.zap --config configs/zap/kvzap.yaml --export FILE   its newest checkpoint

KVzap, https://arxiv.org/abs/2601.07891: mean squared error to the logarithm of KVzip+'s scores.
Fast KVzip, https://arxiv.org/abs/2601.17668: cross entropy with KVzip's scores.
A row is read with the instruction and itself behind it, in one piece, and nothing of the model is trained.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cli
from kvjax.algebra import Part, Replay
from kvjax.cli import option
from kvjax.policies import fast_kvzip, kvzap
from kvjax.policies.kvzip import KVzip
from kvjax.types import Heads, Params
from kvjax.weights import save_weights
from train import distill, gate_rows, gates, loop
from train import gate_settings as base
from train.config import REQUIRED, read_config, require, section
from train.settings import FileDtype, command_line

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from kvjax.loading import LanguageModel

EXAMPLE = "configs/zap/kvzap.yaml"

LEAST = 1e-10
"""The least score whose logarithm is taken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(base.Settings):
    """A config as read: that of gates, with a key more. Of ``gate`` only ``hidden`` counts; None: linear."""

    method: Literal["kvzap", "fast_kvzip"] = option(REQUIRED, "what is trained")

    def __post_init__(self) -> None:
        """Raises ConfigError: no default lambda, or heads over several devices."""
        super().__post_init__()
        rule = "has no default. Name one lambda so."
        require("default" in self.lambdas, "loss.lambdas", self.lambdas, rule)
        rule = "is not 1: weights of all heads share a layer."
        require(self.mesh[1] == 1, "mesh.tensor", self.mesh[1], rule)

    @property
    def part(self) -> Part:
        """The part that reads the weights."""
        return kvzap.KVzap() if self.method == "kvzap" else fast_kvzip.FastKVzip()


def read(path: Path, source: str | None = None) -> Settings:
    """The config at ``path``, for the model of ``source`` instead of its own.

    Raises:
      ConfigError, ModelError: as ``train.gate_settings.read``.
    """
    return read_config(path, lambda tree: section(Settings, tree).of(source), EXAMPLE)


def kvzip_scores(x: Heads, length: int, *, output: bool) -> Float[Array, "B K T"]:
    """KVzip's scores of the first ``length`` tokens at a layer that reads them, an instruction, and them."""
    q, k, v = (jnp.swapaxes(part, 1, 2) for part in (x.q, x.k, x.v))
    rows = q.shape[0]
    pos = jnp.broadcast_to(jnp.arange(length, q.shape[2]), (rows, q.shape[2] - length))
    piece = Replay(
        q=q[:, :, length:],
        k=k[:, :, length:],
        pos=pos,
        prompt_k=k[:, :, :length],
        prompt_v=v[:, :, :length],
        begin=jnp.zeros(rows, jnp.int32),
        end=jnp.full(rows, length, jnp.int32),
        hidden=x.hidden[:, length:],
        softcap=x.softcap,
        wo=x.wo,
    )
    return KVzip(size=length, output=output).replayed(piece)


def objective(
    model: distill.GatedModel,
    method: str,
    ask: Int[np.ndarray, " I"],
    frozen: Params,
    params: Params,
    batch: dict[str, Any],
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss, and the share of the targets' variance that is explained, both means over layers."""
    tokens = jnp.asarray(batch["tokens"])
    rows, length = tokens.shape
    fed = jnp.concatenate([tokens, jnp.broadcast_to(jnp.asarray(ask), (rows, len(ask))), tokens], axis=1)

    def attend(leaves: Params, x: Heads) -> tuple[Array, Any]:
        b, t, k, _ = x.k.shape
        out = distill.gated_attention(model, x, jnp.zeros((b, k, t)))
        score, hidden = kvzip_scores(x, length, output=method == "kvzap"), x.hidden[:, :length]
        if method == "kvzap":
            target, own = jnp.log(jnp.maximum(score, LEAST)), kvzap.scores(leaves, hidden)
            loss = jnp.mean((own - target) ** 2)
        else:
            target, own = score, jnp.clip(fast_kvzip.scores(leaves, hidden), 1e-6, 1 - 1e-6)
            loss = -jnp.mean(target * jnp.log(own) + (1 - target) * jnp.log1p(-own))
        spread = jnp.mean((target - target.mean(axis=(0, 2), keepdims=True)) ** 2)
        return out, (loss, 1 - jnp.mean((own - target) ** 2) / spread)

    _, (losses, explained) = distill.forward(
        model,
        frozen,
        distill.stack_layers(params["layers"]),
        fed,
        attend,  # type: ignore[arg-type]  # two numbers a layer
    )
    return jnp.mean(losses), {"explained": jnp.mean(explained)}


def initial_weights(settings: Settings, model: LanguageModel) -> Params:
    """``{"layers": [a dict a layer]}``."""
    width, network = model.params["embed"].shape[1], model.network
    key, heads, layers = jax.random.key(settings.seed), network.num_kv_heads, network.num_layers
    if settings.method == "kvzap":
        return {"layers": kvzap.initial(key, width, heads, layers, settings.gate.hidden, bias=-6.0)}
    return {"layers": fast_kvzip.initial(key, width, heads, network.num_heads // heads, layers)}


def instruction(model: LanguageModel) -> Int[np.ndarray, " I"]:
    """What KVzip asks for a prompt that is one piece.

    Raises:
      PolicyError: a model without a tokenizer.
    """
    (piece,) = KVzip(size=1).pieces(np.zeros(1, np.int32), model.text)
    return np.asarray(piece.tokens, np.int32)[:-1]


def run(settings: Settings) -> loop.State:
    """Trains to the end of the plan, or continues from the newest checkpoint.

    Raises:
      ConfigError, ModelError: see ``train.gate_settings``; also rows that the model cannot read twice.
    """
    backbone, layout = base.backbone(settings), gates.make_layout(settings)
    ask, most = instruction(backbone), backbone.network.max_positions
    longest = max(settings.data["lengths"])
    rule = f"is read twice with {len(ask)} tokens between, more than the model's {most} positions."
    require(2 * longest + len(ask) <= most, "data.lengths", longest, rule)
    model = gates.gated_model(settings, backbone.network, layout)
    frozen = layout.frozen(backbone.params, settings.dtype)
    data = gate_rows.read_data(settings, backbone.folder, backbone.text)
    gate_rows.record_text(settings)
    loss = jax.tree_util.Partial(functools.partial(objective, model, settings.method, ask), frozen)
    params = initial_weights(settings, backbone)
    return loop.train(
        params=layout.put(params, layout.gates(params)),
        optimizer=base.optimizer(settings.rate, settings.plan.steps),
        loss=loss,
        batches=lambda level: data.train,
        folder=settings.folder,
        plan=settings.plan,
        check=make_check(loss, data),
        layout=layout,
    )


def make_check(loss: Any, data: gate_rows.GateData) -> Any:
    """Loss and metrics of the held-out rows."""
    measure = jax.jit(lambda run, params, rows: run(params, rows))

    def check(params: Params, step: int, level: int) -> loop.Verdict:
        metrics: dict[str, float] = {}
        for length, rows in data.check.items():
            value, more = measure(loss, params, {"tokens": rows})
            metrics |= {f"check_loss_{length}": float(value)}
            metrics |= {f"check_{name}_{length}": float(x) for name, x in more.items()}
        return loop.Verdict(metrics=metrics, level=level)

    return check


def export(settings: Settings, file: Path, dtype: FileDtype = "float32") -> None:
    """Writes the newest checkpoint's weights, in that dtype, and the log beside it.

    Raises:
      ConfigError: no checkpoint.
    """
    model = base.backbone(settings)
    step, params = loop.latest(
        settings.folder,
        initial_weights(settings, model),
        base.optimizer(settings.rate, settings.plan.steps),
        gates.make_layout(settings),
    )
    notes: dict[str, Any] = {"seed": settings.seed, "step": step, "config": settings.name}
    notes |= {"text": gate_rows.recorded_text(settings)}
    save_weights(file, model, settings.part, params["layers"], notes=notes, dtype=dtype)
    shutil.copyfile(settings.folder / "log.jsonl", file.with_suffix(".jsonl"))
    print(f"{file} holds the weights of step {step}")


def main(words: Sequence[str] | None = None) -> int:
    """The command line; its exit code: 0, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m train.zap", description=__doc__.splitlines()[0])
    return command_line(parser, words, lambda args: read(args.config, args.model), run, export)


if __name__ == "__main__":
    cli.start(main)
