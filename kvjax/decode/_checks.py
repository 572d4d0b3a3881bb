"""Checks of a call's arguments: errors for what is refused, warnings for what is served differently."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax import catalogue
from kvjax.algebra import Frame, Policy, PolicyError, Selection
from kvjax.cache.state import DONATED, KVState
from kvjax.decode._capacity import CHUNK, LONG_PAGE, page_sizes, slot_bounds
from kvjax.errors import UserError
from kvjax.types import Network, Params, Weighted
from kvjax.weights import WeightsError, chosen, is_auto, missing

if TYPE_CHECKING:
    from jaxtyping import Int, UInt

Progress = Callable[[int, int], None]
"""Called with (done, all) units of prefill work: tokens, or layers."""

Prompts = Sequence[Sequence[int] | np.ndarray | str] | Sequence[int] | np.ndarray | str
"""Token ids per row; or one row of them, a text per row, one text."""


class RequestError(UserError):
    """A prompt or a request that cannot be served."""


class Remark(UserWarning):
    """A request that is served, but not quite as it reads."""


# --- prompts -------------------------------------------------------------------------------------


def read_prompts(
    call: str, model: Weighted, prompts: Prompts, *, begins: bool = True
) -> list[Int[np.ndarray, " T"]]:
    """Token ids per row, as the model can read them; host only.

    Args:
      call: what was called, for messages.
      model: whose vocabulary and tokenizer are meant.
      prompts: rows of token ids or texts, or one of either.
      begins: texts begin with the model's BOS, if it has one.

    Raises:
      RequestError: neither ids nor texts, a text without a tokenizer, ids the vocabulary does not have.
    """
    if not hasattr(prompts, "__len__"):
        raise RequestError(
            f"{call}(prompts={prompts!r}) is not a prompt. Give token ids ([[1, 2, 3]]), or a text."
        )
    rows: Any = [prompts] if isinstance(prompts, str) or _is_flat(prompts) else prompts
    return [_row_ids(call, model, row, prompt, begins) for row, prompt in enumerate(rows)]


def _is_flat(prompts: Any) -> bool:
    """One row of numbers?"""
    return len(prompts) > 0 and (getattr(prompts[0], "ndim", None) == 0 or not hasattr(prompts[0], "__len__"))


def _row_ids(call: str, model: Weighted, row: int, prompt: Any, begins: bool) -> Int[np.ndarray, " T"]:
    """Token ids of a row of ids, or of a text."""
    if isinstance(prompt, str):
        text = getattr(model, "text", None)
        if text is None:
            raise RequestError(
                f"{call}: row {row} is a text, and this model has no tokenizer beside it. Give token ids "
                "([[1, 2, 3]]), or a model of kvjax.load(...)."
            )
        prompt = text.encode(prompt, bos=begins)
    return read_ids(f"{call}: row {row}", model, prompt)


def read_ids(name: str, model: Weighted, ids: Any) -> Int[np.ndarray, " T"]:
    """Token ids that the model has, as an array; every caller's ids are checked here.

    Args:
      name: what they are, for messages: ``generate: row 1``, ``Request(prompt=...)``.
      model: whose vocabulary is meant.
      ids: whole numbers.

    Raises:
      RequestError: not a list of whole numbers, or ids that the vocabulary does not have.
    """
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of different lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RequestError(f"{name} is not a list of token ids. Give whole numbers ([1, 2, 3]).")
    most = model.params["embed"].shape[0]
    wrong = np.flatnonzero((array < 0) | (array >= most))
    if wrong.size:
        raise RequestError(
            f"{name} has the token id {array[wrong[0]]} at {wrong[0]}, the model knows 0 to {most - 1}. "
            "Encode the text with the model's own tokenizer."
        )
    return array.astype(np.int32)


def check_prompts(call: str, network: Network, lengths: list[int], context: int) -> None:
    """Refuses prompts that are empty, or longer than the model or the context allows; and such a context."""
    if not lengths:
        raise RequestError(f"{call}(prompts=[]) has no row to read. Give at least one prompt.")
    for row, n in enumerate(lengths):
        if n < 1:
            raise RequestError(f"{call}: row {row} is empty. Give every row at least one token.")
        if n > network.max_positions:
            raise RequestError(
                f"{call}: row {row} has {n} tokens, the model was trained for {network.max_positions}. "
                "Shorten the prompt, or use a model with a longer context."
            )
        if n > context:
            raise RequestError(f"{call}(context={context}): row {row} has {n} tokens. Raise context.")
    if context > network.max_positions:
        raise RequestError(
            f"{call}(context={context}): the model was trained for {network.max_positions} positions. "
            "Give at most so many, or use a model with a longer context."
        )


def read_seeds(call: str, seeds: int | Sequence[int], rows: int) -> UInt[np.ndarray, " B"]:
    """One seed a row; their lowest 32 bits count.

    Raises:
      RequestError: no whole numbers, or another number of them.
    """
    numbers = np.asarray(seeds)
    if numbers.dtype.kind not in "iu" or numbers.shape not in ((), (rows,)):
        raise RequestError(
            f"{call}(seeds={seeds!r}) is not a seed for {rows} requests. Give a whole number, or one a row."
        )
    return np.broadcast_to(numbers.astype(np.int64) & 0xFFFFFFFF, (rows,)).astype(np.uint32)


# --- states --------------------------------------------------------------------------------------


def check_alive(call: str, state: KVState) -> None:
    """Refuses a state whose buffers were donated to a call before."""
    if state.gone:
        raise RequestError(f"{call}: {DONATED}")


def check_continues(call: str, network: Network, policy: Policy, state: KVState, arriving: int) -> None:
    """Refuses a state that was donated before, or made by another model, or under a policy that this one
    cannot continue.

    Everything but traced hyperparameters must be equal, and the pages must hold what the policy may keep.

    Args:
      call: what was called, for messages.
      network: of the model; layers whose own window rules have no pages.
      policy: what is to continue it.
      state: to be continued.
      arriving: most tokens of a row that come at a time.
    """
    check_alive(call, state)
    _check_model(call, network, state)
    if state.structure != policy.structure:
        raise RequestError(
            f"{call}: the state was made under '{state.structure}', and what it holds does not serve "
            f"'{policy!r}'. Continue with a policy that differs from it in traced numbers alone (amounts, "
            f"thresholds, sinks), or prefill under '{policy!r}'."
        )
    if None not in network.windows or not policy.paged(state.context):
        return
    held = next((layer.pools for layer in state.layers if layer.pools), ())
    for at, most in enumerate(slot_bounds(policy, state.context, arriving, page_sizes(state))):
        slots = held[at].table.shape[3] * held[at].size if held else 0
        if min(state.context if most is None else most, state.context) > slots:
            raise RequestError(
                f"{call}: a KV head of this state has pages for {slots} slots, '{policy!r}' may keep more. "
                f"Continue with its own budget and sinks or smaller ones, or prefill under '{policy!r}'."
            )


def _check_model(call: str, network: Network, state: KVState) -> None:
    """Refuses a state of another shape than the network's; its weights leave no sign in a state."""
    heads, _, dim = state.layers[0].ring.k.shape[1:]
    made, needed = (
        (len(state.layers), heads, dim),
        (network.num_layers, network.num_kv_heads, network.head_dim),
    )
    if made != needed:
        shape = "{} layers of {} KV heads of {}".format
        raise RequestError(
            f"{call}: the state was made by a model with {shape(*made)}, this one has {shape(*needed)}. "
            "Continue it with its own model, or prefill with this one."
        )


