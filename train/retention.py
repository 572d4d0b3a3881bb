"""Trains TRIM-KV's retention gates on a frozen model: divergence from it, plus what they retain too much.

python -m train.retention --config configs/retention/embedded.yaml                 trains, or continues
python -m train.retention --config configs/retention/embedded.yaml --export FILE   its newest checkpoint

Bui et al., Cache What Lasts, https://arxiv.org/abs/2512.03324: the score of a query at t and a key at i is
multiplied by beta_i^(t - i). The loss is the divergence of next tokens from those of the untouched model,
plus lambda times what the retained sum of beta_i^(t - i) exceeds the capacity by, as a share of the tokens
beyond it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax import cli
from kvjax.cli import option
from kvjax.policies import trim_kv
from kvjax.types import Heads, Params
from kvjax.weights import save_weights
from train import distill, gate_rows, gates, loop
from train import gate_settings as base
from train.config import read_config, require, section
from train.settings import FileDtype, command_line

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from kvjax.loading import LanguageModel

EXAMPLE = "configs/retention/embedded.yaml"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(base.Settings):
    """A config as read: that of gates, with two keys more. Of ``gate`` only ``hidden`` is used."""

    capacity: int = option(64, "M, the tokens of a KV head that cost nothing")
    bias: float = option(6.0, "of untrained gates: sigmoid(bias) is their retention")

    def __post_init__(self) -> None:
        """Raises ConfigError: a capacity that no row exceeds, or heads over several devices."""
        super().__post_init__()
        require(
            "default" in self.lambdas, "loss.lambdas", self.lambdas, "has no default. Name one lambda so."
        )
        shortest = min(self.data["lengths"])
        rule = f"is not below data.lengths ({shortest}): nothing would be forgotten."
        require(self.capacity < shortest, "capacity", self.capacity, rule)
        require(self.mesh[1] == 1, "mesh.tensor", self.mesh[1], "is not 1: gates of all heads share a layer.")


def read(path: Path, source: str | None = None) -> Settings:
    """The config at ``path``, for the model of ``source`` instead of its own.

    Raises:
      ConfigError, ModelError: as ``train.gate_settings.read``.
    """
    return read_config(path, lambda tree: section(Settings, tree).of(source), EXAMPLE)


def retained_attention(leaves: Params | None, x: Heads) -> tuple[Array, Float[Array, "B K T"]]:
    """Attention of a layer under ``train.distill.LayerAttention``; also what is retained at each query.

    ``leaves`` None: nothing is forgotten.
    """
    b, t, k, h = x.k.shape
    at = jnp.arange(t)
    age = jnp.maximum(at[:, None] - at[None, :], 0)
    causal = at[:, None] >= at[None, :]
    log_beta = jnp.zeros((b, k, t)) if leaves is None else trim_kv.log_retention(leaves, x.hidden)
    left = jnp.exp(log_beta[:, :, None, :] * age)
    q = x.q.reshape(b, t, k, -1, h).astype(jnp.float32)
    s = jnp.einsum("btkgh,bskh->bkgts", q, x.k.astype(jnp.float32)) * h**-0.5
    if x.softcap is not None:
        s = x.softcap * jnp.tanh(s / x.softcap)
    p = jax.nn.softmax(jnp.where(causal, s * left[:, :, None], -jnp.inf), axis=-1)
    out = jnp.einsum("bkgts,bskh->btkgh", p, x.v.astype(jnp.float32)).reshape(x.q.shape)
    return out.astype(x.v.dtype), jnp.where(causal, left, 0.0).sum(axis=-1)


def objective(
    model: distill.GatedModel,
    lam: float,
    capacity: int,
    frozen: Params,
    params: Params,
    batch: dict[str, Any],
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Divergence KL(model, model with gates) in nats a token, plus lambda times the excess."""
    tokens = batch["tokens"]

    def log_probabilities(trained: Any, attend: distill.LayerAttention) -> tuple[Array, Array]:
        x, retained = distill.forward(model, frozen, trained, tokens, attend)
        return jax.nn.log_softmax(model.network.logits(frozen, x)), retained

    teacher, _ = log_probabilities(None, lambda _, x: retained_attention(None, x))
    teacher = jax.lax.stop_gradient(teacher)
    student, retained = log_probabilities(distill.stack_layers(params["eviction"]), retained_attention)
    divergence = jnp.mean(jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1))
    excess = jnp.mean(jnp.maximum(retained - capacity, 0.0)) / (tokens.shape[1] - capacity)
    metrics = {"divergence": divergence, "excess": excess, "retained": jnp.mean(retained[..., -1])}
    return divergence + lam * excess, metrics


def initial_gates(settings: Settings, model: LanguageModel) -> Params:
    """``{"eviction": [a dict a layer]}``."""
    width, network = model.params["embed"].shape[1], model.network
    layers = trim_kv.initial(
        jax.random.key(settings.seed),
        width,
        network.num_kv_heads,
        network.num_layers,
        settings.gate.hidden or trim_kv.HIDDEN,
        settings.bias,
    )
    return {"eviction": layers}


def run(settings: Settings) -> loop.State:
    """Trains to the end of the plan, or continues from the newest checkpoint.

    Raises:
      ConfigError, ModelError: see ``train.gate_settings``.
    """
    backbone, layout = base.backbone(settings), gates.make_layout(settings)
    model = gates.gated_model(settings, backbone.network, layout)
    frozen = layout.frozen(backbone.params, settings.dtype)
    data = gate_rows.read_data(settings, backbone.folder, backbone.text)
    gate_rows.record_text(settings)
    unbound = functools.partial(objective, model, settings.lam, settings.capacity)
    loss, params = jax.tree_util.Partial(unbound, frozen), initial_gates(settings, backbone)
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
    """The metrics of one fixed batch."""
    measure, batch = jax.jit(lambda run, params, rows: run(params, rows)[1]), data.train[0]

    def check(params: Params, step: int, level: int) -> loop.Verdict:
        metrics = {f"check_{n}": float(x) for n, x in measure(loss, params, batch).items()}
        return loop.Verdict(metrics=metrics, level=level)

    return check


def export(settings: Settings, file: Path, dtype: FileDtype = "float32") -> None:
    """Writes the newest checkpoint's gates, in that dtype, and the log beside it.

    Raises:
      ConfigError: no checkpoint.
    """
    model = base.backbone(settings)
    step, params = loop.latest(
        settings.folder,
        initial_gates(settings, model),
        base.optimizer(settings.rate, settings.plan.steps),
        gates.make_layout(settings),
    )
    notes: dict[str, Any] = {"lambda": settings.lam, "capacity": settings.capacity, "bias": settings.bias}
    notes |= {"seed": settings.seed, "step": step, "config": settings.name}
    notes |= {"text": gate_rows.recorded_text(settings)}
    save_weights(file, model, trim_kv.TrimKV(), params["eviction"], notes=notes, dtype=dtype)
    shutil.copyfile(settings.folder / "log.jsonl", file.with_suffix(".jsonl"))
    print(f"{file} holds the gates of step {step}")


def main(words: Sequence[str] | None = None) -> int:
    """The command line; its exit code: 0, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m train.retention", description=__doc__.splitlines()[0])
    return command_line(parser, words, lambda args: read(args.config, args.model), run, export)


if __name__ == "__main__":
    cli.start(main)
