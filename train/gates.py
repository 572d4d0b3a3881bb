"""Trains WG-KV's write gates on a frozen model: distillation plus lambda times what the gates keep.

python -m train.gates --config configs/gates/embedded.yaml                    the lambda called default
python -m train.gates --config configs/gates/embedded.yaml --strength NAME    another of the config's lambdas
python -m train.gates --config ... [--strength NAME] --export FILE         its newest checkpoint as a file
python -m train.gates --config ... --compile v5e:2x4                       memory a chip, compiled without one

A run stopped at any step and started again goes on with the losses it would have had. --export writes
FILE.safetensors, the histogram of its gates (.png, needs matplotlib) and the run's log (.jsonl).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax.models.decoder import logits as vocabulary
from kvjax.models.hf import ModelError
from kvjax.models.spec import ModelSpec
from kvjax.policies.wg_kv import WriteGate, gate_logits, initial
from kvjax.sharding.specs import DATA
from kvjax.types import Params
from kvjax.weights import save_weights
from train import distill, gate_card, gate_rows, loop, mesh, plan, recall
from train.gate_settings import ConfigError, Settings, backbone, optimizer, read

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def make_net(
    settings: Settings, spec: ModelSpec, layout: mesh.Layout, impl: str | None = None
) -> distill.Net:
    """The static part of the walk.

    Raises:
      ConfigError: a model whose gates cannot be trained so.
    """
    try:
        distill.check_model(spec, settings.mesh[1])
    except ValueError as reason:
        raise ConfigError(str(reason)) from reason
    gate = settings.gate
    return distill.Net(
        spec=spec, layout=layout, window=gate.window, eps=gate.eps, remat=settings.remat, impl=impl
    )


def first(settings: Settings, spec: ModelSpec) -> Params:
    """Untrained gates, ``{"admission": [a dict a layer]}``."""
    gate, key = settings.gate, jax.random.key(settings.seed)
    layers = initial(key, spec.num_kv_heads, spec.head_dim, gate.hidden, spec.num_layers, norm=gate.norm)
    return {"admission": layers}


def objective(
    net: distill.Net, lam: float, cost: str, frozen: Params, params: Params, batch: dict[str, Any]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Distillation plus lambda times the cost; metrics ``distill``, ``cost`` and ``gate`` (their mean)."""
    goal = distill.teacher(net, frozen, batch["tokens"])
    got, z = _student(net, frozen, params, batch["tokens"])
    apart, price = distill.apart(net, frozen, got, goal), distill.cost(z, net.window, cost)
    return apart + lam * price, {"distill": apart, "cost": price, "gate": jnp.mean(jax.nn.sigmoid(z))}


def _student(
    net: distill.Net, frozen: Params, params: Params, tokens: Array, tau: float | None = None
) -> tuple[Array, Array]:
    """The walk under soft gates, or under gates thresholded at tau; its output and z [L, B, K, T]."""
    gates = distill.stack(params["admission"])
    return distill.walk(net, frozen, gates, tokens, distill.gated_by(net, gate_logits, tau))


def make_loss(net: distill.Net, settings: Settings, frozen: Params) -> loop.Loss:
    """The objective of ``train.loop`` with its frozen weights bound."""
    return jax.tree_util.Partial(functools.partial(objective, net, settings.lam, settings.cost), frozen)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _measure(net: distill.Net, tau: float, frozen: Params, params: Params, tokens: Array) -> dict[str, Array]:
    """Distillation loss under soft and under thresholded gates, and what is kept."""
    goal = distill.teacher(net, frozen, tokens)
    soft, z = _student(net, frozen, params, tokens)
    hard, _ = _student(net, frozen, params, tokens, tau)
    mean, over = distill.kept(z, net.window, tau)
    losses = {"soft": distill.apart(net, frozen, soft, goal), "hard": distill.apart(net, frozen, hard, goal)}
    return losses | {"gate": mean, "kept": over}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _answers(
    net: distill.Net, tau: float, frozen: Params, params: Params, tokens: Array, at: Array
) -> tuple[Array, Array]:
    """What ``recall`` asks of a model: the next token's nll and whether it is the likeliest."""
    x, _ = _student(net, frozen, params, tokens, tau)
    z = vocabulary(net.spec, frozen, x.reshape(-1, x.shape[-1])[at])
    target = tokens.reshape(-1)[at + 1]
    nll = jax.nn.logsumexp(z, axis=-1) - jnp.take_along_axis(z, target[:, None], axis=1)[:, 0]
    return net.layout.mesh.everywhere((nll, z.argmax(-1) == target))  # type: ignore[no-any-return]