def check_space(call: str, network: Network, state: KVState, more: np.ndarray) -> None:
    """Refuses tokens for which the state has no space (a ring would silently forget, a list overflow)."""
    if len(more) != state.rows or more.max(initial=0) < 1:
        raise RequestError(
            f"{call}: {len(more)} rows of up to {more.max(initial=0)} tokens for a state of {state.rows} "
            "rows. Give every row of the state a list, at least one of them not empty."
        )
    after = np.asarray(state.length) + more
    if after.max() > state.context:
        raise RequestError(
            f"{call}: row {int(after.argmax())} would reach {int(after.max())} tokens, the state was made "
            f"for context={state.context}. Pass a larger context to prefill."
        )
    if after.max() > network.max_positions:
        raise RequestError(
            f"{call}: row {int(after.argmax())} would reach {int(after.max())} tokens, the model was trained "
            f"for {network.max_positions}. Ask for fewer, or use a model with a longer context."
        )


# --- policies ------------------------------------------------------------------------------------


def read_policy(spec: Policy | str, model: Weighted, *, prompt: int | None = None, answer: int = 0) -> Policy:
    """The policy of a spec on this model; warns (``Remark``) which one ``auto(...)`` chose.

    Args:
      spec, model: as in ``prefill``.
      prompt, answer: tokens of the longest row, for ``auto(64MiB)``; None: as long as the model allows.
    """
    if not isinstance(spec, str) or not is_auto(spec):
        return check_policy(catalogue.policy(spec), model.network)
    policy, reason = chosen(spec, model, prompt=prompt, answer=answer)
    warnings.warn(reason, Remark, stacklevel=1)
    return policy


