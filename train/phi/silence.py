"""No φ in the heads that it does not help: after the training, by the error of attention's output.

φ puts mass on every token that is not read, also in a sharp head, which ignores them all. A query head is
silent where its last bias, ``last_q``, is -inf: its features are 0, no token has any mass for it, and its
output is that of the read without φ. Maps of keys and summaries stay, for the other heads of the group.

Which heads these are is seen on sequences of the held-out split that come after those in the traces, so that
neither checks nor studies look at the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kvjax.types import Params
from kvjax.weights import find
from train import trace_rows
from train.config import ConfigError
from train.phi import batches, dropped
from train.phi.objective import Task, errors, view
from train.phi.settings import Settings
from train.traces import describe, trace

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from kvjax.loading import LanguageModel


class Seen(NamedTuple):
    """Mean relative L1 errors of a head's output where ``counts`` tokens of what φ stands for are read.

    Attributes:
      counts: C of them.
      alone: the rest left out.
      completed: φ stands for it.
    """

    counts: tuple[int, ...]
    alone: Float[np.ndarray, "C L N"]
    completed: Float[np.ndarray, "C L N"]


def sequences(settings: Settings, model: LanguageModel) -> Iterator[dict[str, np.ndarray]]:
    """``silence.sequences`` batches of one, traced anew (``batches.assembled``).

    Raises:
      ConfigError: no sequence of the config is as long; see ``train.traces.describe``.
    """
    base, policy, silence = settings.base, settings.policy, settings.silence
    assert silence is not None  # noqa: S101  (the caller has asked)
    if max(base.recording.lengths) < settings.tokens:
        raise ConfigError(
            f"silence: traces.lengths {list(base.recording.lengths)} do not reach {settings.target.reach} "
            f"tokens behind a prompt of {settings.prompt}. Give one of {settings.tokens} or more."
        )
    about, drawn = describe(base, model), trace_rows.sequences(base, model.text)
    learned = None if policy is None else find(policy, model, settings.target.weights or None)
    index = len(about.lengths)
    for _ in tqdm(range(silence.sequences), unit="sequence", mininterval=5):
        while drawn.length(index) < settings.tokens:
            index += 1
        tokens = drawn.draw(index)[1][: settings.tokens]
        gone = None
        if policy is not None and learned is not None:
            gone = dropped.of_prompt(policy, model, learned.weights, tokens[: settings.prompt])
        rng = np.random.default_rng((base.seed, 7, index))
        row = batches.of_sequence(about, settings, trace(model, about, tokens), gone, rng)
        yield {name: value[None] for name, value in row.items()}
        index += 1


def look(settings: Settings, model: LanguageModel, layers: Sequence[Params]) -> Seen:
    """Errors by head over ``sequences``, of maps as they are served."""
    silence, spec = settings.silence, model.spec
    assert silence is not None  # noqa: S101  (the caller has asked)
    counts = tuple(round(share * settings.prompt) for share in silence.retrieved)
    task = Task(loss=settings.loss, target=settings.target, prompt=settings.prompt, softcap=spec.attn_softcap)
    maps = {
        name: jnp.concatenate([layer[name] for layer in layers]) for name in layers[0] if name != "length"
    }

    @jax.jit
    def both(batch: dict[str, Any]) -> jax.Array:
        return jnp.stack(errors(view(task, maps, batch), batch["v"], counts)).mean(axis=(2, 5))

    means = np.mean([np.asarray(both(one), np.float64) for one in sequences(settings, model)], axis=0)
    alone, completed = means.reshape(2, len(counts), spec.num_layers, spec.num_heads)
    return Seen(counts, alone, completed)


def not_helped(seen: Seen) -> Bool[np.ndarray, "L N"]:
    """The heads whose error φ does not lower at every count."""
    return np.asarray(~(seen.completed < seen.alone).all(axis=0))


def silenced(layers: Sequence[Params], silent: Bool[np.ndarray, "L N"]) -> list[Params]:
    """The maps with no feature left to the queries of these heads."""
    return [
        layer | {"last_q": np.where(heads[:, None], -np.inf, np.asarray(layer["last_q"], np.float32))}
        for layer, heads in zip(layers, silent, strict=True)
    ]


def applied(
    settings: Settings, model: LanguageModel, layers: Sequence[Params]
) -> tuple[list[Params], dict[str, Any]]:
    """The maps with φ in no head that it does not help, and what the log says of that."""
    seen = look(settings, model, layers)
    return silenced(layers, not_helped(seen)), record(settings, seen)


def record(settings: Settings, seen: Seen) -> dict[str, Any]:
    """What the log says: the silent heads as [layer, head], means over heads by count, and all errors."""
    silence, silent = settings.silence, not_helped(seen)
    assert silence is not None  # noqa: S101  (the caller has asked)
    kept = np.where(silent, seen.alone, seen.completed)
    means = {"alone": seen.alone, "completed": seen.completed, "silenced": kept}
    by_head = {"alone": seen.alone, "completed": seen.completed}
    return {
        "silent": np.argwhere(silent).tolist(),
        "sequences": silence.sequences,
        "counts": list(seen.counts),
        "mean": {name: x.mean(axis=(1, 2)).round(5).tolist() for name, x in means.items()},
        "by_head": {name: x.round(5).tolist() for name, x in by_head.items()},
    }


def notes(found: dict[str, Any]) -> dict[str, str]:
    """The same for the header of the file of maps."""
    heads = " ".join(f"{layer}.{head}" for layer, head in found["silent"])
    counts = " ".join(map(str, found["counts"]))
    return {"silent": heads or "none", "silent_by": f"{found['sequences']} sequences, {counts} tokens read"}
