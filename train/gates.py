"""Trains WG-KV's write gates on a frozen model: distillation plus lambda times what the gates keep.

python -m train.gates --config configs/gates/embedded.yaml                    the lambda called default
python -m train.gates --config configs/gates/embedded.yaml --strength NAME    another of the config's lambdas
python -m train.gates --config ... [--strength NAME] --export FILE            its newest checkpoint as a file
python -m train.gates --config ... --compile v5e:2x4                          memory of a chip, without one

A run that was stopped continues with exactly the losses it would have had. --export writes
FILE.safetensors, the histogram of its gates (.png, needs matplotlib) and the run's log (.jsonl).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cli
from kvjax.models.decoder import Decoder
from kvjax.models.spec import ModelSpec
from kvjax.policies.wg_kv import WriteGate, gate_logits, initial
from kvjax.sharding.specs import DATA
from kvjax.types import Network, Params
from kvjax.weights import save_weights
from train import aot, distill, gate_rows, kept_states, loop, mesh, needles
from train.gate_settings import ConfigError, Settings, backbone, optimizer, read
from train.settings import FileDtype, add_training_options

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def gated_model(
    settings: Settings, backbone: ModelSpec | Network, layout: mesh.Layout, impl: str | None = None
) -> distill.GatedModel:
    """The static arguments of forward passes; ``backbone`` is a network, or the sizes of one of ours.

    Raises:
      ConfigError: a model whose gates cannot be trained.
    """
    try:
        distill.check_model(backbone, settings.mesh[1])
    except ValueError as reason:
        raise ConfigError(str(reason)) from reason
    gate = settings.gate
    return distill.GatedModel(
        network=Decoder(backbone) if isinstance(backbone, ModelSpec) else backbone,
        layout=layout,
        window=gate.window,
        sinks=settings.sinks,
        eps=gate.eps,
        concrete=gate.concrete,
        remat=settings.remat,
        impl=impl,
    )


def initial_gates(settings: Settings, spec: ModelSpec | Network) -> Params:
    """Untrained gates, ``{"admission": [a dict a layer]}``."""
    gate, key = settings.gate, jax.random.key(settings.seed)
    layers = initial(key, spec.num_kv_heads, spec.head_dim, gate.hidden, spec.num_layers, norm=gate.norm)
    return {"admission": layers}


def objective(
    model: distill.GatedModel, lam: float, cost: str, frozen: Params, params: Params, batch: dict[str, Any]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Distillation plus lambda times the cost; metrics ``distill``, ``cost`` and ``gate`` (their mean)."""
    kept_teacher = batch.get(kept_states.TEACHER)
    teacher = distill.teacher_states(model, frozen, batch["tokens"]) if kept_teacher is None else kept_teacher
    student, z = _student(model, frozen, params, batch["tokens"], draw=model.concrete)
    loss = distill.distillation_loss(model, frozen, student, teacher)
    slots = distill.open_probability(z) if model.concrete else distill.soft_slots(z)
    kept = distill.gate_cost(slots, model.window, cost)
    return loss + lam * kept, {"distill": loss, "cost": kept, "gate": jnp.mean(jax.nn.sigmoid(z))}


def _student(
    model: distill.GatedModel,
    frozen: Params,
    params: Params,
    tokens: Array,
    tau: float | None = None,
    draw: bool = False,
) -> tuple[Array, Array]:
    """The forward pass under soft gates, thresholded at tau, or drawn; its output and z [L, B, K, T]."""
    gates = distill.stack_layers(params["admission"])
    if draw:
        # The draw follows from the batch, so that a resumed run has the losses of one that was not stopped.
        key = jax.random.key(jnp.sum(tokens))
        gates |= {"draw": jax.random.split(key, len(params["admission"]))}
    return distill.forward(model, frozen, gates, tokens, distill.gated_layer(model, gate_logits, tau))


