"""What a threshold costs: distillation loss against cache size over lambdas and thresholds of trained gates.

python -m studies.wg_kv --config configs/gates/embedded.yaml --gates kvjax/assets/embedded/weights/write_gate

For every file of write gates in ``--gates`` and every tau: the loss under gates thresholded at tau on
held-out rows of the config's data, and the share of the cache that is held. The first ``--sinks`` tokens pass
whatever their gate, as they do where gates are served. Writes DIR/tau.json and DIR/tau.png (needs
matplotlib).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cli
from kvjax.eval.measure.row import short
from kvjax.eval.report import plotting
from kvjax.loading import LanguageModel
from kvjax.policies.wg_kv import WriteGate, gate_logits
from kvjax.types import Params
from kvjax.weights import WeightsError, load_weights, read_weights
from train import distill, gate_rows, gates
from train.gate_settings import Settings, backbone, read

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

RESULTS = Path("results/wg_kv")
TAUS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)


@functools.partial(jax.jit, static_argnums=0)
def _goal(net: distill.GatedModel, frozen: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    return distill.teacher_states(net, frozen, tokens)


OPEN = 1e4
"""A gate's logit where a token passes whatever the threshold."""


@functools.partial(jax.jit, static_argnums=(0, 1))
def _point(
    net: distill.GatedModel,
    sinks: int,
    frozen: Params,
    layers: Params,
    tokens: Int[Array, "B T"],
    goal: Array,
    tau: Array,
) -> tuple[Array, Array]:
    """(loss under gates thresholded at tau, share of the tokens outside the last window they keep)."""

    def opened(params: Params, k_pre: Array, k: Array) -> Array:
        return gate_logits(params, k_pre, k).at[..., :sinks].set(OPEN)

    x, z = distill.forward(net, frozen, layers, tokens, distill.gated_layer(net, opened, tau))
    return distill.distillation_loss(net, frozen, x, goal), distill.kept_shares(z, net.window, tau)[1]


def measured(
    settings: Settings, model: LanguageModel, folder: Path, rows: Int[np.ndarray, "n T"], sinks: int
) -> list[dict[str, Any]]:
    """One object a file and tau: ``gates``, ``lambda``, ``tau``, ``cache``, ``loss`` and ``losses``.

    ``cache`` is the share of all slots that are held after the row: the last window, and what gates keep
    before it. ``losses`` has one entry a row, ``loss`` is their mean.

    Args:
      settings: of the gates' config.
      model: their frozen model.
      folder: of the gates.
      rows: held-out tokens.
      sinks: first tokens that pass whatever their gate.

    Raises:
      WeightsError: no gates in the folder, or another model's.
    """
    layout = gates.make_layout(settings)
    net, frozen = gates.gated_model(settings, model.spec, layout), layout.frozen(model.params, settings.dtype)
    net = dataclasses.replace(net, sinks=0)  # ``_point`` opens their gates, which then count as kept
    tokens = [jnp.asarray(row)[None] for row in rows]
    goals = [_goal(net, frozen, row) for row in tokens]
    window = min(1.0, net.window / rows.shape[1])
    points = []
    for lam, file in _files(folder):
        layers = distill.stack_layers(load_weights(file, model).layers)
        for tau in TAUS:
            each = [_point(net, sinks, frozen, layers, row, goal, tau) for row, goal in zip(tokens, goals)]
            losses, kept = np.asarray(each, float).T
            point: dict[str, Any] = {"gates": file.stem, "lambda": lam, "tau": tau}
            point |= {"cache": window + (1 - window) * float(kept.mean()), "loss": float(losses.mean())}
            points.append(point | {"losses": losses.tolist()})
    return points


def _files(folder: Path) -> list[tuple[float, Path]]:
    """(lambda, file) of the write gates in a folder, lambda rising."""
    every = [(file, read_weights(file).notes) for file in sorted(folder.glob("*.safetensors"))]
    files = [(float(notes["lambda"]), file) for file, notes in every if notes["method"] == WriteGate.learns]
    if not files:
        raise WeightsError(f"--gates {folder} has no write gates. Train some: python -m train.gates.")
    return sorted(files)