def make_check(
    net: distill.Net, settings: Settings, frozen: Params, have: gate_rows.Supply
) -> Callable[[Params, int, int], loop.Verdict]:
    """By length, on rows training does not see: soft and hard loss and what is kept; needles found."""
    tau = settings.gate.tau

    def check(params: Params, step: int, level: int) -> loop.Verdict:
        found: dict[str, float] = {}
        for length, rows in have.check.items():
            size = _divisor(len(rows), max(1, settings.data["tokens"] // length))
            parts = [_measure(net, tau, frozen, params, part) for part in rows.reshape(-1, size, length)]
            found |= {f"{name}_{length}": float(np.mean([p[name] for p in parts])) for name in parts[0]}
        if have.held is not None and net.spec.tied:
            for asked in settings.check.get("needles", ()):
                score = lambda _, gates, tokens, at: _answers(net, tau, frozen, gates, tokens, at)  # noqa: E731
                hits = recall.needle_recall(net.spec, params, have.held, seed=1, score=score, **asked)
                found[f"found_{asked['keys']}_of_{asked['length']}"] = float(hits.mean())
        return loop.Verdict(metrics=found, level=level)

    return check


def _divisor(count: int, most: int) -> int:
    """The largest divisor of ``count`` that is at most ``most``."""
    return next(size for size in range(min(count, most), 0, -1) if count % size == 0)


def run(settings: Settings) -> loop.State:
    """Trains to the end of the plan, or goes on from the newest checkpoint.

    Raises:
      ConfigError, ModelError: see ``train.gate_settings``.
    """
    model = backbone(settings)
    layout = make_layout(settings)
    net = make_net(settings, model.spec, layout)
    frozen = layout.frozen(model.params, settings.dtype)
    have = gate_rows.supply(settings, model.folder)
    gate_rows.remember(settings)
    gates = first(settings, model.spec)
    return loop.train(
        params=layout.put(gates, layout.gates(gates)),
        optimizer=optimizer(settings.rate, settings.plan.steps),
        loss=make_loss(net, settings, frozen),
        batches=lambda level: have.train,
        folder=settings.folder,
        plan=settings.plan,
        check=make_check(net, settings, frozen, have),
        layout=layout,
    )


def abstract(settings: Settings, spec: ModelSpec, layout: mesh.Layout, impl: str) -> tuple[loop.Loss, Params]:
    """The loss and the gates as shapes alone, for ``train.plan``."""
    net = make_net(settings, spec, layout, impl)
    frozen = mesh.stacked_shapes(spec, settings.dtype)
    return make_loss(net, settings, plan.laid(frozen, layout.backbone(frozen))), jax.eval_shape(
        lambda: first(settings, spec)
    )


def make_layout(settings: Settings) -> mesh.Layout:
    """The config's mesh over this machine's devices.

    Raises:
      ConfigError: too few of them.
    """
    try:
        return mesh.layout(*settings.mesh)
    except ValueError as reason:
        raise ConfigError(str(reason)) from reason


def latest(settings: Settings, like: Params, chosen: optax.GradientTransformation) -> tuple[int, Params]:
    """(step, trained leaves) of the folder's newest checkpoint.

    Args:
      settings: whose folder.
      like: leaves as the run began with.
      chosen: the run's optimiser.

    Raises:
      ConfigError: nothing has been trained there.
    """
    found = loop.latest(settings.folder, like, chosen, make_layout(settings))
    if found is None:
        raise ConfigError(
            f"--export finds no checkpoint in {settings.folder}. Train first: the same command without "
            "--export."
        )
    return found


def export(settings: Settings, file: Path) -> None:
    """Writes the newest checkpoint's gates, their histogram and the log beside each other.

    Raises:
      ConfigError: nothing trained.
    """
    model = backbone(settings)
    chosen = optimizer(settings.rate, settings.plan.steps)
    step, params = latest(settings, first(settings, model.spec), chosen)
    gate, layout = settings.gate, make_layout(settings)
    notes: dict[str, Any] = {"lambda": settings.lam, "tau": gate.tau, "window": gate.window}
    notes |= {"seed": settings.seed, "step": step, "strength": settings.strength, "cost": settings.cost}
    notes |= {"text": gate_rows.remembered(settings)}
    save_weights(file, model, WriteGate(window=gate.window), params["admission"], notes=notes)
    shutil.copyfile(settings.folder / "log.jsonl", file.with_suffix(".jsonl"))
    print(f"{file} holds the gates of step {step}")
    if importlib.util.find_spec("matplotlib") is None:
        print("No picture: it needs matplotlib. Install it (pip install 'kvjax[plot]') and export again.")
        return
    frozen = layout.frozen(model.params, settings.dtype)
    net, have = make_net(settings, model.spec, layout), gate_rows.supply(settings, model.folder)
    rows = have.check[max(have.check)]
    _, z = jax.jit(_student, static_argnums=0)(net, frozen, params, rows)
    gate_card.histogram(np.asarray(jax.nn.sigmoid(z)), gate.tau, file.with_suffix(".png"))


def fit(settings: Settings, topology: str) -> int:
    """Compiles the update of the longest batch for a TPU slice and prints what a chip needs.

    No weights are read where the config writes its model out.

    Raises:
      ConfigError: see ``train.plan``.
    """
    target, layout = plan.slice_of(topology, settings.mesh)
    spec = settings.spec or backbone(settings).spec
    loss, params = abstract(settings, spec, layout, target.impl)
    length = max(settings.data["lengths"])
    rows = max(1, settings.data["tokens"] // length)
    batch = {"tokens": jax.ShapeDtypeStruct((rows, length), "int32", sharding=layout.of(mesh.P(DATA)))}
    chosen = optimizer(settings.rate, settings.plan.steps)
    found = plan.compiled(topology, target, layout, loss, params, chosen, batch)
    data, tensor = settings.mesh
    title = f"{settings.name}: one step of {length} tokens on {topology}, data {data} x tensor {tensor}"
    return plan.report(title, found)


def main(words: list[str] | None = None) -> int:
    """The command line; its exit code: 0, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m train.gates", description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--strength", default="default", help="which of the config's lambdas")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the newest checkpoint's gates")
    parser.add_argument("--compile", metavar="TOPOLOGY", help="compile the step for chips that are not here")
    args = parser.parse_args(words)
    try:
        settings = read(args.config, args.strength)
        if args.compile is not None:
            return fit(settings, args.compile)
        if args.export is not None:
            export(settings, args.export)
        else:
            run(settings)
    except (ConfigError, ModelError) as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
