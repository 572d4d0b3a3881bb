"""The policy: one part for each of the six places, and what follows from the six together."""

from __future__ import annotations

import dataclasses

from kvjax.policy.admission import Admission, AdmitAll
from kvjax.policy.budget import Budget, Every, Unlimited
from kvjax.policy.completion import Completion, Nothing
from kvjax.policy.errors import PolicyError
from kvjax.policy.eviction import Eviction, KeepRecent
from kvjax.policy.legal import refuse_illegal_pairs
from kvjax.policy.part import Part
from kvjax.policy.selection import SelectAll, Selection
from kvjax.policy.storage import Native, Storage

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
        for name in ("sinks", "recent"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise PolicyError(
                    f"{name}({value!r}) is no number of tokens. Give a whole number, 0 or more."
                )
        refuse_illegal_pairs(self)

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
        """Newest tokens nobody may evict."""
        return max(self.recent, self.eviction.protects)

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
        idle = (self.budget.limited, self.selection != SelectAll(), self.storage != Native())
        if not any(idle) and self.completion == Nothing() and self.admission == AdmitAll():
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
        """Slots of GLOBAL a stream holds in the model's own dtype before storage takes older ones.

        0 where storage has all of GLOBAL: beyond a ring of ``window`` nothing needs to be exact.
        """
        return max(self.storage.recent - window, 0) if self.decides_later else 0

    def paged(self, context: int) -> bool:
        """Can a token outlive the window at all, in GLOBAL or in what completes it?"""
        nobody = self.admission.rejects_all and self.sinks == 0 and self.completion == Nothing()
        return self.window(context) < context and not nobody

    def most_slots(self, context: int, arriving: int) -> int | None:
        """The most slots of GLOBAL a stream can own while ``arriving`` tokens at a time come in.

        None where only the tokens themselves can tell (learned admission).
        """
        bounds = []
        if self.admission.rejects_all:
            bounds.append(self.sinks)
        elif self.admission == AdmitAll():
            bounds.append(max(context - self.window(context), 0))
        bounded = self.tracks_mass or (self.budget.limited and not self.whole_prompt)
        if bounded and self.budget.most is not None:
            between = self.budget.when.k if isinstance(self.budget.when, Every) else 1
            floor = self.sinks + self.window(context)
            bounds.append(max(self.budget.most, floor) - self.window(context) + arriving + between - 1)
        return min(bounds, default=None)

    def bounds(self, context: int, arriving: int) -> tuple[int | None, ...]:
        """``most_slots`` for each of GLOBAL's rooms: one, or exact slots and those that storage holds."""
        most, exact = self.most_slots(context, arriving), self.exact_slots(self.window(context))
        if not exact:
            return (most,)
        # A slot moves on when the exact ones are as many as they may be.
        if most is None:
            return exact + arriving, None
        return min(exact + arriving, most), max(most - exact, 0)

    def __repr__(self) -> str:
        idle = (AdmitAll(), KeepRecent(), SelectAll(), Native(), Unlimited(), Nothing())
        words = [repr(part) for part, nothing in zip(self.parts, idle) if part != nothing]
        words += [f"{name}({getattr(self, name)})" for name in ("sinks", "recent") if getattr(self, name)]
        return " + ".join(words) or "full"
