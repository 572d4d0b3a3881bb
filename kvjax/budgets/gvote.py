"""GVote: counts how many tokens of a prompt future queries will need.

Tang et al., GVote: Adaptive Per-Request KV-Cache Compression without Manually Setting Budget, sections 3.2,
3.3 and algorithm 1, https://arxiv.org/abs/2509.03136
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.algebra import FIRST, Argument, Budget, Frame, Number, Observation, PolicyError, Whole
from kvjax.budgets import amount as amounts
from kvjax.types import Project

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

EXACT = jax.lax.Precision.HIGHEST
ENDLESS = "inf"
"""``samples`` for the closed form in place of draws."""

Scores = Callable[["Float[Array, 'B N H']"], "Float[Array, 'B K G T']"]


@dataclasses.dataclass(frozen=True)
class Voters(Whole):
    """A number of voters, or ``inf``."""

    least: int = 1
    what: str = "number of voters"

    def accepts(self, value: Any) -> bool:
        return value == ENDLESS or super().accepts(value)

    @property
    def expected(self) -> str:
        return f"{super().expected}, or {ENDLESS}"


@dataclasses.dataclass(frozen=True)
class Whose(Argument):
    """Whose attention ``p`` is a share of."""

    what: str = "attention"

    def accepts(self, value: Any) -> bool:
        return value in ("last", "expected")

    @property
    def expected(self) -> str:
        return "last or expected"


@dataclasses.dataclass(frozen=True, repr=False)
class Ballot:
    """How a prompt votes: shared by the budget and the eviction called ``gvote``.

    With ``samples=inf`` nobody draws. Queries are a Gaussian, the image of the hidden states' Gaussian (taken
    at its mean where the model's projection is not linear); a key's weight is E exp(q k / sqrt(H)) in closed
    form. That is the limit of the voters' mean exponentials, and not of their votes: infinitely many voters
    would name every token. Each query head names its b heaviest keys. The eviction keeps the ``sinks`` before
    all others and ranks those by their shares of the weight behind the sinks, mean over a group's heads: with
    the sinks in the shares a head that mostly looks at them would have no say. The closed form leaves out the
    model's bound on scores (``softcap``).

    Attributes:
      p: each voter votes for as many keys as the last real query needs to hold this share of its attention.
      samples: number of voters (S), hidden states drawn from the prompt's Gaussian; or ``inf``.
      ahead: positions after the prompt over which the model's rotation is averaged (n_f). The paper gives no
        number; 64 is our choice (``python -m studies.gvote --study ahead``).
      seed: of the draws, combined with the request's own.
      queries: real queries at the prompt's end; their numbers of keys are averaged, and rounded up. The paper
        takes the last one.
      nucleus: whose attention ``p`` is a share of: the ``last`` real queries', or with ``samples=inf`` the
        ``expected`` one behind the sinks.
      sinks: first tokens, with ``samples=inf`` only; see above.

    Raises:
      PolicyError: ``nucleus=expected`` with drawn voters, or with several queries.
    """

    arguments: ClassVar[Mapping[str, Argument]] = {
        "p": Number(0, 1, "share of attention", open="low"),
        "samples": Voters(most=4096),
        "ahead": Whole(1, "number of positions", 4096, by_positions=True),
        "seed": Whole(0, "seed", 2**32 - 1),
        "queries": Whole(1, "number of queries", 4096, by_positions=True),
        "nucleus": Whose(),
        "sinks": Whole(),
    }
    traced: ClassVar[tuple[str, ...]] = ("p", "seed", "sinks")
    sizes: ClassVar[tuple[str, ...]] = ("p", "samples")
    needs: ClassVar[frozenset[str]] = frozenset({"k", "q", "q_last", "hidden"})
    name: ClassVar[str] = "gvote"
    p: float = 0.95
    samples: int | str = 8
    ahead: int = 64
    seed: int = 0
    queries: int = 1
    nucleus: str = "last"
    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # that of Part
        if self.nucleus == "expected" and self.samples != ENDLESS:
            raise PolicyError(
                f"{self!r}: nucleus=expected takes the expected attention, and drawn voters have none. Write "
                "samples=inf, or leave nucleus out."
            )
        if self.nucleus == "expected" and self.queries > 1:
            raise PolicyError(
                f"{self!r}: nucleus=expected looks at no real query, so queries={self.queries} says nothing. "
                "Leave one of them out."
            )

    def leaves(self) -> dict[str, Any]:
        return {"p": float(self.p), "seed": np.uint32(self.seed), "sinks": self.sinks}

    def votes(self, observed: Observation) -> tuple[Int[Array, "B K T"], Float[Array, "B K T"]]:
        """``poll``, computed once for eviction and budget, which have the same arguments."""
        return observed.once(self.name, functools.partial(self.poll, observed))

    def poll(self, observed: Observation) -> tuple[Int[Array, "B K T"], Float[Array, "B K T"]]:
        """Votes for each token by voters and query heads of a group, and the score that ranks it.

        Only tokens that may stay (``observed.admitted``) are counted, attended to and voted for.
        """
        k, admitted = observed.k, observed.admitted
        assert admitted is not None
        rows, heads, length, h = k.shape
        k = jnp.where(admitted[..., None], k.astype(jnp.float32), 0.0)
        seen = admitted[:, :, None, :]

        def scores(q: Float[Array, "B N H"]) -> Float[Array, "B K G T"]:
            q = q.astype(jnp.float32).reshape(rows, heads, -1, h)
            s = jnp.einsum("bkgh,bkth->bkgt", q, k, precision=EXACT) * h**-0.5
            s = s if observed.softcap is None else observed.softcap * jnp.tanh(s / observed.softcap)
            return jnp.where(seen, s, -jnp.inf)

        if self.samples == ENDLESS:
            weight = jnp.where(seen, log_expectation(k, *self.expected_queries(observed)), -jnp.inf)
            first = (observed.pos < self.sinks)[:, None, :]
            behind = jnp.where(first[:, :, None], -jnp.inf, weight)
            if self.nucleus == "expected":
                named = best(behind, nucleus(behind, self.p))
            else:
                named = best(weight, self._count(observed, scores))
            # Logarithms: shares far below the best key's would all be 0 in float32.
            share = behind - jax.nn.logsumexp(behind, axis=-1, keepdims=True)
            score = jnp.where(first, FIRST, jax.nn.logsumexp(share, axis=2) - math.log(share.shape[2]))
            return named.sum(axis=2), jnp.where(admitted, score, -jnp.inf)
        count, sinks = self._count(observed, scores), _of_groups(observed, heads)

        def vote(
            carry: tuple[Array, Array], q: Float[Array, "B N H"]
        ) -> tuple[tuple[Array, Array], None]:  # one voter at a time, so that N * T numbers are in memory
            s, (votes, share) = scores(q), carry
            return (votes + best(s, count).sum(axis=2), share + shares(s, sinks).mean(axis=2)), None

        zeros = jnp.zeros((rows, heads, length), jnp.int32), jnp.zeros((rows, heads, length), jnp.float32)
        votes, share = jax.lax.scan(vote, zeros, self.voters(observed))[0]
        share = jnp.where(admitted, share / int(self.samples), 0.0)
        return votes, votes + jnp.minimum(share, 0.999)

    def _count(self, observed: Observation, scores: Scores) -> Int[Array, "B K G"]:
        """b: keys that hold ``p`` of a real query's attention, mean over the last ``queries``."""
        sinks = _of_groups(observed, observed.k.shape[1])
        if self.queries == 1:
            return nucleus(scores(observed.q_last), self.p, sinks)
        at = jnp.arange(observed.k.shape[2])

        def of_query(back: Int[Array, ""]) -> Int[Array, "B K G"]:
            own = (observed.total - 1 - back)[:, None, None, None]
            q = jnp.take_along_axis(observed.q, jnp.maximum(own, 0), axis=2)[:, :, 0]
            s = jnp.where(at <= own, scores(q), -jnp.inf)
            return jnp.where(own[..., 0] >= 0, nucleus(s, self.p, sinks), 0)

        queries = jnp.arange(min(self.queries, observed.k.shape[2]))  # no row has more
        total = jax.lax.map(of_query, queries).sum(axis=0)
        return -(-total // jnp.minimum(observed.total, self.queries)[:, None, None])

    def voters(self, observed: Observation) -> Float[Array, "S B N H"]:
        """Queries of hidden states drawn from each row's Gaussian, rotated by the mean rotation ahead."""
        mean, spread = self._gaussian(observed)
        drawn = mean[:, None] + spread[:, None] * self._noise(observed, mean.shape[-1])
        q = self._projection(observed)(drawn).astype(jnp.float32)
        turn = observed.rotation_ahead(self.ahead, q.shape[-1])
        q = q if turn is None else jnp.einsum("bsnh,bhi->bsni", q, turn, precision=EXACT)
        return jnp.swapaxes(q, 0, 1)

    def expected_queries(
        self, observed: Observation
    ) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"]]:
        """Mean and covariance of the queries that ``voters`` draws; its projection is taken at the mean."""
        project = self._projection(observed)

        def of_row(gaussian: tuple[Array, Array]) -> tuple[Array, Array]:
            mean, spread = gaussian
            q, along = jax.linearize(lambda x: project(x[None, None])[0, 0].astype(jnp.float32), mean)
            moved = jax.vmap(along)(jnp.diag(spread))  # [D, N, H]
            return q, jnp.einsum("dnh,dni->nhi", moved, moved, precision=EXACT)

        mean, spread = jax.lax.map(of_row, self._gaussian(observed))
        turn = observed.rotation_ahead(self.ahead, mean.shape[-1])
        if turn is None:
            return mean, spread
        mean = jnp.einsum("bnh,bhi->bni", mean, turn, precision=EXACT)
        return mean, jnp.einsum("bnhg,bhi,bgj->bnij", spread, turn, turn, precision=EXACT)

    def _gaussian(self, observed: Observation) -> tuple[Float[Array, "B D"], Float[Array, "B D"]]:
        """Mean and standard deviation of each channel of a row's hidden states."""
        real = (observed.pos >= 0)[..., None]
        count = jnp.maximum(real.sum(axis=1), 1)
        hidden = jnp.where(real, observed.hidden.astype(jnp.float32), 0.0)
        mean = hidden.sum(axis=1) / count
        spread = jnp.sqrt((jnp.where(real, hidden - mean[:, None], 0.0) ** 2).sum(axis=1) / count)
        return mean, spread

    def _noise(self, observed: Observation, width: int) -> Float[Array, "B S D"]:
        """Draws that depend only on the seed, the request's seed, the layer and the voter."""
        assert observed.seeds is not None

        def row(request: Array) -> Float[Array, "S D"]:
            key = jax.random.fold_in(jax.random.PRNGKey(self.seed), request)
            key = jax.random.fold_in(key, observed.layer)
            voter = jax.vmap(lambda s: jax.random.normal(jax.random.fold_in(key, s), (width,)))
            return voter(jnp.arange(int(self.samples)))

        return jax.vmap(row)(observed.seeds)

    def _projection(self, observed: Observation) -> Project:
        if observed.project is None:
            raise PolicyError(
                f"{self!r} projects hidden states to queries, but this model has no query projection "
                "(Heads.project). Add one to the model, or use a policy without votes, such as snapkv."
            )
        return observed.project


def log_expectation(
    k: Float[Array, "B K T H"], mean: Float[Array, "B N H"], spread: Float[Array, "B N H H"]
) -> Float[Array, "B K G T"]:
    """log E exp(q k / sqrt(H)) of every key under its group's Gaussians."""
    rows, heads, _, h = k.shape

    def of_head(
        gaussian: tuple[Array, Array],
    ) -> Float[Array, "B K T"]:  # T * H numbers in memory, not G * T * H
        mean, spread = gaussian
        linear = jnp.einsum("bkh,bkth->bkt", mean, k, precision=EXACT)
        half = jnp.einsum("bkhi,bkti->bkth", spread, k, precision=EXACT)
        return linear * h**-0.5 + (half * k).sum(axis=-1) / (2 * h)

    of_group = [jnp.moveaxis(x.reshape(rows, heads, -1, *x.shape[2:]), 2, 0) for x in (mean, spread)]
    return jnp.moveaxis(jax.lax.map(of_head, (of_group[0], of_group[1])), 0, 2)


def _of_groups(observed: Observation, kv_heads: int) -> Float[Array, "K G"] | None:
    """The logits of the heads' attention sinks."""
    return None if observed.sinks is None else observed.sinks.astype(jnp.float32).reshape(kv_heads, -1)


def shares(s: Float[Array, "*B T"], sinks: Float[Array, ...] | None = None) -> Float[Array, "*B T"]:
    """Each key's share of the attention, of which an attention sink takes its own."""
    if sinks is None:
        return jax.nn.softmax(s, axis=-1)
    return jnp.exp(s - jnp.logaddexp(jax.nn.logsumexp(s, axis=-1), sinks)[..., None])


def nucleus(
    s: Float[Array, "*B T"], p: float | Array, sinks: Float[Array, ...] | None = None
) -> Int[Array, " *B"]:
    """How many of the likeliest keys hold the share ``p`` of the attention; all of them for 1.

    An attention sink counts as a key that stays anyway: what it takes need not be held by others.

    Args:
      s: attention scores, -inf where there is no key.
      p: in (0, 1].
      sinks: logits of the sinks, which broadcast against the leading axes of ``s``; or None.
    """
    keys = (s > -jnp.inf).sum(axis=-1)
    share = -jnp.sort(-shares(s, sinks), axis=-1)
    taken = 0.0 if sinks is None else 1.0 - share.sum(axis=-1, keepdims=True)
    count = (taken + jnp.cumsum(share, axis=-1) < p).sum(axis=-1) + 1
    return jnp.minimum(jnp.where(p < 1, count, keys), keys)


def best(s: Float[Array, "*B T"], count: Int[Array, " *B"]) -> Bool[Array, "*B T"]:
    """The ``count`` highest of the last axis, among equals the lowest positions; never one at -inf.

    The value of the last one is found bit by bit, in 32 counts: a sort costs more, and ``top_k`` takes no
    traced number.
    """
    order, top = amounts.in_order(s), jnp.uint32(1 << 31)

    def turn(i: Array, low: Array) -> Array:
        raised = low | (top >> i.astype(jnp.uint32))
        return jnp.where(_number(order >= raised[..., None]) >= count, raised, low)

    last = jax.lax.fori_loop(0, 32, turn, jnp.zeros(count.shape, jnp.uint32))[..., None]
    above, level = order > last, order == last
    spare = count - _number(above)

    def first(level: Bool[Array, "*B T"]) -> Bool[Array, "*B T"]:
        return level & (jnp.cumsum(level, axis=-1) <= spare[..., None])

    # A running sum costs as much as the 32 counts, and few keys are equal.
    return above | jax.lax.cond((_number(level) > spare).any(), first, lambda level: level, level)


def _number(which: Bool[Array, "*B T"]) -> Float[Array, " *B"]:
    """How many: exact up to 2 ** 24, and in floats XLA on a CPU takes half the time."""
    return which.astype(jnp.float32).sum(axis=-1)


@dataclasses.dataclass(frozen=True, repr=False)
class Voted(Ballot, Budget):
    """As many slots as tokens have a vote or stay anyway: another number for every row and KV head.

    Those that stay anyway are the policy's protected tokens and the eviction's first ones (``FIRST``). The
    eviction decides which tokens stay; ``gvote`` written alone ranks by the same votes and, where voters are
    drawn, keeps exactly those tokens.
    """

    name = "gvote"
    from_scores = True
    voted = True

    def targets(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B K"]:
        assert scores is not None
        assert frame.observed is not None
        votes, _ = self.votes(frame.observed)
        return ((votes > 0) | (scores >= FIRST)).sum(axis=-1)
