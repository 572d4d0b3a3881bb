"""Which parts exclude each other, each pair refused with both names and the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvjax.policy.completion import Nothing
from kvjax.policy.errors import PolicyError
from kvjax.policy.eviction import KeepRecent
from kvjax.policy.selection import SelectAll

if TYPE_CHECKING:
    from kvjax.policy.joined import Policy


def refuse_illegal_pairs(p: Policy) -> None:
    """One rule a paragraph; the message names both parts and the reason."""
    if p.eviction.scores_prompt and p.budget.limited and p.budget.when != "after_prompt":
        raise PolicyError(
            f"{p.eviction!r} cannot serve {p.budget!r}: it ranks the tokens of a prompt, and a budget that "
            "acts while decoding asks about generated tokens too. Use when=after_prompt, or an eviction "
            "that ranks on arrival."
        )
    if p.budget.from_scores and p.budget.when != "after_prompt":
        raise PolicyError(
            f"{p.budget!r} divides a layer's slots by the scores of the whole prompt, which exist only after "
            "the prompt. Use when=after_prompt."
        )
    if p.eviction.one_voice and p.decides_later and not p.admission.alike:
        raise PolicyError(
            f"{p.eviction!r} keeps the same tokens in all KV heads of a layer, but {p.admission!r} admits "
            "other tokens to each of them. Use an eviction that ranks head by head, or a budget with "
            "when=after_prompt."
        )
    if p.eviction != KeepRecent() and not p.budget.limited:
        raise PolicyError(
            f"{p.eviction!r} ranks tokens, but {p.budget!r} never asks anybody to leave. Add a budget, for "
            f"example '{p.eviction!r} + uniform(512)'."
        )
    window = p.admission.window
    exact = 0 if p.decides_later else p.storage.recent
    for what, need in (("recent", p.protects), (repr(p.storage), exact)):
        if window is not None and need > window:
            raise PolicyError(
                f"{p.admission!r} owns the window of {window} tokens, but {what} protects the newest {need}. "
                f"Protect at most {window}, or widen the window."
            )
    least = p.budget.least
    protected = p.sinks + max(p.protects, exact, p.selection.recent, window or 0)
    if least is not None and least < max(protected, 1):
        raise PolicyError(
            f"{p.budget!r} leaves a stream {least} slots, fewer than the {protected} protected tokens "
            f"(sinks={p.sinks}, newest={protected - p.sinks}). Raise the budget to at least {protected}, or "
            "protect fewer."
        )
    if p.selection != SelectAll() and p.exact_slots(window or p.ring_tokens):
        raise PolicyError(
            f"{p.selection!r} chooses in one line of pages, but {p.storage!r} with {p.budget!r} holds two: "
            f"the newest {p.storage.recent} of what is retained as they came, older ones in codes. Use "
            "native storage, or a budget with when=after_prompt."
        )
    protected = p.sinks + p.protects
    if p.budget.needs_logits and least is not None and protected >= least:
        raise PolicyError(
            f"{p.budget!r} leaves a layer {least} slots on a sure step, but sinks={p.sinks} and the newest "
            f"{p.protects} tokens of {p.eviction!r} are protected: nobody could be ranked. Protect fewer, or "
            "raise tight."
        )
    if p.completion != Nothing() and p.selection != SelectAll() and not p.storage.exact:
        raise PolicyError(
            f"{p.storage!r} cannot hold what {p.completion!r} must subtract for {p.selection!r}: a page's "
            "scale grows after its tokens were absorbed, and the difference would not cancel. Use native "
            "storage."
        )