def with_draft(policy: Policy, draft: Selection | str | None) -> Policy:
    """The policy whose reads stay as they are, and for which this selection drafts; None leaves it alone.

    Args:
      policy: to be decoded.
      draft: a selection in the one-string form, ``quest(chunks=8)`` or ``draft(quest(chunks=8), most=2)``, or
        one as a value.

    Raises:
      PolicyError: no selection, a policy that selects or drafts itself, or whose budget acts while decoding.
    """
    if draft is None:
        return policy
    spec = repr(draft) if isinstance(draft, Selection) else draft
    if not isinstance(spec, str):
        raise PolicyError(f"draft={draft!r} is not a selection. Give one, for example 'quest(chunks=8)'.")
    if not policy.selection.idle:
        raise PolicyError(
            f"draft={spec!r} beside {policy!r}: {policy.selection!r} stands where the draft would. Leave one "
            "of them out."
        )
    drafts = catalogue.policy(spec)
    if drafts != Policy(selection=drafts.selection) or drafts.selection.idle:
        raise PolicyError(
            f"draft={spec!r} is not a selection alone. Give one, for example 'quest(chunks=8)'."
        )
    if drafts.selection.drafts is None:
        drafts = catalogue.policy(f"draft({spec})")
    return dataclasses.replace(policy, selection=drafts.selection)


def check_policy(policy: Policy, network: Network) -> Policy:
    """Refuses numbers beyond the positions of the model, where memory or time grow with them.

    Raises:
      PolicyError: names the part, the number and the positions.
    """
    for part in policy.chain:
        part.check_positions(network)
    return policy


def check_sizes(call: str, network: Network, chunk_size: int, page: int | None) -> None:
    """Refuses chunks and pages that are longer than the model's positions and than the defaults."""
    for name, value, default in (("chunk_size", chunk_size, CHUNK), ("page", page, LONG_PAGE)):
        most = max(network.max_positions, default)
        if value is not None and not 1 <= value <= most:
            raise RequestError(
                f"{call}({name}={value}) is out of range: the model was trained for {network.max_positions} "
                f"positions. Give 1 to {most}."
            )


def warn_of_windows(network: Network, policy: Policy) -> None:
    """Warns of layers whose own sliding window rules. From one line, so that Python warns once."""
    sliding = [f"{i}: {window}" for i, window in enumerate(network.windows) if window is not None]
    if sliding and policy != Policy():
        warnings.warn(
            f"the policy has no effect in layers with a sliding window of the model's own ({len(sliding)} of "
            f"{network.num_layers}; layer: tokens = {', '.join(sliding)}).",
            Remark,
            stacklevel=1,
        )


def warn_of_protected(network: Network, policy: Policy, frame: Frame, lengths: Sequence[int]) -> None:
    """Warns where a budget leaves prompts of these lengths fewer slots than are protected; those all stay."""
    if not policy.budget.limited:
        return

    def short(length: int) -> bool:
        least = policy.budget.smallest(frame, length)
        return least is not None and least < min(policy.protected, length)

    if not any(short(length) for length in lengths):
        return
    enough, most = policy.protected, network.max_positions
    while enough < most and short(enough):
        enough *= 2
    low = enough // 2
    while low < enough and not short(enough):  # the first length at which the budget rules
        middle = (low + enough) // 2
        low, enough = (middle + 1, enough) if short(middle) else (low, middle)
    which = "a prompt" if short(enough) else f"a prompt of fewer than {enough} tokens"
    newest = policy.protected - policy.sinks
    warnings.warn(
        f"{policy!r} leaves a KV head of {which} fewer slots than the {policy.protected} protected tokens "
        f"(sinks={policy.sinks}, newest={newest}), which all stay. Raise the budget, or protect fewer.",
        Remark,
        stacklevel=1,
    )


