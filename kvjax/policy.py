"""The algebra: six places, the part that does nothing in each, and the Policy that joins them.

| place      | question                                                     | do nothing   |
|------------|--------------------------------------------------------------|--------------|
| admission  | may this token outlive the window? (asked on arrival)        | AdmitAll     |
| eviction   | when a stream is over target, who goes? (a score, higher stays) | KeepRecent |
| selection  | which slots does this read visit? (removes nothing)          | SelectAll    |
| storage    | how is a slot held?                                          | Native       |
| budget     | how many live slots may this layer, head, step have?         | Unlimited    |
| completion | what stands in for what a read leaves out?                   | Nothing      |

Parts are frozen, hashable values: equal policies compile once, and ``repr`` is the name in results and
parses back (``kvjax.policy(repr(p)) == p``). A part declares in ``needs`` which quantities of a token it
reads; the others are absent, so an undeclared read fails while tracing and an unused quantity is never
computed. Values a part keeps with every token it names in ``keeps``; they move wherever the token moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp

from kvjax.cache.pages import Pages, Slots
from kvjax.cache.write import scattered
from kvjax.types import Network, Params, Turn, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


class PolicyError(ValueError):
    """A policy that cannot be built: unknown, out of range, or two parts that exclude each other."""


@dataclasses.dataclass(frozen=True)
class Every:
    """A budget that acts each time a row has seen a multiple of ``k`` tokens.

    Raises:
      PolicyError: k < 1.
    """

    k: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise PolicyError(f"every({self.k!r}) is no period. Give a whole number of tokens, at least 1.")

    def __repr__(self) -> str:
        return f"every({self.k})"


When = str | Every
"""When a budget acts: ``"after_prompt"``, ``"every_step"`` or ``Every(k)``."""


@pytree(static=("layers", "softcap", "turn"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """What a part may see of T tokens arriving at one layer; only declared quantities are there.

    Attributes:
      pos: true positions, EMPTY for padding.
      total: length of each row's prompt, known from the start.
      layer: index of this layer (may be traced).
      layers: how many there are.
      values: the declared quantities by name; read them through the properties.
      softcap, turn: what bounds the model's scores, and its RoPE at this layer; see ``Heads``.
    """

    pos: Int[Array, "B T"]
    total: Int[Array, " B"]
    layer: int | Int[Array, ""]
    layers: int
    values: dict[str, Array]
    softcap: float | None = None
    turn: Turn | None = None

    def _declared(self, name: str) -> Array:
        if name not in self.values:
            raise PolicyError(
                f"a part reads {name!r} of the arriving tokens without declaring it in `needs`."
            )
        return self.values[name]

    @property
    def k(self) -> Float[Array, "B K T H"]:
        """Keys after RoPE."""
        return self._declared("k")

    @property
    def v(self) -> Float[Array, "B K T H"]:
        """Values."""
        return self._declared("v")

    @property
    def k_pre(self) -> Float[Array, "B K T H"]:
        """Keys before RoPE."""
        return self._declared("k_pre")

    @property
    def q(self) -> Float[Array, "B N T H"]:
        """Queries after RoPE."""
        return self._declared("q")

    @property
    def q_pre(self) -> Float[Array, "B N T H"]:
        """Queries before RoPE."""
        return self._declared("q_pre")

    @property
    def hidden(self) -> Float[Array, "B T D"]:
        """The input of the attention block."""
        return self._declared("hidden")

    @property
    def mass(self) -> Float[Array, "B N T"]:
        """Attention each token of a prompt received, weighed by the eviction; there if it ``needs_mass``."""
        return self._declared("mass")


OBSERVABLE = ("k", "v", "k_pre", "q", "q_pre", "hidden")


@dataclasses.dataclass(frozen=True)
class Frame:
    """Where a target is asked for: this layer among ``layers``, and what a slot costs.

    Attributes:
      layer: index of the layer (may be traced).
      layers: number of layers.
      kv_heads: KV heads of a layer.
      slot_bytes: bytes of one live slot, K and V.
      confidence: what the budget said of the logits that produced each row's token; None for given tokens (a
        prompt, a chunk), and for budgets that do not look.
    """

    layer: Any
    layers: int
    kv_heads: int
    slot_bytes: float
    confidence: Float[Array, " B"] | None = None


class Part:
    """Anything that can stand in one of the six places. Subclasses are frozen dataclasses.

    Class attributes:
      name: how the part is called in the one-string form.
      place: the place it stands in.
      needs: fields of ``Observation`` it reads.
      keeps: names of the per-slot values it owns.
      learns: the method whose learned weights it reads, or "" for a part that learns nothing. They travel as
        ``weights[place]``, a list with one pytree a layer.
      shipped: the name of the weights a model may bring for it (``<model>/gates/<name>.safetensors``).
      fitted: arguments whose values weights are trained for; files note them, and other values are told.
    """

    name: ClassVar[str]
    place: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    keeps: ClassVar[tuple[str, ...]] = ()
    learns: ClassVar[str] = ""
    shipped: ClassVar[str] = "default"
    fitted: ClassVar[tuple[str, ...]] = ()

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        """Refuses learned weights that do not fit the network; the number of layers is checked already.

        Raises:
          PolicyError: names or shapes that do not fit.
        """

    def at_layer(self, weights: Sequence[Params], layer: int) -> Any:
        """What this part reads of its learned weights at one layer; by default that layer's own."""
        return weights[layer]

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        """Random weights of the right shapes, for the conformance laws; one pytree a layer."""
        raise NotImplementedError

    def arrive(self, params: Params | None, seen: Observation) -> dict[str, Float[Array, "B K T"]]:
        """Values for ``keeps``, asked once, when a token arrives."""
        del params, seen
        return {}

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = [
            (f"{f.name}=" if at else "") + _literal(getattr(self, f.name))
            for at, f in enumerate(fields)
            if at == 0 or getattr(self, f.name) != f.default
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name


def _literal(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else repr(value)


class Admission(Part):
    """May this token outlive the window?

    ``window`` is the semantic W of methods that own it (exact attention to the last W tokens), else None.
    ``prefill`` says whether the verdict hides a token from the prompt's own queries too; if not, a prompt is
    read with full attention, layer by layer, and the verdict acts on what it leaves behind.

    Class attributes:
      rejects_all: nothing outlives the window but sinks.
      alike: a token meets the same verdict in all KV heads of a layer.
    """

    place = "admission"
    window: int | None = None
    prefill: bool = True
    rejects_all: ClassVar[bool] = False
    alike: ClassVar[bool] = False

    def admit(self, params: Params | None, seen: Observation) -> Bool[Array, "B K T"]:
        """One bit per KV head and token, broadcastable; asked on arrival, acts at the door."""
        raise NotImplementedError


class Eviction(Part):
    """Who goes when a stream is over its target: the lowest score; equal scores keep the lowest positions.

    Class attributes:
      scores_prompt: the score of a token needs the whole prompt (SnapKV ...), so generated tokens have
        none and the budget can only act after the prompt.
      needs_mass: it ranks by the attention a token receives: of a whole prompt, ``seen.mass``; where the
        budget acts while decoding, the values it keeps follow every read (``weigh``, ``receive``).
      one_voice: all KV heads of a layer keep the same tokens. While decoding their slots then have one
        order, so that ``receive`` may take means over heads.
    """

    place = "eviction"
    scores_prompt: ClassVar[bool] = False
    needs_mass: ClassVar[bool] = False
    one_voice: ClassVar[bool] = False

    @property
    def protects(self) -> int:
        """Newest tokens this method never evicts."""
        return 0

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        """Rank of the slots that may go (``slots.live``) from what is kept with them; elsewhere anything."""
        raise NotImplementedError

    def weigh(self, age: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """What the attention of a query counts, by how many tokens of the same read came after it."""
        raise NotImplementedError

    def receive(
        self, slots: Slots, mass: Float[Array, "B N C"], count: Int[Array, "B 1 1"]
    ) -> dict[str, Float[Array, "B K C"]]:
        """New values after a read.

        Args:
          slots: values so far; as on arrival for tokens that were read for the first time.
          mass: of each slot, weighed attention of all queries of the read, per query head.
          count: queries of the read, at least 1.
        """
        raise NotImplementedError

    def score_prompt(self, params: Params | None, seen: Observation) -> Float[Array, "B K T"]:
        """Rank of every prompt token at once. By default: what ``score`` says of the arriving values."""
        meta = self.arrive(params, seen)
        pos = jnp.broadcast_to(seen.pos[:, None, :], (seen.pos.shape[0], 1, seen.pos.shape[1]))
        return self.score(params, Slots(pos=pos, live=pos >= 0, meta=meta))


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Picked:
    """What one read visits of a list: entries of the page list and, optionally, slots inside them.

    Attributes:
      pages: indices into the list's M entries, EMPTY for none; no index twice.
      slots: bitmask inside the picked pages, or None for all their slots.
    """

    pages: Int[Array, "B K J"]
    slots: Bool[Array, "B K J S"] | None


class Selection(Part):
    """Which slots a decode read visits; removes nothing. Prefill reads everything.

    Class attributes:
      splits: the part reads some tokens always and chooses among the others (two page lists).
    """

    place = "selection"
    splits: ClassVar[bool] = False

    @property
    def recent(self) -> int:
        """Newest tokens that every read sees exactly."""
        return 0

    def applies(self, layer: int) -> bool:
        """Is this layer read selectively?"""
        del layer
        return True

    def selectable(self, pos: Int[Array, "B T"], total: Int[Array, " B"]) -> Bool[Array, "B T"]:
        """Is the token chosen among (list 1) or always read (list 0)? Only asked if ``splits``."""
        del total
        return jnp.ones(pos.shape, bool)

    def summary_shapes(self, size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the per-page values, for pages of ``size`` slots."""
        del size, head_dim
        return {}

    def summarise(
        self, k: Float[Array, "Q S H"], live: Bool[Array, "Q S"]
    ) -> dict[str, Float[Array, "Q ..."]]:
        """Per-page values from a page's content; recomputed whenever the page is touched."""
        del k, live
        return {}

    def select(self, params: Params | None, q: Float[Array, "B N H"], pages: Pages, which: int) -> Picked:
        """The pages of list ``which`` that these queries visit."""
        raise NotImplementedError


class Storage(Part):
    """How a slot of GLOBAL is held."""

    place = "storage"
    exact: ClassVar[bool] = True
    scaled: ClassVar[bool] = False

    @property
    def recent(self) -> int:
        """Newest tokens held in the model's own dtype."""
        return 0

    def dtype(self, model: jnp.dtype) -> jnp.dtype:
        """Element type of the pool, for a model that computes in ``model``."""
        return model

    def width(self, head_dim: int) -> int:
        """Elements of a stored key or value.

        Raises:
          PolicyError: keys of ``head_dim`` channels have no place in this layout.
        """
        return head_dim

    def write(self, pages: Pages, page: Array, slot: Array, k: Array, v: Array) -> Pages:
        """Put k, v [..., H] into the slots; pages out of range are dropped."""
        return dataclasses.replace(
            pages,
            k=scattered(pages.k, (page, slot), k),
            v=scattered(pages.v, (page, slot), v),
        )

    def read(self, pages: Pages, page: Array, slot: Array) -> tuple[Array, Array]:
        """The k, v [..., H] a read would see in these slots."""
        return pages.k[page, slot], pages.v[page, slot]


class Budget(Part):
    """How many live slots a stream may have, ring included, and when that is enforced."""

    place = "budget"
    from_scores: ClassVar[bool] = False
    needs_logits: ClassVar[bool] = False
    when: When = "after_prompt"

    @property
    def limited(self) -> bool:
        """Does it ever ask anybody to leave?"""
        return True

    def confidence(self, logits: Float[Array, "B V"]) -> Float[Array, " B"]:
        """What the next step's targets depend on (``frame.confidence``); only asked if ``needs_logits``."""
        raise NotImplementedError

    @property
    def least(self) -> int | None:
        """The smallest target it can give, where that is known beforehand."""
        return None

    @property
    def most(self) -> int | None:
        """The largest target it can give, where that is known beforehand."""
        return None

    def targets(
        self, frame: Frame, seen: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B K"]:
        """Live slots for each stream of a layer, broadcastable to [B, K].

        Args:
          frame: which layer, and what a slot costs.
          seen: tokens each row has seen.
          scores: eviction scores over the prompt, -inf where the token may not stay and +inf where it
            must; only given when ``from_scores``.
        """
        raise NotImplementedError


class Completion(Part):
    """What stands in for what a read leaves out. Two modes, never mixed (kvjax/DESIGN.md, 5):

    without selection it absorbs a token when it is rejected or evicted and never subtracts; with
    selection it absorbs every selectable token once, and subtracts exactly what a read visits.
    """

    place = "completion"

    def empty(self, rows: int, heads: int, head_dim: int, context: int) -> Any:
        """The summary of nothing: a pytree with leading axis B in every leaf."""
        del rows, heads, head_dim, context

    def absorb(
        self,
        params: Params | None,
        summary: Any,
        k: Float[Array, "B K T H"],
        v: Float[Array, "B K T H"],
        pos: Int[Array, "B K T"],
        take: Bool[Array, "B K T"],
    ) -> Any:
        """Fold the tokens where ``take`` into the summary, as they are stored (float32 inside)."""
        raise NotImplementedError

    def read(
        self, params: Params | None, summary: Any, q: Float[Array, "B N T H"], visited: Visited | None
    ) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
        """The partial (out, lse) of everything absorbed, less what this read visited."""
        raise NotImplementedError


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Visited:
    """The slots a selective read visited, as they are stored.

    Attributes:
      k, v: dequantised keys and values.
      pos: true positions.
      live: which of the J * S candidates were really visited.
    """

    k: Float[Array, "B K C H"]
    v: Float[Array, "B K C H"]
    pos: Int[Array, "B K C"]
    live: Bool[Array, "B K C"]


# --- the parts that do nothing -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class AdmitAll(Admission):
    """Every token may outlive the window."""

    name = "admit_all"
    alike = True

    def admit(self, params: Params | None, seen: Observation) -> Bool[Array, "B K T"]:
        """All ones."""
        del params
        return jnp.ones((seen.pos.shape[0], 1, seen.pos.shape[1]), bool)


@dataclasses.dataclass(frozen=True, repr=False)
class KeepRecent(Eviction):
    """The oldest goes."""

    name = "keep_recent"

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        """The position itself."""
        del params
        return slots.pos.astype(jnp.float32)


@dataclasses.dataclass(frozen=True, repr=False)
class SelectAll(Selection):
    """Every read visits every slot."""

    name = "select_all"

    def applies(self, layer: int) -> bool:
        """Never selective."""
        del layer
        return False


@dataclasses.dataclass(frozen=True, repr=False)
class Native(Storage):
    """The model's own dtype."""

    name = "native"


@dataclasses.dataclass(frozen=True, repr=False)
class Unlimited(Budget):
    """Nobody has to leave."""

    name = "unlimited"

    @property
    def limited(self) -> bool:
        """Never."""
        return False


@dataclasses.dataclass(frozen=True, repr=False)
class Nothing(Completion):
    """What is not read counts for nothing."""

    name = "nothing"


# --- the policy ----------------------------------------------------------------------------------

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


def _refuse_illegal_pairs(p: Policy) -> None:
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
