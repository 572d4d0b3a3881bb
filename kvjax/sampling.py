"""Sampling the next token: parameters per row, randomness owned by a request and a position.

The key of a draw is fold_in(fold_in(PRNGKey(seed), request), position): a request gives the same text in
every batch.

Penalties, biases, ``min_p`` and ``min_tokens`` (``Shaping``) are a part of ``Sampling`` only where a row has
one: programs of other batches do not contain them. They come in vLLM's order: stop tokens are held back,
biases added, tokens penalised, then temperature, ``min_p``, ``top_k`` and ``top_p``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.types import EMPTY, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, UInt

Biases = Mapping[int, float]
"""What is added to the logits of single tokens, by id."""


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Shaping:
    """How each row changes its logits before it draws.

    Attributes:
      frequency: taken from the logit of a token for each time it was written; 0 changes nothing.
      presence: taken once from the logit of a token that was written; 0 changes nothing.
      repetition: divides positive and multiplies negative logits of tokens of the prompt and of the answer; 1
        changes nothing (CTRL, Keskar et al. 2019, section 4.1).
      min_p: least probability, as a share of the best token's; 0 is all.
      biased: ids whose logits change, EMPTY-padded.
      bias: what is added to each of these.
      least: tokens that are written before one of ``stops`` may be.
      stops: ids, EMPTY-padded.
      begins: the position of the first new token.
      tokens: ids of prompt and answer by position, EMPTY where there is none yet.
    """

    frequency: Float[Array, " B"]
    presence: Float[Array, " B"]
    repetition: Float[Array, " B"]
    min_p: Float[Array, " B"]
    biased: Int[Array, "B N"]
    bias: Float[Array, "B N"]
    least: Int[Array, " B"]
    stops: Int[Array, "B Z"]
    begins: Int[Array, " B"]
    tokens: Int[Array, "B C"]

    def shaped(self, logits: Float[Array, "B V"], position: Int[Array, " B"]) -> Float[Array, "B V"]:
        """The logits from which the token at ``position`` is drawn."""
        early = (position < self.begins + self.least)[:, None] & (self.stops >= 0)
        logits = logits.at[_cells(logits, early, self.stops)].set(-jnp.inf, mode="drop")
        logits = logits.at[_cells(logits, self.biased >= 0, self.biased)].add(self.bias, mode="drop")
        penalises = jnp.any((self.frequency != 0) | (self.presence != 0) | (self.repetition != 1))
        return jax.lax.cond(penalises, self._penalised, lambda logits: logits, logits)

    def _penalised(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        held = self.tokens >= 0
        new = held & (jnp.arange(self.tokens.shape[1]) >= self.begins[:, None])
        seen = jnp.zeros(logits.shape, bool).at[_cells(logits, held, self.tokens)].set(True, mode="drop")
        times = jnp.zeros_like(logits).at[_cells(logits, new, self.tokens)].add(1, mode="drop")
        by = self.repetition[:, None]
        logits = jnp.where(seen, jnp.where(logits > 0, logits / by, logits * by), logits)
        return logits - self.frequency[:, None] * times - self.presence[:, None] * (times > 0)

    def likely(self, warm: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """-inf where a token is less likely than ``min_p`` of the best; ``warm``: logits by temperature."""
        floor = jnp.max(warm, axis=-1) + jnp.log(self.min_p)
        return jnp.where(warm >= floor[:, None], warm, -jnp.inf)


def _cells(logits: Array, which: Bool[Array, "B N"], ids: Int[Array, "B N"]) -> tuple[Array, Array]:
    """Indices of ``ids`` in logits; outside, where they are dropped, of those that are not meant."""
    return jnp.arange(logits.shape[0])[:, None], jnp.where(which, ids, logits.shape[1])


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How each row draws.

    Attributes:
      temperature: 0 is greedy.
      top_k: draw among the k best; 0 is all.
      top_p: draw among the smallest set of best tokens with at least this probability; 1 is all.
      key: one PRNG key a row.
      shaping: what changes logits before a draw; None where no row changes any.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    key: UInt[Array, "B 2"]
    shaping: Shaping | None = None

    def after(
        self, token: Int[Array, " B"], position: Int[Array, " B"], active: Bool[Array, " B"]
    ) -> Sampling:
        """After the rows that are ``active`` wrote a token at ``position``. Pure."""
        if self.shaping is None:
            return self
        tokens = self.shaping.tokens
        place = jnp.where(active, position, tokens.shape[1])
        tokens = tokens.at[jnp.arange(len(tokens)), place].set(token, mode="drop")
        return dataclasses.replace(self, shaping=dataclasses.replace(self.shaping, tokens=tokens))


def sampling(
    rows: int,
    *,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    frequency_penalty: float | Sequence[float] = 0.0,
    presence_penalty: float | Sequence[float] = 0.0,
    repetition_penalty: float | Sequence[float] = 1.0,
    logit_bias: Biases | Sequence[Biases] | None = None,
    min_tokens: int | Sequence[int] = 0,
    seed: int = 0,
    requests: Sequence[int] | None = None,
    prompts: Sequence[Sequence[int] | np.ndarray] | None = None,
    stops: Sequence[int] = (),
    context: int | None = None,
    most_biases: int | None = None,
    most_stops: int | None = None,
) -> Sampling:
    """Sampling parameters for ``rows`` rows; scalars hold for all of them.

    Args:
      rows: B.
      temperature, top_k, top_p: see ``Sampling``.
      min_p, frequency_penalty, presence_penalty, repetition_penalty: see ``Shaping``.
      logit_bias: what is added to the logits of single tokens, by id.
      min_tokens: new tokens before one of ``stops`` may be drawn.
      seed: of the run.
      requests: a number per row that names its request; by default 0, 1, …
      prompts: token ids of each row; penalties and ``min_tokens`` need them.
      stops: ids that end a row.
      context: positions of a row; by default the longest prompt's and 1,024 more. What is written beyond is
        not penalised.
      most_biases, most_stops: widths of these arrays, so that one program serves all requests; by default as
        many as there are.

    Raises:
      ValueError: a parameter out of range, or penalties without prompts.
    """
    values: dict[str, np.ndarray] = {
        name: np.broadcast_to(np.asarray(value), (rows,))
        for name, value in (
            ("temperature", temperature),
            ("top_k", top_k),
            ("top_p", top_p),
            ("min_p", min_p),
            ("frequency_penalty", frequency_penalty),
            ("presence_penalty", presence_penalty),
            ("repetition_penalty", repetition_penalty),
            ("min_tokens", min_tokens),
        )
    }
    rules = (
        ("temperature", lambda x: x >= 0, "0 (greedy) or more"),
        ("top_k", lambda x: x >= 0, "0 (all) or more"),
        ("top_p", lambda x: (x > 0) & (x <= 1), "in (0, 1]"),
        ("min_p", lambda x: (x >= 0) & (x <= 1), "in [0, 1]"),
        ("frequency_penalty", np.isfinite, "that are finite"),
        ("presence_penalty", np.isfinite, "that are finite"),
        ("repetition_penalty", lambda x: np.isfinite(x) & (x > 0), "above 0 (1 changes nothing)"),
        ("min_tokens", lambda x: x >= 0, "0 or more"),
    )
    for name, legal, rule in rules:
        value = values[name]
        if not np.all(legal(value)):
            raise ValueError(f"sampling({name}={value.tolist()}) is out of range. Give numbers {rule}.")
    same = logit_bias is None or isinstance(logit_bias, Mapping)
    biases: list[Biases] = [logit_bias or {}] * rows if same else [*logit_bias]  # type: ignore[list-item, misc]
    if len(biases) != rows or any(id < 0 or not np.isfinite(x) for row in biases for id, x in row.items()):
        raise ValueError(
            f"sampling(logit_bias={logit_bias}) does not fit. Give finite numbers by token id, for all rows "
            f"or for each of the {rows}."
        )
    penalised = any(values[name].any() for name in ("frequency_penalty", "presence_penalty", "min_tokens"))
    penalised |= bool(np.any(values["repetition_penalty"] != 1))
    if penalised and prompts is None:
        raise ValueError(
            "sampling(...) with penalties or min_tokens lacks prompts. Give sampling(prompts=…)."
        )
    shaping = None
    if penalised or values["min_p"].any() or any(biases):
        prompts = [()] * rows if prompts is None else prompts
        longest = max(map(len, prompts), default=0)
        widths = (most_biases or max(map(len, biases), default=0), most_stops or len(stops))
        shaping = dataclasses.replace(
            no_shaping(rows, context or longest + 1024, *widths),
            frequency=values["frequency_penalty"].astype(np.float32),
            presence=values["presence_penalty"].astype(np.float32),
            repetition=values["repetition_penalty"].astype(np.float32),
            min_p=values["min_p"].astype(np.float32),
            least=values["min_tokens"].astype(np.int32),
            begins=np.asarray([len(prompt) for prompt in prompts], np.int32),
        )
        for row, (prompt, added) in enumerate(zip(prompts, biases)):
            shaping.tokens[row, : len(prompt)] = prompt
            shaping.biased[row, : len(added)], shaping.bias[row, : len(added)] = [*added], [*added.values()]
            shaping.stops[row, : len(stops)] = stops
    names = np.asarray(range(rows) if requests is None else requests, np.int32)
    return Sampling(  # device_put compiles nothing, asarray one program for each
        temperature=jax.device_put(values["temperature"].astype(np.float32)),
        top_k=jax.device_put(values["top_k"].astype(np.int32)),
        top_p=jax.device_put(values["top_p"].astype(np.float32)),
        key=_keys(np.int64(seed), names),
        shaping=jax.device_put(shaping),
    )


def no_shaping(rows: int, context: int, biases: int, stops: int) -> Any:
    """A ``Shaping`` of arrays on the host that changes nothing, for rows beside others that do."""
    zeros = np.zeros(rows, np.float32)
    no_ids: Any = functools.partial(np.full, fill_value=EMPTY, dtype=np.int32)
    return Shaping(
        frequency=zeros,  # type: ignore[arg-type]
        presence=zeros,  # type: ignore[arg-type]
        repetition=np.ones(rows, np.float32),  # type: ignore[arg-type]
        min_p=zeros,  # type: ignore[arg-type]
        biased=no_ids((rows, biases)),
        bias=np.zeros((rows, biases), np.float32),  # type: ignore[arg-type]
        least=np.zeros(rows, np.int32),  # type: ignore[arg-type]
        stops=no_ids((rows, stops)),
        begins=np.zeros(rows, np.int32),  # type: ignore[arg-type]
        tokens=no_ids((rows, context)),
    )


@jax.jit
def _keys(seed: Int[Array, ""], names: Int[Array, " B"]) -> UInt[Array, "B 2"]:
    return jax.vmap(lambda name: jax.random.fold_in(jax.random.PRNGKey(seed), name))(names)


def sample(logits: Float[Array, "B V"], how: Sampling, position: Int[Array, " B"]) -> Int[Array, " B"]:
    """The next token of each row, at ``position``."""
    if how.shaping is not None:
        logits = how.shaping.shaped(logits, position)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Int[Array, " B"]:
        keys = jax.vmap(jax.random.fold_in)(how.key, position)
        warm = logits / jnp.maximum(how.temperature, 1e-6)[:, None]
        warm = warm if how.shaping is None else how.shaping.likely(warm)
        drawn = jax.vmap(jax.random.categorical)(keys, _truncated(warm, how)).astype(jnp.int32)
        return jnp.where(how.temperature > 0, drawn, greedy)

    # A batch that is greedy throughout pays for no sort.
    return jax.lax.cond(jnp.any(how.temperature > 0), draw, lambda: greedy)


def _truncated(logits: Float[Array, "B V"], how: Sampling) -> Float[Array, "B V"]:
    """-inf outside the top-k and the nucleus; ties with the last token kept stay too."""
    vocab = logits.shape[-1]
    best = -jnp.sort(-logits, axis=-1)
    k = jnp.where(how.top_k > 0, jnp.minimum(how.top_k, vocab), vocab)
    p = jax.nn.softmax(best, axis=-1)
    before = jnp.cumsum(p, axis=-1) - p  # probability of everything better
    nucleus = jnp.sum(before < how.top_p[:, None], axis=-1)
    last = jnp.clip(jnp.minimum(k, nucleus), 1, vocab) - 1
    floor = jnp.take_along_axis(best, last[:, None], axis=-1)
    return jnp.where(logits >= floor, logits, -jnp.inf)