def warn_of_votes(policy: Policy, lengths: Sequence[int], kept: Sequence[Int[np.ndarray, "B K"]]) -> None:
    """Warns of prompts that a voted budget could not judge, or kept whole.

    Args:
      policy: whose budget is voted.
      lengths: of the prompts.
      kept: tokens that stay of each KV head, of each layer that the policy rules.
    """
    stays = np.asarray(kept)  # [L, B, K]
    if not len(stays):  # the model's own windows rule everywhere
        return
    for row, length in enumerate(lengths):
        if length == 1:
            warnings.warn(
                f"{policy!r} has one token in row {row} to judge by, which stays. Its votes need a prompt.",
                Remark,
                stacklevel=1,
            )
        elif length > policy.protected and (stays[:, row] == length).all():
            warnings.warn(
                f"{policy!r} keeps all {length} tokens of row {row} in every layer and head: its votes name "
                "them all. That saves nothing here; a smaller p or fewer samples keep fewer.",
                Remark,
                stacklevel=1,
            )


def warn_of_nothing_admitted(policy: Policy, state: KVState, lengths: Sequence[int]) -> None:
    """Warns of prompts of which a learned threshold admits no token. Asked on one device alone.

    Lengths are added up here: a sum on the device would be one program more for each size of pools.
    """
    dial, budget = policy.admission.dial, policy.budget
    pages = [room.pages for room in state.layers if room.pages is not None]
    if not dial or budget.limited or not pages or state.mesh.grid is not None:
        return
    most = np.stack(jax.device_get([held.length for held in pages])).sum(axis=3).max(axis=(0, 2))
    window = policy.window(state.context)
    for row, length in enumerate(lengths):
        outside = length - window
        if outside > policy.sinks and most[row] <= policy.sinks:
            warnings.warn(
                f"{policy!r} admits none of the {outside} tokens of row {row} that left the window, in any "
                f"layer or head: only the newest {window} and sinks({policy.sinks}) stay. Lower {dial}.",
                Remark,
                stacklevel=1,
            )


def warn_of_lengths(policy: Policy, weights: Params, lengths: Sequence[int]) -> None:
    """Warns where learned weights were made for prompts of very different lengths."""
    for part in policy.learned:
        remark = part.remark(weights[part.place], lengths)
        if remark is not None:
            warnings.warn(remark, Remark, stacklevel=1)


def check_weights(model: Weighted, policy: Policy, weights: Params | None) -> Params:
    """The learned weights as the loops take them; refused where the policy needs others or none.

    Raises:
      WeightsError: weights that are missing, needless, or of another model.
    """
    weights = {} if weights is None else weights
    if not isinstance(weights, Mapping) or any(isinstance(x, str | Path) for x in weights.values()):
        raise WeightsError(
            f"weights={weights!r} names weights that are not read yet. Pass "
            f"weights=kvjax.weights_for(policy, model, {weights!r})."
        )
    for part in policy.learned:
        if part.place not in weights:
            raise missing(part, model)
        if len(weights[part.place]) != model.network.num_layers:
            raise WeightsError(
                f"weights[{part.place!r}] has {len(weights[part.place])} layers, the model has "
                f"{model.network.num_layers}. Give one entry a layer."
            )
        part.check_weights(weights[part.place], model.network)
    needless = set(weights) - {part.place for part in policy.learned}
    if needless:
        raise WeightsError(
            f"weights for {', '.join(sorted(needless))} are given, but the policy {policy!r} learns "
            "nothing. Leave them out, or use the policy they were trained for; "
            "kvjax.weights_for(policy, model) gives what it needs."
        )
    return weights