def make_loss(model: distill.GatedModel, settings: Settings, frozen: Params) -> loop.Loss:
    """The objective of ``train.loop`` with its frozen weights bound."""
    return jax.tree_util.Partial(functools.partial(objective, model, settings.lam, settings.cost), frozen)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _measure(
    model: distill.GatedModel, tau: float, frozen: Params, params: Params, tokens: Array
) -> dict[str, Array]:
    """Distillation loss under soft gates, and thresholded ones with sinks; mean gate, share of open ones."""
    teacher = distill.teacher_states(model, frozen, tokens)
    soft, z = _student(model, frozen, params, tokens)
    hard, _ = _student(model, frozen, params, tokens, tau)
    mean, kept = distill.kept_shares(z, model.window, tau)
    loss = functools.partial(distill.distillation_loss, model, frozen, teacher=teacher)
    return {"soft": loss(soft), "hard": loss(hard), "gate": mean, "kept": kept}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _next_tokens(
    model: distill.GatedModel, tau: float, frozen: Params, params: Params, tokens: Array, at: Array
) -> tuple[Array, Array]:
    """``needles.Score`` of the model under thresholded gates."""
    x, _ = _student(model, frozen, params, tokens, tau)
    logits = model.network.logits(frozen, x.reshape(-1, x.shape[-1])[at])
    target = tokens.reshape(-1)[at + 1]
    nll = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
    return model.layout.mesh.everywhere((nll, logits.argmax(-1) == target))  # type: ignore[no-any-return]


