"""Protocols: where a prompt is cut in two, and the switches that describe it in a row.

agnostic  the context is compressed before the question is seen; question and prefix follow
aware     context and question are compressed together; only the prefix follows
either    the cut makes no difference, so one cell is enough: the policy decides on arrival or not at all
answer    of tasks with long answers, which state themselves what they need later: the context is compressed,
          and what follows it as it comes

(https://github.com/NVIDIA/kvpress evaluates agnostic by default.)
"""

from __future__ import annotations

from kvjax.algebra import Policy
from kvjax.eval.measure.row import Switches
from kvjax.eval.tasks.sample import Encoded

PROTOCOLS = ("agnostic", "aware")
"""Of tasks that ask after a text."""
LONG = "answer"
"""Of tasks with long answers."""
EVERY = (*PROTOCOLS, LONG)


def protocols(
    policy: Policy, wanted: tuple[str, ...], *, question: bool, long: bool = False
) -> tuple[str, ...]:
    """The protocols to run: those wanted, or "either" where they could not differ.

    Args:
      policy: of the cells.
      wanted: of ``EVERY``.
      question: does the task ask something after its text?
      long: is its answer long? Then ``LONG`` is its protocol, whatever is wanted, and no other task's.
    """
    if long:
        return (LONG,)
    wanted = tuple(one for one in wanted if one != LONG)
    if not wanted:
        return ()
    if not policy.whole_prompt:
        return ("either",)
    return wanted if question else ("agnostic",)


def cut(sample: Encoded, protocol: str) -> tuple[list[int], list[int]]:
    """(tokens that are prefilled and compressed, tokens that follow with the compressed cache)."""
    if protocol == "aware":
        return sample.context + sample.question, sample.prefix
    return sample.context, sample.question + sample.prefix


def switches(policy: Policy, protocol: str) -> Switches:
    """The switches of a result row."""
    if policy.whole_prompt:
        when = "prompt" if protocol == "aware" else "context"
        when += " and step" if policy.decides_later else ""
    elif policy.budget.limited:
        when = "step"
    elif not policy.admission.idle:
        when = "write"
    else:
        when = "read" if policy.selection.acts else "never"
    admits, selects = not policy.admission.idle, policy.selection.acts
    limits = [(admits, policy.admission), (selects, policy.selection), (policy.budget.limited, policy.budget)]
    early = policy.budget.limited and not policy.whole_prompt
    return Switches(
        compress_at=when,
        prefill_attention="policy" if early or (admits and policy.admission.prefill) else "full",
        budget=" + ".join(repr(part) for limited, part in limits if limited) or "none",
        sinks=policy.sinks,
        recent=max(policy.protects, policy.admission.window or 0, policy.selection.recent),
    )
