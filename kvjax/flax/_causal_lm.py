"""``CausalLM``: the decode loop's network, weights and KV state behind an ``nnx.Module``.

The module is beside the decode loop, never under it: a call takes the arrays out of their variables and runs
``kvjax.decode.step`` or ``piece``.

Why: kvjax/DESIGN.md, 23.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.cache import mapped
from kvjax.cache.state import KVState, PoolOverflowError
from kvjax.decode import CHUNK, RequestError
from kvjax.nnx import nnx
from kvjax.sharding.mesh import mesh_of
from kvjax.types import Network, Params, Weighted
from kvjax.weights import weights_for

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class KV(nnx.Variable):
    """The KV cache: a variable whose value is a ``KVState``."""


class Learned(nnx.Variable):
    """A learned weight of the policy; the model's own are ``nnx.Param``."""


@dataclasses.dataclass(frozen=True)
class Names:
    """What is static in a ``Tree``."""

    of: tuple[str, ...]
    is_dict: bool


class Tree(nnx.Module):
    """A tree of dicts and lists as nested modules, one variable per array."""

    def __init__(self, tree: Any, kind: type[nnx.Variable]):
        named = sorted(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
        self.names = Names(tuple(str(name) for name, _ in named), isinstance(tree, dict))
        for name, (_, value) in zip(self.names.of, named):
            nested = isinstance(value, dict | list | tuple)
            setattr(self, name, Tree(value, kind) if nested else kind(jnp.asarray(value)))

    def tree(self) -> Any:
        """The tree with its arrays, not copies."""
        members = [getattr(self, name) for name in self.names.of]
        values = [x.tree() if isinstance(x, Tree) else _value(x) for x in members]
        return dict(zip(self.names.of, values)) if self.names.is_dict else values


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is static in a ``CausalLM``.

    Attributes:
      network, policy: as in ``kvjax.generate``.
      page, chunk: slots of a page and most tokens of a row that one call brings, as in ``kvjax.prefill``.
      model: the model without its weights.
    """

    network: Network
    policy: Policy
    page: int | None
    chunk: int
    model: Any = dataclasses.field(compare=False, repr=False)


class CausalLM(nnx.Module):
    """A language model with its KV cache.

    The model's weights are ``nnx.Param`` variables that share their arrays with ``model``, the policy's
    learned weights ``Learned``, and the cache is one ``KV`` variable.

    Attributes:
      params: the model's weights, one variable per array.
      learned: the policy's.
      cache: the ``KV`` variable.
      setup: what is static.
      read: a whole prompt was read (``prefill``), or a state was put in (``set_state``). Static.
    """

    def __init__(
        self,
        model: Weighted,
        policy: Policy | str,
        *,
        batch: int,
        context: int,
        weights: Params | None = None,
        page: int | None = None,
        chunk_size: int = CHUNK,
    ):
        """An empty cache.

        Args:
          model: of ``kvjax.load``, or any network and its weights.
          policy: what the cache keeps, also in the one-string form.
          batch: rows.
          context: most tokens that a row will ever see, prompt and new ones.
          weights: the policy's learned weights; by default those that the model ships.
          page: slots of a page; by default ``kvjax.decode.page_size`` chooses.
          chunk_size: most tokens of a row that one call brings.

        Raises:
          RequestError: sizes below 1, or a context beyond the model's positions.
          PolicyError, WeightsError: as ``kvjax.generate``.
        """
        call = f"CausalLM(batch={batch}, context={context}, chunk_size={chunk_size})"
        if min(batch, context, chunk_size) < 1:
            raise RequestError(f"{call} holds nothing. Give 1 or more of each.")
        network = model.network
        if context > network.max_positions:
            raise RequestError(
                f"{call}: the model was trained for {network.max_positions} positions. Give at most so many."
            )
        policy = decode.read_policy(policy, model)
        weights = weights_for(policy, model) if weights is None else weights
        bare = copy.copy(model)
        vars(bare)["params"] = {}
        self.setup = Setup(network, policy, page, chunk_size, bare)
        self.params = Tree(model.params, nnx.Param)
        self.learned = Tree(decode.check_weights(model, policy, weights), Learned)
        self.read = False
        empty = decode.empty(
            network,
            policy,
            rows=batch,
            context=context,
            dtype=model.params["embed"].dtype,
            page=page,
            chunk_size=chunk_size,
            mesh=mesh_of(model.params),
        )
        self.cache = KV(empty)

    @property
    def batch(self) -> int:
        """Rows of the cache."""
        return state(self).rows

    @property
    def context(self) -> int:
        """Most tokens that a row may ever see."""
        return state(self).context

    @property
    def model(self) -> Weighted:
        """The network and its weights, as ``kvjax.generate`` takes them."""
        model = copy.copy(self.setup.model)
        vars(model)["params"] = self.params.tree()
        return model  # type: ignore[no-any-return]

    # --- on the host ---

    def prefill(self, prompts: Any, *, seeds: int | Sequence[int] = 0) -> Float[Array, "B V"]:
        """Empties the cache and reads prompts into it, under any policy; logits of each row's next token.

        Args:
          prompts: one per row, as in ``kvjax.prefill``.
          seeds: as there.

        Raises:
          RequestError: as ``kvjax.prefill``; another number of prompts than rows.
        """
        self._on_host("prefill")
        setup, now, model = self.setup, state(self), self.model
        rows = decode.read_prompts("prefill", model, prompts)
        if len(rows) != now.rows:
            raise RequestError(
                f"prefill: {len(rows)} prompts for a CausalLM of batch={now.rows}. Give one prompt per row."
            )
        after, logits = decode.prefill(
            model,
            setup.policy,
            rows,
            context=now.context,
            chunk_size=setup.chunk,
            page=setup.page,
            weights=self.learned.tree(),
            seeds=seeds,
            mesh=now.mesh,
        )
        _put(self, after)
        return logits

    def reserve(self, tokens: int, piece: int = 1) -> None:
        """Makes room for the next tokens of every row, which may change the sizes of pools.

        Args:
          tokens: of each row.
          piece: most of them that one call brings.

        Raises:
          RequestError: calls since the last ``reserve`` brought more than there was room for (tokens were
            lost), or ``tokens`` more exceed the context.
        """
        self._on_host("reserve")
        setup, now = self.setup, state(self)
        call = f"reserve(tokens={tokens}, piece={piece})"
        again = "Read the prompts again (lm.prefill), and reserve before the tokens come."
        longest = int(np.asarray(now.length).max())
        if longest > now.context:
            raise RequestError(
                f"{call}: a row was fed {longest} tokens, the CausalLM was made for context={now.context}, "
                f"and what it says since is wrong. Make it with a larger context, or feed fewer tokens."
            )
        decode.check_space(call, setup.network, now, np.full(now.rows, tokens))
        try:
            room = decode.reserve(setup.policy, now, tokens, min(piece, tokens), ahead=tokens)
        except PoolOverflowError as error:
            raise RequestError(
                f"{call}: since the last reserve {error.args[0].split('.')[0]}. {again}"
            ) from None
        _put(self, room)

    def _on_host(self, method: str) -> None:
        if isinstance(state(self).length, jax.core.Tracer):
            raise RequestError(
                f"{method} inside jit: it may change the sizes of pools, and that takes the host. Call it "
                "before."
            )

    # --- pure ---

    def __call__(
        self,
        tokens: Int[Array, " B"] | Int[Array, "B T"],
        count: Int[Array, " B"] | None = None,
        total: Int[Array, " B"] | None = None,
    ) -> Float[Array, "B V"]:
        """Feeds tokens; logits of each row's next one. Pure: fixed shapes, for ``nnx.jit`` and ``jax.jit``.

        Outside jit it runs a compiled program of its own and donates the cache.

        Args:
          tokens: one per row, or T per row (a piece of a prompt).
          count: how many of the T are real; a row with 0 is left as it is, and its logits mean nothing.
          total: length of each row's prompt, where this is its first piece; by default the piece is all.

        Raises:
          RequestError: other rows than the cache has, more tokens than one call may bring, or a prompt under
            a policy that must see all of it first.
        """
        setup, now = self.setup, state(self)
        tokens = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)  # type: ignore[assignment]
        shape = "x".join(map(str, tokens.shape))
        if tokens.ndim not in (1, 2) or len(tokens) != now.rows:
            raise RequestError(
                f"lm(tokens of shape {shape}): the cache has {now.rows} rows. Give one token per row, or T "
                "per row; for another batch make another CausalLM."
            )
        tokens = tokens[:, None] if tokens.ndim == 1 else tokens
        most = min(now.chunk, now.context)
        if tokens.shape[1] > most:
            raise RequestError(
                f"lm(tokens of shape {shape}) brings more than the {most} tokens that chunk_size={now.chunk} "
                f"and context={now.context} allow. Feed smaller pieces, or make a CausalLM with larger ones."
            )
        if setup.policy.whole_prompt and not self.read:
            raise RequestError(
                f"lm(tokens): {setup.policy!r} decides when it has seen the whole prompt, and that takes the "
                "host. Call lm.prefill(prompts) first."
            )
        run: Any = _feed if isinstance(now.length, jax.core.Tracer) else _feed_program
        learned = self.learned.tree()
        after, logits = run(
            setup.network, setup.policy, self.params.tree(), learned, now, tokens, count, total
        )
        self.cache = _with(self.cache, after)
        return logits  # type: ignore[no-any-return]


def _feed(
    network: Network,
    policy: Policy,
    params: Params,
    learned: Params,
    now: KVState,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"] | None,
    total: Int[Array, " B"] | None,
) -> tuple[KVState, Float[Array, "B V"]]:
    """``CausalLM.__call__`` of arguments that are checked."""
    count = jnp.full(now.rows, tokens.shape[1]) if count is None else count
    count = count.astype(jnp.int32)
    prompt = jnp.where(now.length == 0, count if total is None else total, now.total)
    now = dataclasses.replace(now, total=now.mesh.everywhere(prompt.astype(jnp.int32)))
    if tokens.shape[1] == 1:
        return decode.step(network, policy, params, learned, now, tokens[:, 0], count > 0)
    return decode.piece(network, policy, params, learned, now, tokens, count)


_feed_program = mapped.jit(_feed, static=("network",), donate="now")


def state(lm: CausalLM) -> KVState:
    """The cache: ``kvjax.fork``, ``save`` and ``nbytes`` take it, ``stream`` and ``extend`` continue it."""
    return _value(lm.cache)  # type: ignore[no-any-return]


def set_state(lm: CausalLM, new: KVState) -> None:
    """Replaces the cache; its rows are the batch from now on.

    Args:
      lm: a model.
      new: made under the same policy's structure, by the same model.

    Raises:
      RequestError: a state of another model or policy, or one that was donated.
    """
    decode.check_continues("set_state", lm.setup.network, lm.setup.policy, new, 1)
    _put(lm, new)


def _put(lm: CausalLM, new: KVState) -> None:
    lm.cache = _with(lm.cache, new)
    lm.read = True


_NAMED = hasattr(nnx.Variable, "get_value")
"""Since Flax 0.12 values other than arrays are read and written by methods."""


def _value(variable: nnx.Variable) -> Any:
    return variable.get_value() if _NAMED else variable.value


def _with(variable: nnx.Variable, value: Any) -> Any:
    """The variable after it was given a value."""
    if _NAMED:
        variable.set_value(value)
    else:
        variable.value = value
    return variable