def over_front(points: list[dict[str, Any]], point: dict[str, Any]) -> float | None:
    """The point's loss over that of the best other lambda at the same cache size; below 1 it beats them all.

    Between the thresholds of a lambda log(loss) is linear in the cache size. None where no other lambda has
    thresholds on both sides of that size.
    """
    best = []
    for lam in {p["lambda"] for p in points} - {point["lambda"]}:
        curve = sorted((p["cache"], p["loss"]) for p in points if p["lambda"] == lam)
        sizes, losses = np.asarray(curve).T
        if sizes[0] <= point["cache"] <= sizes[-1]:
            best.append(float(np.exp(np.interp(point["cache"], sizes, np.log(losses)))))
    return point["loss"] / min(best) if best else None


def picture(points: list[dict[str, Any]], marked: float, file: Path) -> Path:
    """Loss over cache size, a curve a lambda, thresholds along it; rings are the threshold ``marked``."""
    plt = plotting.pyplot()
    figure, (axis,) = plotting.panels(plt, 1, 1, (7, 4.2))
    for number, name in enumerate(dict.fromkeys(p["gates"] for p in points)):
        own = [p for p in points if p["gates"] == name]
        x, y = np.asarray([(100 * p["cache"], p["loss"]) for p in own]).T
        label = f"{name} (λ = {own[0]['lambda']:g})"
        axis.plot(x, y, lw=1, ms=5, label=label, **plotting.style(number))
        marked_sizes = [px for p, px in zip(own, x) if p["tau"] == marked]
        at, side = ((7, 5), "left") if number % 2 else ((-7, -11), "right")
        how: dict[str, Any] = {"textcoords": "offset points", "ha": side, "fontsize": 7}
        for p, px, py in zip(own, x, y):
            crowded = p["tau"] != marked and any(abs(px - other) < 1.5 for other in marked_sizes)
            axis.annotate("" if crowded else f"{p['tau']:g}", (px, py), at, **how)
    ringed = np.asarray([(100 * p["cache"], p["loss"]) for p in points if p["tau"] == marked])
    if ringed.size:
        style: dict[str, Any] = {"s": 130, "facecolors": "none", "edgecolors": "k", "lw": 1.2}
        axis.scatter(*ringed.T, label=f"τ = {marked:g}, as shipped", **style)
    axis.set_yscale("log")
    axis.set_xlabel("slots held after the row, % of the full cache", fontsize=9)
    axis.set_ylabel("distillation loss (held-out rows)", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=8, frameon=False)
    return plotting.saved(plt, figure, file)


def run(settings: Settings, folder: Path, out: Path, length: int, rows: int, sinks: int) -> None:
    """Measures, prints a line a point and writes both files.

    Raises:
      ConfigError, WeightsError, EvalError: a config, gates or an installation that cannot be used.
    """
    model = backbone(settings)
    check = settings.check | {"lengths": [length], "rows": rows}
    data = gate_rows.read_data(dataclasses.replace(settings, check=check), model.folder, model.text)
    held = data.check[length]
    points = measured(settings, model, folder, held, sinks)
    for point in points:
        point["over_front"] = over_front(points, point)
        against = "–" if point["over_front"] is None else f"{point['over_front']:.2f}"
        name = f"{point['gates']:<14} tau {point['tau']:<5g}"
        print(f"{name} cache {100 * point['cache']:5.1f} %  loss {point['loss']:.4f}  over front {against}")
    out.mkdir(parents=True, exist_ok=True)
    facts = {"length": length, "rows": rows, "window": settings.gate.window, "sinks": sinks, "points": points}
    (out / "tau.json").write_text(json.dumps(short(facts), indent=1) + "\n", encoding="utf-8")
    picture(points, settings.gate.tau, out / "tau.png")


def main(words: Sequence[str] | None = None) -> int:
    """Runs the sweep; the exit code."""
    return cli.run(_sweep, words)


def _sweep(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.wg_kv", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--gates", type=Path, required=True, metavar="DIR", help="one file of gates a lambda")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help=f"default: {RESULTS}")
    parser.add_argument("--length", type=cli.whole(1), default=1024, help="tokens (default: 1024)")
    parser.add_argument("--rows", type=cli.whole(1), default=12, help="held-out rows (default: 12)")
    parser.add_argument("--sinks", type=cli.whole(0), default=4, help="tokens (default: 4)")
    args = parser.parse_args(words)
    run(read(args.config), args.gates, args.out, args.length, args.rows, args.sinks)
