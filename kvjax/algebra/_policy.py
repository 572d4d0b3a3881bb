"""The policy: one part for each of the six places, what follows from the six, and which pairs are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from kvjax.algebra._admission import Admission, AdmitAll
from kvjax.algebra._arguments import Whole
from kvjax.algebra._budget import Budget, Unlimited
from kvjax.algebra._completion import Completion, Nothing
from kvjax.algebra._errors import PolicyError
from kvjax.algebra._eviction import Eviction, KeepRecent
from kvjax.algebra._observation import OBSERVABLE
from kvjax.algebra._part import Part
from kvjax.algebra._selection import SelectAll, Selection
from kvjax.algebra._storage import Native, Storage

PLACES: dict[str, type[Part]] = {
    "admission": Admission,
    "eviction": Eviction,
    "selection": Selection,
    "storage": Storage,
    "budget": Budget,
    "completion": Completion,
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Policy:
    """Six choices and two protections; what a decode loop does with the KV state.

    A policy is a static value and a pytree at once: equal policies have equal ``repr``, and policies that
    differ in dials alone (budgets, thresholds, rates; see ``Part``) run the same compiled programs.

    Attributes:
      admission, eviction, selection, storage, budget, completion: one part per place.
      sinks: first positions of a row, always admitted and never evicted.
      recent: newest tokens, never evicted.

    Raises:
      PolicyError: when two parts exclude each other; the message names both and the reason.
    """

    admission: Admission = AdmitAll()
    eviction: Eviction = KeepRecent()
    selection: Selection = SelectAll()
    storage: Storage = Native()
    budget: Budget = Unlimited()
    completion: Completion = Nothing()
    sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        for place, kind in PLACES.items():
            part = getattr(self, place)
            if not isinstance(part, kind):
                was = getattr(part, "place", type(part).__name__)
                raise PolicyError(
                    f"Policy({place}=...) takes an {kind.__name__}, but {part!r} is for {was}. "
                    f"Write Policy({was}={part!r})."
                )
            unknown = part.needs - set(OBSERVABLE if place == "eviction" else OBSERVABLE[:-1])
            if unknown:
                raise PolicyError(
                    f"{part!r} needs {', '.join(sorted(unknown))}, which {place} cannot see. It may name "
                    f"{', '.join(OBSERVABLE[:-1])}; an eviction mass, too."
                )
        for name in ("sinks", "recent"):
            value = getattr(self, name)
            Whole().check(f"{name}({value!r})", name, value)
        _refuse_illegal_pairs(self)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The six parts in the order of the places."""
        return tuple(getattr(self, place) for place in PLACES)

    @property
    def needs(self) -> frozenset[str]:
        """Everything any part reads of an arriving token."""
        return frozenset().union(*(part.needs for part in self.parts))

    @property
    def keeps(self) -> tuple[str, ...]:
        """Names of all per-slot values, as ``place.name``; an eviction that acts once keeps none."""
        parts = [p for p in self.parts if p.place != "eviction" or self.decides_later]
        return tuple(f"{part.place}.{name}" for part in parts for name in part.keeps)

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of those among ``keeps`` that are more than a float32 a slot."""
        return {f"{part.place}.{name}": kind for part in self.parts for name, kind in part.arrays.items()}

    @property
    def structure(self) -> str:
        """All of the policy but its dials and sinks: a state is continued under what it was made under."""
        words = [part.structure for part in self.parts if not part.idle]
        words += [f"recent({self.recent})"] if self.recent else []
        return " + ".join(dict.fromkeys(words)) or "full"

    @property
    def decides_later(self) -> bool:
        """Does the budget act while decoding?"""
        return self.budget.limited and self.budget.when != "after_prompt"

    @property
    def tracks_mass(self) -> bool:
        """Must a read say what attention each slot received?"""
        return self.decides_later and self.eviction.needs_mass

    @property
    def learned(self) -> tuple[Part, ...]:
        """The parts that read learned weights."""
        return tuple(part for part in self.parts if part.learns)

    @property
    def protects(self) -> int:
        """Newest tokens that are never evicted."""
        return max(self.recent, self.eviction.protects)

    @property
    def protected(self) -> int:
        """Tokens of a long prompt that stay in a stream whatever its target: the sinks and the newest.

        Where the budget acts later too, the ring is live whatever it scores.
        """
        return self.sinks + (self.ring_tokens if self.decides_later else self.protects)

    @property
    def whole_prompt(self) -> bool:
        """Does a prompt have to be seen whole before anything can be decided, or hidden?"""
        once = self.budget.limited and self.budget.when == "after_prompt"
        return once or self.tracks_mass or not self.admission.prefill

    @property
    def on_arrival(self) -> bool:
        """Is everything decided from the arriving token alone? Then any chunk size gives the same state."""
        return not self.budget.limited and self.admission.prefill

    def window(self, context: int) -> int:
        """W: ring slots for rows of up to ``context`` tokens.

        The semantic window where admission owns one; the whole context where nothing else is asked for
        (the dense fast path); else what the parts protect.
        """
        if self.admission.window is not None:
            return min(self.admission.window, context)
        parts = (self.selection, self.storage, self.completion, self.admission)
        if not self.budget.limited and all(part.idle for part in parts):
            return context
        return min(self.ring_tokens, context)

    @property
    def ring_tokens(self) -> int:
        """Newest tokens that live in the ring, where admission owns no window.

        With a budget that acts while decoding, not those that storage holds exactly: they may be evicted.
        """
        exact = 0 if self.decides_later else self.storage.recent
        return max(self.protects, exact, self.selection.recent, 1)

    def exact_slots(self, window: int) -> int:
        """Paged slots a stream holds in the model's own dtype before storage takes older ones.

        0 where storage has all pages: beyond a ring of ``window`` nothing needs to be exact.
        """
        return max(self.storage.recent - window, 0) if self.decides_later else 0

    def paged(self, context: int) -> bool:
        """Can a token outlive the window at all, in pages or in what completes them?"""
        none = self.admission.rejects_all and self.sinks == 0 and self.completion.idle
        return self.window(context) < context and not none

    def __repr__(self) -> str:
        words = [repr(part) for part in self.parts if not part.idle]
        words += [f"{name}({getattr(self, name)})" for name in ("sinks", "recent") if getattr(self, name)]
        return " + ".join(dict.fromkeys(words)) or "full"  # one word may stand for parts of two places


def _flatten(policy: Policy) -> tuple[tuple[Any, ...], int]:
    """A policy is a pytree: its parts' dials and the sinks are leaves, all else is structure."""
    return (*policy.parts, policy.sinks), policy.recent


