"""Learns DuoAttention's head pattern: how much each KV head needs the middle of a text.

python -m train.duo --config configs/gates/duo-embedded.yaml
python -m train.duo --config configs/gates/duo-embedded.yaml --export FILE

Xiao et al., DuoAttention, https://arxiv.org/abs/2410.10819: every KV head writes ``alpha`` times its full
attention plus ``1 - alpha`` times its streaming attention (sinks and a window). Only the alphas are trained,
from 1, by the squared error of the final hidden states where needles are answered plus lambda times their
mean; after every update they are clipped to 0 ... 1.
"""

from __future__ import annotations

import argparse
import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from kvjax import cli
from kvjax.models.spec import ModelSpec
from kvjax.policies.duo import Duo
from kvjax.types import Heads, Network, Params
from kvjax.weights import save_weights
from train import distill, gate_rows, gates, loop, mesh
from train.gate_settings import ConfigError, Settings, backbone, optimizer, read
from train.settings import FileDtype, command_line

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def initial_pattern(spec: ModelSpec | Network) -> Params:
    """All heads attend fully: ``{"admission": [{"alpha": ones [K]} a layer]}``."""
    return {"admission": [{"alpha": jnp.ones(spec.num_kv_heads)} for _ in range(spec.num_layers)]}


def mixed_attention(model: distill.GatedModel, sinks: int) -> distill.LayerAttention:
    """Attention of a layer under ``{"alpha": [K]}``."""

    def attend(leaves: Params, x: Heads) -> tuple[Array, Array]:
        b, t, k, _ = x.k.shape
        closed = jnp.where(jnp.arange(t) < sinks, 0.0, -jnp.inf)
        full = distill.gated_attention(model, x, jnp.zeros((b, k, t)))
        streaming = distill.gated_attention(model, x, jnp.broadcast_to(closed, (b, k, t)))
        alpha = jnp.repeat(leaves["alpha"], model.network.num_heads // model.network.num_kv_heads)[
            :, None
        ].astype(full.dtype)
        return alpha * full + (1 - alpha) * streaming, jnp.zeros(())

    return attend


def objective(
    model: distill.GatedModel, lam: float, sinks: int, frozen: Params, params: Params, batch: dict[str, Any]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Squared error where answers are predicted (mean over these and channels) plus lambda mean alpha."""
    teacher = distill.teacher_states(model, frozen, batch["tokens"])
    pattern = distill.stack_layers(params["admission"])
    x, _ = distill.forward(model, frozen, pattern, batch["tokens"], mixed_attention(model, sinks))
    errors = jnp.mean((distill.final_states(model, frozen, x) - teacher) ** 2, axis=-1)
    error, answer = errors.reshape(-1)[batch["at"]], batch["answer"]
    loss = jnp.sum(jnp.where(answer, error, 0.0)) / jnp.maximum(jnp.sum(answer), 1)
    mean = jnp.mean(pattern["alpha"])
    return loss + lam * mean, {"distill": loss, "alpha": mean}


def in_unit_interval() -> optax.GradientTransformation:
    """Shortens updates so that params stay in 0 ... 1."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda u, p: jnp.clip(p + u, 0.0, 1.0) - p, updates, params), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """The config's optimiser, then the clip."""
    return optax.chain(optimizer(settings.rate, settings.plan.steps), in_unit_interval())


def make_check(loss: Any, data: gate_rows.GateData, layout: mesh.Layout) -> Any:
    """The metrics of one fixed batch and every alpha."""
    measure, batch = jax.jit(lambda run, params, rows: run(params, rows)[1]), data.train[0]

    def check(params: Params, step: int, level: int) -> loop.Verdict:
        metrics = {name: float(value) for name, value in measure(loss, params, batch).items()}
        for layer, leaves in enumerate(layout.mesh.read(params["admission"])):
            metrics |= {f"alpha_{layer}_{head}": float(a) for head, a in enumerate(leaves["alpha"])}
        return loop.Verdict(metrics=metrics, level=level)

    return check


def run(settings: Settings) -> loop.State:
    """Trains to the end of the plan, or continues from the newest checkpoint.

    Raises:
      ConfigError: documents instead of rows, which have no answers; or see ``train.gate_settings``.
      ModelError: no such model.
    """
    if settings.data["kind"] == "documents":
        raise ConfigError("data.kind: train.duo needs rows with answers. Use rows or chat.")
    backbone_model, layout = backbone(settings), gates.make_layout(settings)
    model = gates.gated_model(settings, backbone_model.network, layout)
    frozen = layout.frozen(backbone_model.params, settings.dtype)
    data = gate_rows.read_data(settings, backbone_model.folder, backbone_model.text)
    gate_rows.record_text(settings)
    unbound = functools.partial(objective, model, settings.lam, settings.sinks)
    loss, pattern = jax.tree_util.Partial(unbound, frozen), initial_pattern(backbone_model.network)
    return loop.train(
        params=layout.put(pattern, layout.gates(pattern)),
        optimizer=make_optimizer(settings),
        loss=loss,
        batches=lambda level: data.train,
        folder=settings.folder,
        plan=settings.plan,
        check=make_check(loss, data, layout),
        layout=layout,
    )


def export(settings: Settings, file: Path, dtype: FileDtype = "float32") -> None:
    """Writes the newest checkpoint's pattern, in that dtype, and the log beside it.

    Raises:
      ConfigError: no checkpoint.
    """
    model = backbone(settings)
    step, params = loop.latest(
        settings.folder,
        initial_pattern(model.network),
        make_optimizer(settings),
        gates.make_layout(settings),
    )
    notes: dict[str, Any] = {"lambda": settings.lam, "sinks": settings.sinks, "window": settings.gate.window}
    notes |= {"seed": settings.seed, "step": step, "config": settings.name}
    notes |= {"text": gate_rows.recorded_text(settings)}
    part = Duo(window=settings.gate.window)
    save_weights(file, model, part, params["admission"], notes=notes, dtype=dtype)
    shutil.copyfile(settings.folder / "log.jsonl", file.with_suffix(".jsonl"))
    print(f"{file} holds the pattern of step {step}")


def main(words: Sequence[str] | None = None) -> int:
    """The command line; its exit code: 0, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m train.duo", description=__doc__.splitlines()[0])
    parser.add_argument("--strength", default="default", help="which of the config's lambdas")
    return command_line(parser, words, lambda args: read(args.config, args.strength, args.model), run, export)


if __name__ == "__main__":
    cli.start(main)
