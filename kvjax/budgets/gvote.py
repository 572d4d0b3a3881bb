"""GVote: counts how many tokens of a prompt future queries will need.

GVote: Adaptive Per-Request KV-Cache Compression without Manually Setting Budget (under review; sections
3.2, 3.3 and algorithm 1).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.algebra import Argument, Budget, Frame, Number, Observation, PolicyError, Whole
from kvjax.types import Project

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True, repr=False)
class Ballot:
    """How a prompt votes: shared by the budget and the eviction called ``gvote``.

    Attributes:
      p: each voter votes for as many keys as the last real query needs to hold this share of its attention.
      samples: number of voters (S), hidden states drawn from the prompt's Gaussian.
      ahead: positions after the prompt over which the model's rotation is averaged (n_f). The paper gives no
        number; 64 is our choice (``python -m studies.gvote --study ahead``).
      seed: of the draws, combined with the request's own.
    """

    arguments: ClassVar[Mapping[str, Argument]] = {
        "p": Number(0, 1, "share of attention", open="low"),
        "samples": Whole(1, "number of voters"),
        "ahead": Whole(1, "number of positions"),
        "seed": Whole(0, "seed", 2**32 - 1),
    }
    traced: ClassVar[tuple[str, ...]] = ("p", "seed")
    sizes: ClassVar[tuple[str, ...]] = ("p", "samples")
    needs: ClassVar[frozenset[str]] = frozenset({"k", "q_last", "hidden"})
    name: ClassVar[str] = "gvote"
    p: float = 0.95
    samples: int = 8
    ahead: int = 64
    seed: int = 0

    def leaves(self) -> dict[str, Any]:
        return {"p": float(self.p), "seed": np.uint32(self.seed)}

    def votes(self, observed: Observation) -> tuple[Int[Array, "B K T"], Float[Array, "B K T"]]:
        """``poll``, computed once for eviction and budget, which have the same arguments."""
        return observed.once(self.name, functools.partial(self.poll, observed))

    def poll(self, observed: Observation) -> tuple[Int[Array, "B K T"], Float[Array, "B K T"]]:
        """Votes for each token by voters and query heads of a group, and their mean attention to it.

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

        count = nucleus(scores(observed.q_last), self.p)

        def vote(
            carry: tuple[Array, Array], q: Float[Array, "B N H"]
        ) -> tuple[tuple[Array, Array], None]:  # one voter at a time, so that N * T numbers are in memory
            s, (votes, share) = scores(q), carry
            return (votes + best(s, count).sum(axis=2), share + jax.nn.softmax(s, axis=-1).mean(axis=2)), None

        zeros = jnp.zeros((rows, heads, length), jnp.int32), jnp.zeros((rows, heads, length), jnp.float32)
        votes, share = jax.lax.scan(vote, zeros, self.voters(observed))[0]
        return votes, jnp.where(admitted, share / self.samples, 0.0)

    def voters(self, observed: Observation) -> Float[Array, "S B N H"]:
        """Queries of hidden states drawn from each row's Gaussian, rotated by the mean rotation ahead."""
        real = (observed.pos >= 0)[..., None]
        count = jnp.maximum(real.sum(axis=1), 1)
        hidden = jnp.where(real, observed.hidden.astype(jnp.float32), 0.0)
        mean = hidden.sum(axis=1) / count
        spread = jnp.sqrt((jnp.where(real, hidden - mean[:, None], 0.0) ** 2).sum(axis=1) / count)
        drawn = mean[:, None] + spread[:, None] * self._noise(observed, mean.shape[-1])
        q = self._projection(observed)(drawn).astype(jnp.float32)
        turn = observed.rotation_ahead(self.ahead, q.shape[-1])
        q = q if turn is None else jnp.einsum("bsnh,bhi->bsni", q, turn, precision=EXACT)
        return jnp.swapaxes(q, 0, 1)

    def _noise(self, observed: Observation, width: int) -> Float[Array, "B S D"]:
        """Draws that depend only on the seed, the request's seed, the layer and the voter."""
        assert observed.seeds is not None

        def row(request: Array) -> Float[Array, "S D"]:
            key = jax.random.fold_in(jax.random.PRNGKey(self.seed), request)
            key = jax.random.fold_in(key, observed.layer)
            voter = jax.vmap(lambda s: jax.random.normal(jax.random.fold_in(key, s), (width,)))
            return voter(jnp.arange(self.samples))

        return jax.vmap(row)(observed.seeds)

    def _projection(self, observed: Observation) -> Project:
        if observed.project is None:
            raise PolicyError(
                f"{self!r} projects hidden states to queries, but this model has no query projection "
                "(Heads.project). Add one to the model, or use a policy without votes, such as snapkv."
            )
        return observed.project


def nucleus(s: Float[Array, "*B T"], p: float | Array) -> Int[Array, " *B"]:
    """How many of the likeliest keys hold the share ``p`` of the attention; all of them for 1.

    Args:
      s: attention scores, -inf where there is no key.
      p: in (0, 1].
    """
    keys = (s > -jnp.inf).sum(axis=-1)
    share = -jnp.sort(-jax.nn.softmax(s, axis=-1), axis=-1)
    count = (jnp.cumsum(share, axis=-1) < p).sum(axis=-1) + 1
    return jnp.minimum(jnp.where(p < 1, count, keys), keys)


def best(s: Float[Array, "*B T"], count: Int[Array, " *B"]) -> Bool[Array, "*B T"]:
    """The ``count`` highest of the last axis, among equals the lowest positions; never one at -inf.

    The value of the last one is found bit by bit, in 32 counts: a sort costs more, and ``top_k`` takes no
    traced number.
    """
    bits = jax.lax.bitcast_convert_type(s + 0.0, jnp.uint32)  # -0 + 0 is 0
    top = jnp.uint32(1 << 31)
    order = jnp.where(bits >= top, ~bits, bits | top)
    order = jnp.where(s > -jnp.inf, order, 0)

    def turn(i: Array, low: Array) -> Array:
        raised = low | (top >> i.astype(jnp.uint32))
        return jnp.where((order >= raised[..., None]).sum(axis=-1) >= count, raised, low)

    last = jax.lax.fori_loop(0, 32, turn, jnp.zeros(count.shape, jnp.uint32))[..., None]
    above, level = order > last, order == last
    spare = count - above.sum(axis=-1)
    return above | (level & (jnp.cumsum(level, axis=-1) <= spare[..., None]))


@dataclasses.dataclass(frozen=True, repr=False)
class Voted(Ballot, Budget):
    """As many slots as tokens have a vote or are protected: another number for every row and KV head.

    The eviction decides which tokens stay; ``gvote`` written alone ranks by the same votes and keeps exactly
    those tokens.
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
        return ((votes > 0) | (scores == jnp.inf)).sum(axis=-1)
