"""Silences φ, after training, in the heads whose contribution to the model it does not improve.

φ gives mass to every token that is not read, also in a sharp head, which ignores them all. A query head is
silenced by setting its last bias, ``last_q``, to -inf: its features become 0, and its output is that of a
read without φ. The maps of keys stay, for the other heads of the group.

A head is judged by its error after the output projection W_o: the relative error of a head with a large
output may be small and still harm. It is judged on rows that end in a question and its answer, apart in the
haystack and at the answer, by the mean and by the worst row: what harms few rows harms those. Samples of
evaluation tasks can decide, too, of a seed that nothing is reported on, summarised and asked as they are when
served: φ harms the embedded model's head 1.5 on the chains of vt, and on none of the rows.

The heads are chosen on held-out sequences that come after those of the traces, so that neither checks nor
studies read the same ones.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kvjax.eval import tasks
from kvjax.eval.errors import EvalError
from kvjax.eval.measure import runner
from kvjax.eval.tasks.data import find as find_data
from kvjax.eval.tasks.sample import Encoded, Samples
from kvjax.types import Params
from kvjax.weights import find
from train import trace_rows
from train.config import ConfigError
from train.phi import batches, dropped
from train.phi.objective import Task, outputs, projected, projection, scored
from train.phi.settings import Settings
from train.trace_file import Manifest
from train.traces import describe, trace

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from kvjax.loading import LanguageModel


PLACES = ("haystack", "answer")
ANSWER = 24
"""Tokens at the end of a row that are its answer and the end of its question."""


SEED = 9
"""Of samples."""


class HeadErrors(NamedTuple):
    """L2 errors of each head after W_o, mean of queries; ``counts`` tokens of the summary are read exactly.

    Attributes:
      counts: C numbers of tokens.
      alone: without the rest of the summary, by place (``PLACES``) and row.
      completed: with φ in its place.
    """

    counts: tuple[int, ...]
    alone: Float[np.ndarray, "C P R L N"]
    completed: Float[np.ndarray, "C P R L N"]


def sequences(settings: Settings, model: LanguageModel) -> Iterator[dict[str, np.ndarray]]:
    """Newly traced batches of one row (``batches.assembled``): ``silence.sequences`` of them, then samples.

    Every token behind the prompt of a row is a query. ``places`` [1, P, Q] says which queries are at which
    place; those of a sample are at both.

    Raises:
      ConfigError: no sequence of the config is long enough; see ``train.traces.describe``.
    """
    base, policy, silence = settings.base, settings.policy, settings.silence
    assert silence is not None  # the caller has checked
    if max(base.recording.lengths) < settings.tokens:
        raise ConfigError(
            f"silence: traces.lengths {list(base.recording.lengths)} do not reach {settings.target.reach} "
            f"tokens behind a prompt of {settings.prompt}. Give one of {settings.tokens} or more."
        )
    manifest = describe(base, model)
    whole = dataclasses.replace(base.recording, lengths=(settings.tokens,), shares=(1.0,))
    drawn = trace_rows.sequences(dataclasses.replace(base, recording=whole), model.text)
    every = dataclasses.replace(settings.target, queries=settings.target.reach)
    settings = dataclasses.replace(settings, target=every)
    learned = None if policy is None else find(policy, model, settings.target.weights or None)
    first = len(manifest.lengths)
    for index in tqdm(range(first, first + silence.sequences), unit="sequence", mininterval=5):
        tokens, lost = drawn.draw(index)[1], None
        if policy is not None and learned is not None:
            lost = dropped.of_prompt(policy, model, learned.weights, tokens[: settings.prompt])
        rng = np.random.default_rng((base.seed, 7, index))
        row = batches.of_sequence(manifest, settings, trace(model, manifest, tokens), lost, rng)
        late = row["at"] >= settings.tokens - min(ANSWER, settings.target.reach // 2)
        yield {name: value[None] for name, value in (row | {"places": np.stack([~late, late])}).items()}
    for sample in samples(settings, model):
        yield {name: value[None] for name, value in _served(settings, model, manifest, sample).items()}


def samples(settings: Settings, model: LanguageModel) -> list[Encoded]:
    """The samples of ``silence.tasks`` that fit into the prompt, as long as it, as evaluations have them."""
    silence = settings.silence
    assert silence is not None  # the caller has checked
    drawn: Samples = []
    for name in silence.tasks:
        task, count = tasks.tasks()[name], max(1, silence.sequences // 4)
        try:
            drawn += runner.draw(task, model, find_data(), length=settings.prompt, seed=SEED, count=count)
        except EvalError as error:  # maps for short prompts
            print(f"note: samples of {name} do not decide: {error}", file=sys.stderr)
    return [encoded for _, encoded in drawn]


def _served(
    settings: Settings, model: LanguageModel, manifest: Manifest, sample: Encoded
) -> dict[str, np.ndarray]:
    """The batch's part of a sample: its context's middle is summarised, and what writes the answer asks."""
    asked = [*sample.context, *sample.question, *sample.prefix]
    tokens = np.zeros(settings.tokens, np.int32)
    ids = [*asked, *sample.answer][: settings.tokens]
    tokens[: len(ids)] = ids
    seen = trace(model, manifest, tokens)
    at = np.resize(np.arange(len(asked) - 1, len(ids) - 1), settings.target.queries)
    heads, groups = manifest.layers * manifest.kv_heads, manifest.heads // manifest.kv_heads
    place = np.arange(settings.tokens)
    middle = (place >= settings.target.sinks) & (place < len(sample.context) - settings.target.tail)
    chosen = seen["q"][:, :, np.searchsorted(seen["at"], at)]
    row: dict[str, np.ndarray] = {
        name: seen[name].reshape(heads, -1, manifest.head_dim) for name in ("k", "v")
    }
    row |= {"q": chosen.reshape(heads, groups, len(at), -1), "at": at.astype(np.int32)}
    row |= {"dropped": np.broadcast_to(middle, (heads, settings.tokens))}
    return row | {"places": np.ones((len(PLACES), len(at)), bool)}


def head_errors(settings: Settings, model: LanguageModel, layers: Sequence[Params]) -> HeadErrors:
    """Errors by head over ``sequences``, of maps in the form that is served."""
    silence, spec = settings.silence, model.spec
    assert silence is not None  # the caller has checked
    counts = tuple(round(share * settings.prompt) for share in silence.retrieved)
    task = Task(loss=settings.loss, target=settings.target, prompt=settings.prompt, softcap=spec.attn_softcap)
    maps = {
        name: jnp.concatenate([layer[name] for layer in layers]) for name in layers[0] if name != "length"
    }
    wo = projection(model.params["layers"], spec.num_kv_heads)

    @jax.jit
    def both(batch: dict[str, Any], wo: jax.Array) -> jax.Array:
        out = outputs(scored(task, maps, batch), batch["v"], counts)
        error = jnp.stack([projected(x, wo)[:, 0] for x in (out.alone, out.completed)])  # [2, C, A, G, Q]
        return jnp.stack([error.mean(axis=-1, where=place) for place in batch["places"][0]], axis=2)

    rows = [np.asarray(both(batch, wo), np.float64) for batch in sequences(settings, model)]
    every = np.stack(rows, axis=3)  # [2, C, P, R, A, G]
    alone, completed = every.reshape(*every.shape[:4], spec.num_layers, spec.num_heads)
    return HeadErrors(counts, alone, completed)


def not_helped(measured: HeadErrors) -> Bool[np.ndarray, "L N"]:
    """The heads whose mean error φ does not lower, or whose worst row it harms, at any count or place."""
    lower = measured.completed.mean(axis=2) < measured.alone.mean(axis=2)
    worst = measured.completed.max(axis=2) <= measured.alone.max(axis=2)
    return np.asarray(~(lower & worst).all(axis=(0, 1)))


def silenced(layers: Sequence[Params], silent: Bool[np.ndarray, "L N"]) -> list[Params]:
    """The maps with these query heads silenced."""
    return [
        layer | {"last_q": np.where(heads[:, None], -np.inf, np.asarray(layer["last_q"], np.float32))}
        for layer, heads in zip(layers, silent, strict=True)
    ]


def applied(
    settings: Settings, model: LanguageModel, layers: Sequence[Params]
) -> tuple[list[Params], dict[str, Any]]:
    """The maps without φ in the heads that it does not help, and the record for the log."""
    measured = head_errors(settings, model, layers)
    return silenced(layers, not_helped(measured)), record(settings, measured)


def record(settings: Settings, measured: HeadErrors) -> dict[str, Any]:
    """The silent heads as [layer, head]; errors of all heads (root of summed squares), and by head."""
    silence, silent = settings.silence, not_helped(measured)
    assert silence is not None  # the caller has checked
    every = {"alone": measured.alone, "completed": measured.completed}
    means = every | {"silenced": np.where(silent, measured.alone, measured.completed)}
    by_head = {name: x.mean(axis=2) for name, x in every.items()}
    by_head |= {f"{name}_worst": x.max(axis=2) for name, x in every.items()}
    return {
        "silent": np.argwhere(silent).tolist(),
        "sequences": silence.sequences,
        "counts": list(measured.counts),
        "places": list(PLACES),
        "after_wo": {
            name: np.sqrt((x.mean(axis=2) ** 2).sum(axis=(2, 3))).round(5).tolist()
            for name, x in means.items()
        },
        "by_head": {name: x.round(5).tolist() for name, x in by_head.items()},
    }


def notes(record: dict[str, Any]) -> dict[str, str]:
    """The record as notes in the header of the file of maps."""
    heads = " ".join(f"{layer}.{head}" for layer, head in record["silent"])
    counts = " ".join(map(str, record["counts"]))
    return {"silent": heads or "none", "silent_by": f"{record['sequences']} sequences, {counts} tokens read"}
