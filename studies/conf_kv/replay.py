"""CONF-KV with its numbers given at run time: one program for sweeps, and for schedules played again.

``Blend`` ranks as ``conf_kv`` does, or by chance; ``Scheduled`` takes each step's target from outside. Both
are for measuring only and have no word in the one-string form. With the defaults of a rule a walk is that of
``conf_kv + confidence`` (a test holds it to that).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode
from kvjax.algebra import Budget, Frame, Policy
from kvjax.budgets.confidence import Confidence
from kvjax.cache.pages import Slots
from kvjax.cache.state import KVState
from kvjax.eval.measure import forced
from kvjax.eval.tasks.sample import Samples
from kvjax.policies.conf_kv import ConfKV
from kvjax.types import Network, Params, Weighted, pytree
from studies.conf_kv.premise import PARTS

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


MASS, AGE = ConfKV(alpha=1.0), ConfKV(alpha=0.0)
"""The two halves of the score."""


@dataclasses.dataclass(frozen=True, repr=False)
class Blend(ConfKV):
    """``conf_kv``, but alpha is read at run time, and ``noise`` ranks by chance instead.

    Learned weights of a layer: ``alpha``; ``noise``, 0 or 1; ``seed`` of the draws, another one each layer.
    """

    name = "blend"
    learns = "blend"

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        """The mix, or a draw that depends on seed and position alone."""
        assert params is not None  # noqa: S101
        mixed = params["alpha"] * MASS.score(None, slots) + (1 - params["alpha"]) * AGE.score(None, slots)
        return jnp.where(params["noise"] > 0, drawn(params["seed"], slots.pos), mixed)


def drawn(seed: Int[Array, ""], pos: Int[Array, "*S"]) -> Float[Array, "*S"]:
    """Uniform in [0, 1): an integer hash (two rounds of multiply and xor-shift)."""
    x = pos.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + jnp.uint32(0x85EBCA6B) * seed.astype(jnp.uint32)
    for _ in range(2):
        x = (x ^ (x >> 16)) * jnp.uint32(0x045D9F3B)
    return ((x ^ (x >> 16)) >> 8).astype(jnp.float32) / 2**24


@dataclasses.dataclass(frozen=True, repr=False)
class Scheduled(Budget):
    """Targets from outside: ``state.confidence`` holds the slots a stream may have at the next step.

    Attributes:
      prompt: slots after the prompt, and while tokens are given.
      top: the largest target ever given.
    """

    name = "scheduled"
    needs_logits = True
    when = "every_step"
    prompt: int = 128
    top: int = 128

    @property
    def most(self) -> int | None:
        """``top``."""
        return max(self.top, self.prompt)

    def confidence(self, logits: Float[Array, "B V"]) -> Float[Array, " B"]:
        """Nothing: the target of the next step is put there from outside."""
        return jnp.full(logits.shape[0], self.prompt, jnp.float32)

    def targets(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B K"]:
        """The same for all layers and heads."""
        del scores
        given = jnp.full(length.shape, self.prompt) if frame.confidence is None else frame.confidence
        return given.astype(jnp.int32)[:, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """The numbers of CONF-KV that one program takes.

    Attributes:
      tight, loose, threshold, weights: as in ``confidence``; weights are (wh, wm, wp).
      alpha: as in ``conf_kv``.
      random: None, or the seed of a ranking by chance.
    """

    tight: int
    loose: int
    threshold: float = 0.7
    weights: tuple[float, float, float] = (0.4, 0.3, 0.3)
    alpha: float = ConfKV.alpha
    random: int | None = None

    def ranking(self, layers: int) -> Params:
        """Weights of ``Blend``."""
        alpha, noise = jnp.asarray(self.alpha, jnp.float32), jnp.asarray(self.random is not None, jnp.int32)
        seeds = [(self.random or 0) * layers + layer for layer in range(layers)]
        return {"eviction": [{"alpha": alpha, "noise": noise, "seed": jnp.asarray(s)} for s in seeds]}


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """A walk, step by step; beyond a row's count, anything.

    Attributes:
      nll: of each target, nats.
      sure: the confidence that decided the step.
      target: slots a stream might have.
      live: slots that hold a token after the step, mean over layers and KV heads.
    """

    nll: Float[Array, "B T"]
    sure: Float[Array, "B T"]
    target: Float[Array, "B T"]
    live: Float[Array, "B T"]


@functools.partial(jax.jit, static_argnames="network")
def _play(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    rule: Float[Array, " 6"],
    schedule: Float[Array, "B T"],
    again: Bool[Array, ""],
    state: KVState,
    logits: Float[Array, "B V"],
    feed: Int[Array, "B T"],
    target: Int[Array, "B T"],
    count: Int[Array, " B"],
) -> Played:
    parts = [Confidence(wh=h, wm=m, wp=p) for h, m, p in PARTS.values()]
    threshold, tight, loose = rule[3:]

    def ready(i: Int[Array, ""], logits: Float[Array, "B V"]) -> _Rows:
        """What step i feeds and decides, by the logits before it."""
        sure = sum(w * part.confidence(logits) for w, part in zip(rule[:3], parts))
        slots = jnp.where(again, schedule[:, i], jnp.where(sure >= threshold, tight, loose))
        return _Rows(i=i, sure=sure, slots=slots, active=i < count)

    def step(state: KVState, rows: _Rows) -> tuple[KVState, Array]:
        state = dataclasses.replace(state, confidence=rows.slots)
        return decode.step(network, policy, params, weights, state, feed[:, rows.i], rows.active)

    def advance(rows: _Rows, logits: Array, state: KVState) -> tuple[_Rows, Played]:
        nll, live = forced.nats(logits, target[:, rows.i]), forced.mean_live(state)
        return ready(rows.i + 1, logits), Played(nll=nll, sure=rows.sure, target=rows.slots, live=live)

    zeros = jnp.zeros(feed.shape, jnp.float32)
    record = Played(nll=zeros, sure=zeros, target=zeros, live=zeros)
    rows = ready(jnp.asarray(0), logits)
    return decode.decode_loop(step, advance, state, rows, record, feed.shape[1])[2]


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows that are fed: the step, its confidence, slots a head may have, rows that have a token left."""

    i: Int[Array, ""]
    sure: Float[Array, " B"]
    slots: Float[Array, " B"]
    active: Bool[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Windows of text, ready to be walked again and again.

    Attributes:
      model: on what.
      policy: ``Blend`` and ``Scheduled``.
      samples: the windows.
      context: their size class.
    """

    model: Weighted
    policy: Policy
    samples: Samples
    context: int

    @classmethod
    def of(
        cls,
        model: Weighted,
        samples: Samples,
        *,
        length: int,
        loose: int,
        recent: int,
        gamma: float = ConfKV.gamma,
    ) -> Stage:
        """A stage for one ``loose``, ``recent`` and gamma; other numbers are a rule's."""
        budget = Scheduled(prompt=loose, top=loose)
        policy = Policy(eviction=Blend(gamma=gamma, recent=recent), budget=budget)
        return cls(model, policy, samples, decode.bucket(length, model.network.max_positions))

    def play(self, rule: Rule, schedule: np.ndarray | None = None) -> list[dict[str, np.ndarray]]:
        """Walks every window through the cache, one dict of ``Played``'s arrays a window, cut to its steps.

        Args:
          rule: numbers.
          schedule: [B, T] targets to use instead of the rule's own.
        """
        network = self.model.network
        weights = rule.ranking(network.num_layers)
        heads = [e.context[:-1] for _, e in self.samples]
        answers = [e.answer for _, e in self.samples]
        feed = [[e.context[-1], *e.answer[:-1]] for _, e in self.samples]
        state, logits = decode.prefill(self.model, self.policy, heads, context=self.context, weights=weights)
        state = decode.roomy(self.policy, state, 1)
        width = forced.size_class(max(map(len, answers)))
        told = np.zeros((len(answers), width), np.float32)
        if schedule is not None:
            told[:, : schedule.shape[1]] = schedule
        found = _play(
            network,
            self.policy,
            self.model.params,
            weights,
            jnp.asarray([*rule.weights, rule.threshold, rule.tight, rule.loose], jnp.float32),
            told,
            np.asarray(schedule is not None),
            state,
            logits,
            decode.padded(feed, width),
            decode.padded(answers, width),
            np.asarray([len(a) for a in answers], np.int32),
        )
        arrays = {f.name: np.asarray(getattr(found, f.name)) for f in dataclasses.fields(Played)}
        return [{n: x[i, : len(a)] for n, x in arrays.items()} for i, a in enumerate(answers)]
