"""The policy: one part for each of the six places, what follows from the six, and which pairs are refused.

Why: kvjax/DESIGN.md, 2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax.algebra._admission import Admission, AdmitAll
from kvjax.algebra._arguments import Whole
from kvjax.algebra._budget import Budget, Spent, Unlimited
from kvjax.algebra._completion import Completion, Nothing
from kvjax.algebra._errors import PolicyError
from kvjax.algebra._eviction import Eviction, KeepRecent
from kvjax.algebra._observation import OBSERVABLE, OF_EVICTIONS
from kvjax.algebra._part import Part
from kvjax.algebra._selection import SelectAll, Selection
from kvjax.algebra._storage import Native, Storage
from kvjax.cache.hosted import Near

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
    """Six choices and two protections: what a decode loop does with the KV state.

    A policy is both a static value and a pytree: equal policies have equal ``repr``, and policies that differ
    only in hyperparameters (budgets, thresholds, rates; see ``Part``) run the same compiled programs.

    Attributes:
      admission, eviction, selection, storage, budget, completion: one part per place.
      sinks: first positions of a row, always admitted and never evicted.
      recent: newest tokens, never evicted.

    Raises:
      PolicyError: two parts exclude each other; the message names both and the reason.
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
                right = getattr(part, "place", type(part).__name__)
                raise PolicyError(
                    f"Policy({place}=...) takes an {kind.__name__}, but {part!r} is for {right}. "
                    f"Write Policy({right}={part!r})."
                )
            needs = frozenset().union(*(one.needs for one in part.chain))
            others = [name for name in OBSERVABLE if name not in OF_EVICTIONS]
            unknown = needs - set(OBSERVABLE if place == "eviction" else others)
            if unknown:
                raise PolicyError(
                    f"{part!r} needs {', '.join(sorted(unknown))}, which {place} cannot see. It may name "
                    f"{', '.join(others)}; an eviction may also name {' and '.join(OF_EVICTIONS)}."
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
    def chain(self) -> tuple[Part, ...]:
        """The parts, each wrapper after what it holds."""
        return tuple(part for whole in self.parts for part in whole.chain)

    @property
    def needs(self) -> frozenset[str]:
        """All quantities of an arriving token that some part reads."""
        return frozenset().union(*(part.needs for part in self.chain))

    @property
    def keeps(self) -> tuple[str, ...]:
        """Names of all values kept per slot, as ``place.name``; an eviction that acts once keeps none."""
        parts = [p for p in self.parts if p.place != "eviction" or self.decides_later]
        return tuple(f"{part.place}.{name}" for part in parts for name in part.keeps)

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of those values in ``keeps`` that are not one float32 per slot."""
        return {f"{part.place}.{name}": kind for part in self.parts for name, kind in part.arrays.items()}

    @property
    def structure(self) -> str:
        """The policy without hyperparameters and sinks; a state is continued by the same structure only."""
        words = [part.structure for part in self.chain if not part.idle]
        words += [f"recent({self.recent})"] if self.recent else []
        return " + ".join(dict.fromkeys(words)) or "full"

    @property
    def decides_later(self) -> bool:
        """Does the budget act while decoding?"""
        return self.budget.limited and self.budget.when != "after_prompt"

    @property
    def after_prompt(self) -> Policy:
        """What is left to do once a prompt was cut: the same for all evictions and budgets that then rest.

        What feeds tokens to a state is compiled for this policy, so that they share programs.
        """
        if self.decides_later or not self.budget.limited:
            return self
        return dataclasses.replace(self, eviction=KeepRecent(), budget=Spent(), recent=self.protects)

    @property
    def ranks_held(self) -> bool:
        """Does the eviction look at all that a KV head holds whenever the budget acts while decoding?"""
        return self.decides_later and self.eviction.later.ranks_held

    @property
    def queries(self) -> dict[str, int]:
        """How many of the newest queries of every head are kept, by name ("q", "q_pre")."""
        ranks = self.eviction.later
        count = ranks.queries if self.ranks_held else 0
        return {name: count for name in ("q", "q_pre") if count and name in ranks.needs}

    @property
    def tracks_mass(self) -> bool:
        """Must a read return the attention that each slot received?"""
        return self.decides_later and self.eviction.later.needs_mass

    @property
    def learned(self) -> tuple[Part, ...]:
        """The parts that read learned weights."""
        parts = [*self.chain]
        if self.eviction.later is not self.eviction:
            parts.append(self.eviction.later)
        return tuple(part for part in parts if part.learns)

    @property
    def protects(self) -> int:
        """Newest tokens that are never evicted."""
        return max(self.recent, self.eviction.protects)

    @property
    def protected(self) -> int:
        """Tokens of a long prompt that stay whatever the target of a KV head: the sinks and the newest.

        Where the budget acts while decoding, the whole ring counts, too.
        """
        return self.sinks + (self.ring_tokens if self.decides_later else self.protects)

    @property
    def whole_prompt(self) -> bool:
        """Must the whole prompt be seen before any token may be dropped or hidden?"""
        once = self.budget.limited and self.budget.when == "after_prompt"
        cuts = self.ranks_held or (self.decides_later and self.budget.from_scores)
        later = self.tracks_mass or (cuts and not self.budget.spares_prompt)
        other = self.decides_later and self.eviction.later is not self.eviction
        return once or later or other or not self.admission.prefill

    @property
    def holds_prompt(self) -> bool:
        """Is a prompt read into a full cache, of which all layers are cut at the end?"""
        return self.eviction.replays or self.budget.over_layers

    @property
    def on_arrival(self) -> bool:
        """Is everything decided from the arriving token alone? Then any chunk size gives the same state."""
        return not self.budget.limited and self.admission.prefill

    def window(self, context: int) -> int:
        """W: ring slots for rows of up to ``context`` tokens.

        The window that admission defines, if any. Else the whole context where no part needs pages (the dense
        fast path), or the number of tokens that the parts protect.
        """
        if self.admission.window is not None:
            return min(self.admission.window, context)
        parts = (self.selection, self.storage, self.completion, self.admission)
        if not self.budget.limited and all(part.idle for part in parts):
            return context
        return min(self.ring_tokens, context)

    @property
    def ring_tokens(self) -> int:
        """Newest tokens that live in the ring, where admission defines no window.

        Without those that storage holds exactly if the budget acts while decoding, since they may be evicted.
        """
        exact = 0 if self.decides_later else self.storage.recent
        return max(self.protects, exact, self.read_exactly, 1)

    @property
    def read_exactly(self) -> int:
        """Newest tokens that the ring holds for the selection.

        None for one that drafts, where a longer ring would show: in codes, and in what a cut prompt drops.
        """
        hidden = self.storage.exact and self.on_arrival and self.admission.idle
        return self.selection.recent if self.selection.drafts is None or hidden else 0

    def exact_slots(self, window: int) -> int:
        """Paged slots that a KV head holds in the model's own dtype before storage encodes older ones.

        0 where storage encodes all pages: no slot beyond a ring of ``window`` has to be exact.
        """
        return max(self.storage.recent - window, 0) if self.decides_later else 0

    def near(self, context: int, layer: int) -> Near | None:
        """What a layer's device has of the tokens in host memory; None where none are.

        Raises:
          PolicyError: fewer than a read chooses.
        """
        storage, selection = self.storage, self.selection
        if not storage.hosted or not selection.applies(layer) or not self.paged(context):
            return None
        unit, most = selection.unit, selection.most_units(context)
        units = storage.cached(context) // unit
        if units < most:
            raise PolicyError(
                f"{storage!r}: of a context of {context} tokens the device's cache holds {units} units of "
                f"{unit} tokens, and a read of {selection!r} chooses up to {most}. Give cache="
                f"{math.ceil(1000 * most * unit / context) / 1000:g} or more, or choose fewer."
            )
        return Near(units=units, unit=unit, keys=selection.ranks_keys, index=storage.index)

    def paged(self, context: int) -> bool:
        """Can a token outlive the window, in pages or in a completion's summary?"""
        none = self.admission.rejects_all and self.sinks == 0 and self.completion.idle
        return self.window(context) < context and not none

    def __repr__(self) -> str:
        words = [part.word for part in self.chain if not part.idle]
        words += [f"{name}({getattr(self, name)})" for name in ("sinks", "recent") if getattr(self, name)]
        return " + ".join(dict.fromkeys(words)) or "full"  # one word may stand for parts of two places


def _flatten(policy: Policy) -> tuple[tuple[Any, ...], int]:
    """A policy is a pytree: its hyperparameters and sinks are leaves, all else is structure."""
    return (*policy.parts, policy.sinks), policy.recent


def _unflatten(recent: int, children: Sequence[Any]) -> Policy:
    policy = object.__new__(Policy)
    vars(policy).update(zip((*PLACES, "sinks"), children), recent=recent)
    return policy


jax.tree_util.register_pytree_node(Policy, _flatten, _unflatten)


def _refuse_illegal_pairs(p: Policy) -> None:
    """Refuses parts that exclude each other; one rule per paragraph."""
    for one in p.eviction.chain[:-1]:
        if isinstance(one, Eviction) and one.later is not one:
            raise PolicyError(
                f"{p.eviction!r}: {one.word} says what ranks the answer, and wrappers act on the prompt. "
                f"Write {one.word} last."
            )
    later = p.eviction.later
    if later is not p.eviction and not p.decides_later:
        raise PolicyError(
            f"{p.eviction!r}: {p.budget!r} acts after the prompt alone, so {later!r} would rank nothing. "
            f"Give when=every(64), or leave {p.eviction.word} out."
        )
    if later is not p.eviction and p.budget.spares_prompt:
        raise PolicyError(
            f"{p.eviction!r}: {p.budget!r} keeps the prompt, so only {later!r} would rank anything. Write "
            f"'{later!r} + {p.budget!r}', or leave prompt=keep out."
        )
    if later is not p.eviction and p.eviction.chain[0].learns and later.learns:
        raise PolicyError(
            f"{p.eviction!r}: both evictions read learned weights, and a policy holds those of one. Use one "
            "that learns nothing for the prompt or for the answer."
        )
    if later.scores_prompt and p.decides_later and not later.ranks_held:
        other = later.on_arrival or "an eviction that ranks on arrival"
        raise PolicyError(
            f"{later!r} cannot serve {p.budget!r}: it ranks only the tokens of a prompt, and a budget "
            f"that acts while decoding needs ranks of generated tokens, too. Use {other}, or "
            "when=after_prompt."
        )
    if p.budget.voted and p.eviction.idle:
        raise PolicyError(
            f"{p.budget!r} as a budget decides how many tokens stay, and no part decides which. Write "
            f"'{p.budget!r}', which also ranks by its votes, or add an eviction: 'snapkv + {p.budget!r}'."
        )
    ranks, *wrappers = p.eviction.chain
    wrappers = wrappers if later is p.eviction else wrappers[:-1]
    if ranks.name == p.budget.name and repr(ranks) != repr(p.budget):
        raise PolicyError(
            f"{ranks!r} ranks and {p.budget!r} counts, but one word for both takes one set of "
            f"arguments. Write '{ranks!r}', or take the ranking or the budget of another method."
        )
    for at, one in enumerate(wrappers):
        if one.name in [other.name for other in wrappers[:at]]:
            raise PolicyError(f"{p.eviction!r} wraps twice by {one.name}. Write it once.")
        if isinstance(one, Eviction) and one.runs and one is not wrappers[-1]:
            raise PolicyError(
                f"{p.eviction!r}: {wrappers[-1].word} would choose anew what {one.word} keeps in runs. Write "
                f"{one.word} last, and no other wrapper that keeps runs."
            )
    if p.eviction.runs and not p.admission.shared_verdict:
        raise PolicyError(
            f"{p.eviction!r} keeps the same tokens in all KV heads of a layer, but {p.admission!r} admits "
            "different tokens to each of them. Use an eviction that ranks each head on its own."
        )
    if p.eviction.shared_ranking and p.decides_later and not p.admission.shared_verdict:
        raise PolicyError(
            f"{p.eviction!r} keeps the same tokens in all KV heads of a layer, but {p.admission!r} admits "
            "different tokens to each of them. Use an eviction that ranks each head on its own, or a budget "
            "with when=after_prompt."
        )
    holder, does = (
        (p.eviction, "feeds a prompt twice") if p.eviction.replays else (p.budget, "holds a prompt")
    )
    for one in p.chain if p.holds_prompt else ():
        unseen = sorted(one.needs - {"k", "v", "wo_norm"})
        if one is not p.eviction.chain[0] and unseen:
            raise PolicyError(
                f"{holder!r} {does} and then cuts it, when its keys and values are all that is left, "
                f"but {one.word} reads {' and '.join(unseen)}. Leave one of them out."
            )
    if p.holds_prompt and p.admission.prefill and not p.admission.idle:
        raise PolicyError(
            f"{holder!r} reads a prompt into a full cache before it cuts, but {p.admission!r} hides "
            "tokens while a prompt is read. Leave one of them out."
        )
    if not p.eviction.idle and not p.budget.limited:
        raise PolicyError(
            f"{p.eviction!r} ranks tokens, but {p.budget!r} never evicts. Add a budget, for example "
            f"'{p.eviction!r} + uniform(512)'."
        )
    window = p.admission.window
    exact = 0 if p.decides_later else p.storage.recent
    for name, newest in (("recent", p.protects), (repr(p.storage), exact)):
        if window is not None and newest > window:
            raise PolicyError(
                f"{p.admission!r} sets the window to {window} tokens, but {name} protects the newest "
                f"{newest}. Protect at most {window}, or widen the window."
            )
    least = p.budget.least_beside(p.protected)
    protected = p.sinks + max(p.protects, exact, p.read_exactly, window or 0)
    if least is not None and least < max(protected, 1):
        raise PolicyError(
            f"{p.budget!r} leaves a KV head {least} slots, fewer than the {protected} protected tokens "
            f"(sinks={p.sinks}, newest={protected - p.sinks}). Raise the budget to at least {protected}, or "
            "protect fewer."
        )
    if p.selection.drafts is not None and p.decides_later:
        raise PolicyError(
            f"{p.selection!r}: what is drafted is written only when it is verified, and {p.budget!r} would "
            "evict between the drafted tokens, so one read could not verify them. Use a budget with "
            "when=after_prompt, or leave the draft out."
        )
    if p.selection.drafts is not None and not p.storage.exact:
        raise PolicyError(
            f"{p.selection!r}: {p.storage!r} codes a token when newer ones come, and one read that verifies "
            "several shows it exact to all of them: the text would not be that of the policy without a "
            "draft. Use native storage, or leave the draft out."
        )
    if not p.selection.idle and p.exact_slots(window or p.ring_tokens):
        raise PolicyError(
            f"{p.selection!r} chooses from one list of pages, but {p.storage!r} with {p.budget!r} holds two: "
            f"one for the newest {p.storage.recent} retained tokens in the model's dtype, one for older "
            "tokens in codes. Use native storage, or a budget with when=after_prompt."
        )
    protected = p.sinks + p.protects
    if p.budget.needs_logits and least is not None and protected >= least:
        raise PolicyError(
            f"{p.budget!r} leaves a layer {least} slots at a confident step, but sinks={p.sinks} and the "
            f"newest {p.protects} tokens of {p.eviction!r} are protected: no slot is left to rank. Protect "
            "fewer, or raise tight."
        )
    if p.storage.hosted:
        _refuse_beside_host(p)
    if not p.completion.idle and p.selection.acts and not p.storage.exact:
        raise PolicyError(
            f"{p.storage!r} does not work with {p.completion!r} and {p.selection!r}: a page's scale grows "
            "after its tokens were absorbed, so a read would subtract other values than were added. Use "
            "native storage."
        )
    if not p.completion.idle and p.storage.turned:
        raise PolicyError(
            f"{p.completion!r} reads keys in the channels it was trained for, and {p.storage!r} holds them "
            "turned. Leave hadamard out."
        )
    if not p.completion.idle and p.selection.estimates:
        raise PolicyError(
            f"{p.completion!r} would count twice beside {p.selection!r}, whose estimate already represents "
            "the unread tokens. Leave one of them out."
        )
    drops = not p.selection.acts and p.admission.idle and not p.budget.limited
    if not p.completion.idle and drops:
        raise PolicyError(
            f"{p.completion!r} represents what a read leaves out, and this policy leaves nothing out. Add a "
            f"part that drops tokens or chooses among them, for example 'topk(0.01) + {p.completion!r}'."
        )


def _refuse_beside_host(p: Policy) -> None:
    """Refuses what would bring everything back to the device, or change what lies in host memory."""
    if not p.selection.acts:
        raise PolicyError(
            f"{p.storage!r}: every read visits everything, so every step would bring all pages back. Add a "
            "selection, for example 'quest(chunks=32) + host'."
        )
    if not p.selection.by_worth:
        arrays = p.selection.arrays.values()
        index = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays)
        raise PolicyError(
            f"{p.storage!r} does not work with {p.selection!r}, which reads its whole list; and {index} "
            "bytes of each token that it compares would stay on the device, beside 512 of keys and values of "
            "128 channels at 16 bits. Use quest, topk or topk_pages, or leave host out."
        )
    if p.storage.index is not None and not (p.selection.ranks_keys and p.storage.exact):
        has = f"{p.selection!r} ranks by values of a page" if p.storage.exact else "the keys are in codes"
        raise PolicyError(f"{p.storage!r}: {has}, so there are no keys to code for it. Leave keys out.")
    if p.decides_later:
        raise PolicyError(
            f"{p.storage!r}: {p.budget!r} evicts while decoding, and pages in host memory are never written "
            "again. Use a budget with when=after_prompt, or leave host out."
        )
    if p.storage.foresees:
        raise PolicyError(
            f"{p.storage!r}: {p.storage.chain[0].word} codes groups of tokens, and a unit that is brought "
            "alone cannot be read. Use int8, int4, fp8 or the model's dtype."
        )
    if not p.completion.idle and not (p.admission.idle and not p.budget.limited):
        raise PolicyError(
            f"{p.storage!r}: while a prompt is read {p.completion!r} subtracts all that is kept, which with "
            "an admission or a budget is not all there is, so all of it would be brought at once. Leave one "
            "of the three out."
        )
    if p.keeps:
        raise PolicyError(
            f"{p.storage!r}: {', '.join(p.keeps)} is kept with every slot, and pages in host memory hold "
            "keys, values and positions alone. Leave host out."
        )