def _unflatten(recent: int, children: Sequence[Any]) -> Policy:
    policy = object.__new__(Policy)
    vars(policy).update(zip((*PLACES, "sinks"), children), recent=recent)
    return policy


jax.tree_util.register_pytree_node(Policy, _flatten, _unflatten)


def _refuse_illegal_pairs(p: Policy) -> None:
    """Refuses parts that exclude each other, a rule a paragraph; the message names both and the reason."""
    if p.eviction.scores_prompt and p.budget.limited and p.budget.when != "after_prompt":
        other = p.eviction.on_arrival or "an eviction that ranks on arrival"
        raise PolicyError(
            f"{p.eviction!r} cannot serve {p.budget!r}: it ranks the tokens of a prompt, and a budget that "
            f"acts while decoding asks about generated tokens too. Use {other}, or when=after_prompt."
        )
    if p.budget.from_scores and p.budget.when != "after_prompt":
        raise PolicyError(
            f"{p.budget!r} divides a layer's slots by the scores of the whole prompt, which exist only after "
            "the prompt. Use when=after_prompt."
        )
    if p.budget.voted and p.eviction.idle:
        raise PolicyError(
            f"{p.budget!r} as a budget says how many tokens a prompt needs, and no part says which. Write "
            f"'{p.budget!r}', which ranks by its votes too, or an eviction with it: 'snapkv + {p.budget!r}'."
        )
    if p.eviction.name == p.budget.name and repr(p.eviction) != repr(p.budget):
        raise PolicyError(
            f"{p.eviction!r} ranks and {p.budget!r} counts: one word for both is one part, with one set of "
            f"arguments. Write '{p.eviction!r}', or take the ranking or the budget of another method."
        )
    if p.eviction.shared_ranking and p.decides_later and not p.admission.alike:
        raise PolicyError(
            f"{p.eviction!r} keeps the same tokens in all KV heads of a layer, but {p.admission!r} admits "
            "other tokens to each of them. Use an eviction that ranks head by head, or a budget with "
            "when=after_prompt."
        )
    if not p.eviction.idle and not p.budget.limited:
        raise PolicyError(
            f"{p.eviction!r} ranks tokens, but {p.budget!r} never evicts. Add a budget, for "
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
    least = p.budget.least_beside(p.protected)
    protected = p.sinks + max(p.protects, exact, p.selection.recent, window or 0)
    if least is not None and least < max(protected, 1):
        raise PolicyError(
            f"{p.budget!r} leaves a stream {least} slots, fewer than the {protected} protected tokens "
            f"(sinks={p.sinks}, newest={protected - p.sinks}). Raise the budget to at least {protected}, or "
            "protect fewer."
        )
    if not p.selection.idle and p.exact_slots(window or p.ring_tokens):
        raise PolicyError(
            f"{p.selection!r} chooses in one list of pages, but {p.storage!r} with {p.budget!r} holds two: "
            f"the newest {p.storage.recent} of what is retained as they came, older ones in codes. Use "
            "native storage, or a budget with when=after_prompt."
        )
    protected = p.sinks + p.protects
    if p.budget.needs_logits and least is not None and protected >= least:
        raise PolicyError(
            f"{p.budget!r} leaves a layer {least} slots on a sure step, but sinks={p.sinks} and the newest "
            f"{p.protects} tokens of {p.eviction!r} are protected: none is left to rank. Protect fewer, or "
            "raise tight."
        )
    if not p.completion.idle and not p.selection.idle and not p.storage.exact:
        raise PolicyError(
            f"{p.storage!r} cannot hold what {p.completion!r} must subtract for {p.selection!r}: a page's "
            "scale grows after its tokens were absorbed, and the difference would not cancel. Use native "
            "storage."
        )
    if not p.completion.idle and p.selection.estimates:
        raise PolicyError(
            f"{p.completion!r} would count twice beside {p.selection!r}, whose estimate stands for the "
            "unread tokens already. Leave one of them out."
        )
    drops = p.selection.idle and p.admission.idle and not p.budget.limited
    if not p.completion.idle and drops:
        raise PolicyError(
            f"{p.completion!r} stands for what a read leaves out, and this policy leaves nothing out. Add "
            f"what drops tokens or chooses among them, for example 'topk(0.01) + {p.completion!r}'."
        )
