"""Admission: may this token outlive the window? Asked once, when the token arrives."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp

from kvjax.algebra._observation import Observation
from kvjax.algebra._part import Part
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool


class Admission(Part):
    """May this token outlive the window?

    ``window`` is W of a method that defines one (exact attention to the last W tokens), else None. With
    ``prefill`` a rejected token is hidden from the prompt's own queries, too. Without it a prompt is read
    with full attention, layer by layer, and the verdict is applied to the cache afterwards.

    Class attributes:
      rejects_all: only sinks outlive the window.
      shared_verdict: a layer admits a token to all of its KV heads or to none.
      dial: the field of which a lower value admits more, or "".
    """

    place = "admission"
    window: int | None = None
    prefill: bool = True
    rejects_all: ClassVar[bool] = False
    shared_verdict: ClassVar[bool] = False
    dial: ClassVar[str] = ""

    def admit(self, params: Params | None, observed: Observation) -> Bool[Array, "B K T"]:
        """One bit per KV head and token, broadcastable: computed on arrival, applied at the window exit."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, repr=False)
class AdmitAll(Admission):
    """Every token may outlive the window."""

    name = "admit_all"
    idle = True
    shared_verdict = True

    def admit(self, params: Params | None, observed: Observation) -> Bool[Array, "B K T"]:
        return jnp.ones((observed.pos.shape[0], 1, observed.pos.shape[1]), bool)