def make_check(
    model: distill.GatedModel, settings: Settings, frozen: Params, data: gate_rows.GateData
) -> Callable[[Params, int, int], loop.Verdict]:
    """A check by length on held-out rows: soft and hard loss, what is kept, and recall of needles."""
    tau = settings.gate.tau

    def check(params: Params, step: int, level: int) -> loop.Verdict:
        metrics: dict[str, float] = {}
        for length, rows in data.check.items():
            most = min(len(rows), max(1, settings.data["tokens"] // length))
            size = next(n for n in range(most, 0, -1) if len(rows) % n == 0)
            parts = [_measure(model, tau, frozen, params, part) for part in rows.reshape(-1, size, length)]
            metrics |= {f"{name}_{length}": float(np.mean([p[name] for p in parts])) for name in parts[0]}
        if data.held is not None and getattr(getattr(model.network, "spec", None), "tied", True):
            score = functools.partial(_next_tokens, model, tau, frozen, params)
            for row in settings.check.get("needles", ()):
                hits = needles.needle_recall(score, data.held, seed=1, **row)
                metrics[f"found_{row['keys']}_of_{row['length']}"] = float(hits.mean())
        return loop.Verdict(metrics=metrics, level=level)

    return check


def run(settings: Settings) -> loop.State:
    """Trains to the end of the plan, or continues from the newest checkpoint.

    Raises:
      ConfigError, ModelError: see ``train.gate_settings``.
    """
    backbone_model = backbone(settings)
    layout = make_layout(settings)
    model = gated_model(settings, backbone_model.network, layout)
    frozen = layout.frozen(backbone_model.params, settings.dtype)
    data = gate_rows.read_data(settings, backbone_model.folder, backbone_model.text)
    gate_rows.record_text(settings)
    train = data.train
    if settings.keep_teacher:
        train = kept_states.with_teacher(train, settings, model, frozen)
    gates = initial_gates(settings, backbone_model.network)
    return loop.train(
        params=layout.put(gates, layout.gates(gates)),
        optimizer=optimizer(settings.rate, settings.plan.steps),
        loss=make_loss(model, settings, frozen),
        batches=lambda level: train,
        folder=settings.folder,
        plan=settings.plan,
        check=make_check(model, settings, frozen, data),
        layout=layout,
    )


def make_layout(settings: Settings) -> mesh.Layout:
    """The config's mesh over this machine's devices.

    Raises:
      ConfigError: too few devices.
    """
    try:
        return mesh.layout(*settings.mesh)
    except ValueError as reason:
        raise ConfigError(str(reason)) from reason


def export(settings: Settings, file: Path, dtype: FileDtype = "float32") -> None:
    """Writes the newest checkpoint's gates, in that dtype, their histogram and the log.

    Raises:
      ConfigError: no checkpoint.
    """
    backbone_model, layout = backbone(settings), make_layout(settings)
    step, params = loop.latest(
        settings.folder,
        initial_gates(settings, backbone_model.network),
        optimizer(settings.rate, settings.plan.steps),
        layout,
    )
    gate = settings.gate
    notes: dict[str, Any] = {"lambda": settings.lam, "tau": gate.tau, "window": gate.window}
    notes |= {"seed": settings.seed, "step": step, "strength": settings.strength, "cost": settings.cost}
    notes |= {"text": gate_rows.recorded_text(settings)}
    part = WriteGate(window=gate.window)
    save_weights(file, backbone_model, part, params["admission"], notes=notes, dtype=dtype)
    shutil.copyfile(settings.folder / "log.jsonl", file.with_suffix(".jsonl"))
    print(f"{file} holds the gates of step {step}")
    if importlib.util.find_spec("matplotlib") is None:
        print("No picture: it needs matplotlib. Install it (pip install -e '.[plot]') and export again.")
        return
    frozen = layout.frozen(backbone_model.params, settings.dtype)
    model = gated_model(settings, backbone_model.network, layout)
    data = gate_rows.read_data(settings, backbone_model.folder, backbone_model.text)
    _, z = jax.jit(_student, static_argnums=0)(model, frozen, params, data.check[max(data.check)])
    draw_histograms(np.asarray(jax.nn.sigmoid(z)), gate.tau, file.with_suffix(".png"))


def draw_histograms(gates: Float[np.ndarray, "L B K T"], tau: float, path: Path) -> None:
    """The gates of a few held-out rows, one panel a head: layers down, KV heads across; the line is tau."""
    import matplotlib.pyplot as plt

    layers, _, heads, _ = gates.shape
    size = (2.6 * heads + 1, 1.5 * layers + 0.6)
    fig, axes = plt.subplots(layers, heads, figsize=size, squeeze=False, layout="constrained", sharex=True)
    for layer in range(layers):
        for head in range(heads):
            values, ax = gates[layer, :, head].ravel(), axes[layer, head]
            ax.hist(values, bins=50, range=(0, 1), color="0.35", log=True)
            ax.axvline(tau, color="tab:red", lw=1)
            ax.set_title(f"{layer}.{head}: {100 * (values >= tau).mean():.0f} % kept", fontsize=8)
            ax.tick_params(labelsize=7)
    fig.supxlabel("gate", fontsize=8)
    fig.supylabel("tokens (log)", fontsize=8)
    fig.savefig(path, dpi=80)
    plt.close(fig)


def abstract_loss(
    settings: Settings, spec: ModelSpec, layout: mesh.Layout, impl: str
) -> tuple[loop.Loss, Params]:
    """The loss and the gates as shapes alone, for ``train.aot``."""
    model = gated_model(settings, spec, layout, impl)
    frozen = mesh.stacked_shapes(spec, settings.dtype)
    loss = make_loss(model, settings, aot.sharded_shapes(frozen, layout.backbone(frozen)))
    return loss, jax.eval_shape(lambda: initial_gates(settings, spec))


def compile_for(settings: Settings, topology: str) -> int:
    """Compiles the update of the longest batch for a TPU slice and prints what a chip needs; the exit code.

    No weights are read where the config writes its model out.

    Raises:
      ConfigError: see ``train.aot``.
    """
    target, layout = aot.tpu_slice(topology, settings.mesh)
    spec = settings.spec or backbone(settings).spec
    loss, params = abstract_loss(settings, spec, layout, target.impl)
    length = max(settings.data["lengths"])
    rows = max(1, settings.data["tokens"] // length)
    batch = {"tokens": jax.ShapeDtypeStruct((rows, length), "int32", sharding=layout.of(mesh.P(DATA)))}
    adamw = optimizer(settings.rate, settings.plan.steps)
    memory = aot.compiled_step(topology, target, layout, loss, params, adamw, batch)
    data, tensor = settings.mesh
    title = f"{settings.name}: one step of {length} tokens on {topology}, data {data} x tensor {tensor}"
    return aot.report(title, memory)


def main(words: Sequence[str] | None = None) -> int:
    """The command line; its exit code: 0, 2 for bad input."""
    return cli.run(_command, words)


def _command(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.gates", description=__doc__.splitlines()[0])
    parser.add_argument("--strength", default="default", help="which of the config's lambdas")
    parser.add_argument("--compile", metavar="TOPOLOGY", help="compile the step for chips that are not here")
    add_training_options(parser)
    args = parser.parse_args(words)
    settings = read(args.config, args.strength, args.model)
    if args.compile is not None:
        return compile_for(settings, args.compile)
    if args.export is not None:
        export(settings, args.export, args.export_dtype)
    else:
        run(settings)
    return 0


if __name__ == "__main__":
    cli.start(main)
