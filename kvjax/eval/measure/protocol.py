"""The switches that name a protocol, and where a prompt is cut in two.

agnostic  the context is compressed before the question is seen; question and prefix follow
aware     context and question are compressed together; only the prefix follows
either    policies that decide on arrival or not at all: the cut makes no difference, so one cell does

(https://github.com/NVIDIA/kvpress evaluates agnostic by default.)
"""

from __future__ import annotations

from kvjax.algebra import Policy
from kvjax.eval.measure.row import Switches
from kvjax.eval.tasks.sample import Encoded

PROTOCOLS = ("agnostic", "aware")


def protocols(policy: Policy, asked: tuple[str, ...], question: bool) -> tuple[str, ...]:
    """The protocols to run: as asked, or "either" where they could not differ."""
    if not policy.whole_prompt:
        return ("either",)
    return asked if question else ("agnostic",)


def cut(sample: Encoded, protocol: str) -> tuple[list[int], list[int]]:
    """(what is prefilled and compressed, what follows with the compressed cache)."""
    if protocol == "aware":
        return sample.context + sample.question, sample.prefix
    return sample.context, sample.question + sample.prefix


def switches(policy: Policy, protocol: str) -> Switches:
    """Those of every result row."""
    if policy.whole_prompt:
        when = "prompt" if protocol == "aware" else "context"
        when += " and step" if policy.decides_later else ""
    elif policy.budget.limited:
        when = "step"
    elif not policy.admission.idle:
        when = "write"
    else:
        when = "never" if policy.selection.idle else "read"
    admits, selects = not policy.admission.idle, not policy.selection.idle
    limits = [(admits, policy.admission), (selects, policy.selection), (policy.budget.limited, policy.budget)]
    early = policy.budget.limited and not policy.whole_prompt
    return Switches(
        compress_at=when,
        prefill_attention="policy" if early or (admits and policy.admission.prefill) else "full",
        budget=" + ".join(repr(part) for limited, part in limits if limited) or "none",
        sinks=policy.sinks,
        recent=max(policy.protects, policy.admission.window or 0, policy.selection.recent),
    )
