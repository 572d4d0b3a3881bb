"""New tokens after a prompt, streamed or all at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax import catalogue, metrics
from kvjax.algebra import Policy, Selection
from kvjax.cache.state import KVState
from kvjax.decode._capacity import CHUNK, HORIZON, MAX_STEPS, bucket, reserve
from kvjax.decode._checks import (
    Prompts,
    RequestError,
    check_alive,
    check_continues,
    check_space,
    check_weights,
    read_ids,
    read_policy,
    read_prompts,
    warn_of_windows,
    with_draft,
)
from kvjax.decode._draft import Drafter
from kvjax.decode._loop import DecodeRows, first_token, write
from kvjax.decode._placement import check_same_call, mesh_for, on_mesh
from kvjax.decode._prefill import prefill
from kvjax.decode._step import after_prompt
from kvjax.sampling import Biases, Sampling, sampling
from kvjax.sharding.mesh import Mesh
from kvjax.types import EMPTY, Params, Weighted
from kvjax.weights import weights_for

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass
class Generation:
    """What ``generate`` returns.

    Attributes:
      tokens: new token ids per row, a stop token included.
      state: the KV state after the last fed token.
      drafted, accepted: tokens that were drafted, and those of them that stand; 0 without drafts.
    """

    tokens: list[list[int]]
    state: KVState
    drafted: int = 0
    accepted: int = 0


def generate(
    model: Weighted,
    policy: Policy | str,
    prompts: Prompts,
    *,
    draft: Selection | str | None = None,
    max_new_tokens: int = 64,
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
    stops: Sequence[int] | None = None,
    chunk_size: int = CHUNK,
    page: int | None = None,
    weights: Params | None = None,
    mesh: Mesh | str | None = None,
) -> Generation:
    """Prompts in, new tokens out.

    Args:
      model: a network and its weights.
      policy: what the KV cache keeps, also in the one-string form.
      prompts: as in ``prefill``.
      draft: a selection that writes ahead, such as "quest(chunks=8)", while full reads verify: the same text,
        and faster where the cache is most of what a step loads. It stands in the policy as ``draft(...)``.
      max_new_tokens: most new tokens a row.
      temperature, top_k, top_p, min_p, seed: see ``kvjax.sampling``.
      frequency_penalty, presence_penalty, repetition_penalty: the same.
      logit_bias, min_tokens: the same.
      stops: token ids that end a row; None for the model's own (``spec.eos``), () for none.
      chunk_size, page: as in ``prefill``.
      weights: the policy's learned weights; by default those that the model ships.
      mesh: as in ``prefill``.

    Raises:
      PolicyError: a policy that cannot be read, or that cannot be drafted for.
      RequestError, MeshError: as in ``prefill``, and when prompt and new tokens exceed the model's context.
      WeightsError: a policy that learns, and no weights that fit.
    """
    if max_new_tokens < 1:
        raise RequestError(f"generate(max_new_tokens={max_new_tokens}) writes nothing. Give 1 or more.")
    rows, most = read_prompts("generate", model, prompts), model.network.max_positions
    for biases in [logit_bias] if isinstance(logit_bias, Mapping) else logit_bias or ():
        read_ids("generate(logit_bias=...)", model, [*biases])
    stops = _end_tokens(model) if stops is None else stops
    longest = max((len(row) for row in rows), default=0)
    policy = with_draft(read_policy(policy, model, prompt=longest, answer=max_new_tokens), draft)
    weights = weights_for(policy, model) if weights is None else weights
    if longest + max_new_tokens > most:
        raise RequestError(
            f"generate(max_new_tokens={max_new_tokens}) after {longest} prompt tokens exceeds the model's "
            f"{most} positions. Ask for fewer tokens, or shorten the prompt."
        )
    context = bucket(longest + max_new_tokens, most)
    how = sampling(
        len(rows),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=logit_bias,
        min_tokens=min_tokens,
        seed=seed,
        prompts=rows,
        stops=stops,
        context=context,
    )
    where = mesh_for("generate", model, mesh, len(rows))
    check_same_call(
        "generate", where, policy, weights or {}, {"the sampling": (how, max_new_tokens, [*stops])}
    )
    model, weights = on_mesh(model, policy, weights or {}, where)
    sizes: dict[str, Any] = {"context": context, "chunk_size": chunk_size, "page": page}
    state, logits = prefill(model, policy, rows, **sizes, weights=weights, seeds=seed)
    out: list[list[int]] = [[] for _ in rows]
    limit = np.full(len(rows), max_new_tokens, np.int32)
    drafter = Drafter.of(policy, state)
    for piece, after in _pieces(model, policy, state, logits, limit, how, stops, weights, MAX_STEPS, drafter):
        state = after
        for row, tokens in enumerate(piece):
            out[row] += [int(token) for token in tokens if token != EMPTY]
    counts = {"drafted": drafter.drafted, "accepted": drafter.accepted} if drafter else {}
    return Generation(tokens=out, state=metrics.with_peak(state), **counts)


def stream(
    model: Weighted,
    policy: Policy | str,
    state: KVState,
    logits: Float[Array, "B V"],
    *,
    draft: Selection | str | None = None,
    max_new_tokens: int | Sequence[int],
    how: Sampling | None = None,
    stops: Sequence[int] | None = None,
    weights: Params | None = None,
    every: int = MAX_STEPS,
) -> Iterator[tuple[np.ndarray, KVState]]:
    """Continue a prefilled state, yielding every few tokens.

    Args:
      model, policy, weights: as in ``prefill``.
      state: donated; use the one that comes with each piece. Made under a policy that differs from this one
        in traced hyperparameters alone.
      logits: of each row's next token.
      draft: as in ``generate``; of a state that was made with it (``with_draft``).
      max_new_tokens: for all rows, or one number a row.
      how: sampling parameters; greedy by default.
      stops: as in ``generate``.
      every: most tokens a piece; the host looks at the device once a piece.

    Yields:
      (int32 [B, n] new tokens with EMPTY where a row had ended, the state after them).

    Raises (before the first piece is asked for):
      RequestError: nothing to write, more tokens than the model or ``state.context`` allows, a state of
        another policy, or one that was donated before.

    Warns (``Remark``) where the model's own windows rule.
    """
    policy, rows = with_draft(catalogue.policy(policy), draft), state.rows
    weights = check_weights(model, policy, weights)
    check_continues("stream", model.network, policy, state, 1)
    limit = np.broadcast_to(np.asarray(max_new_tokens, np.int32), (rows,))
    if limit.min() < 1:
        raise RequestError(f"stream(max_new_tokens={max_new_tokens}) writes nothing. Give 1 or more.")
    if limit.max() > 1:  # the last new token of a row is never fed
        check_space("stream", model.network, state, limit - 1)
    warn_of_windows(model.network, policy)
    how = sampling(rows) if how is None else how
    stops = _end_tokens(model) if stops is None else stops
    check_same_call("stream", state.mesh, policy, weights, {"the sampling": (how, limit, [*stops], every)})
    model, weights = on_mesh(model, policy, weights, state.mesh)
    drafter = Drafter.of(policy, state)
    return _pieces(model, policy, state, logits, limit, how, stops, weights, every, drafter)


def _end_tokens(model: Weighted) -> tuple[int, ...]:
    """The ids that end the model's texts, of config.json or generation_config.json; of a network without a
    spec those of its tokenizer, or none."""
    says = getattr(model.network, "spec", None) or getattr(model, "tokenizer", None)
    return tuple(getattr(says, "eos", ()))


def _pieces(
    model: Weighted,
    policy: Policy,
    state: KVState,
    logits: Float[Array, "B V"],
    limit: Int[np.ndarray, " B"],
    how: Sampling,
    stops: Sequence[int],
    weights: Params,
    every: int,
    drafter: Drafter | None,
) -> Iterator[tuple[np.ndarray, KVState]]:
    """``stream``, of arguments that are checked."""
    decoding = DecodeRows(
        token=np.zeros(state.rows, np.int32),  # type: ignore[arg-type]
        done=np.zeros(state.rows, bool),  # type: ignore[arg-type]
        left=limit,  # type: ignore[arg-type]
        stops=np.asarray([*stops] or [EMPTY], np.int32),  # type: ignore[arg-type]
        how=how,
    )
    decoding, fresh = first_token(state.mesh.put(decoding), logits, state.length, state.mesh)
    # Where everything is kept the context bounds the pool: one size for all prompts of a size class.
    keeps_all = policy.admission.idle and policy.on_arrival
    written, made_under = 1, state.structure
    yield np.asarray(fresh)[:, None], state
    rest, own, state = after_prompt(policy, weights, state)
    while not bool(np.asarray(decoding.done).all()):
        check_alive("stream", state)  # the piece's state may have been fed to another call meanwhile
        left = int(limit.max()) - written
        ahead = state.context if keeps_all else min(HORIZON, left)
        if drafter is None:
            state, piece = reserve(policy, state, min(every, left), 1, ahead=ahead), every
            state, decoding, out = write(model.network, rest, every, model.params, own, state, decoding)
        else:
            piece = min(drafter.tokens(every), left)
            state = reserve(policy, state, piece, 1, ahead=ahead)
            what = (model.network, rest, every, model.params, own, state, decoding)
            state, decoding, out = drafter.write(*what, tokens=piece)
        tokens = np.asarray(out)
        written += piece
        yield tokens[:, (tokens != EMPTY).any(axis=0)], dataclasses.replace(state, structure=made_under)
