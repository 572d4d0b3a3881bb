"""Admission: may this token outlive the window? Asked once, on arrival."""

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

    ``window`` is the semantic W of methods that own it (exact attention to the last W tokens), else None.
    ``prefill`` says whether the verdict hides a token from the prompt's own queries too; if not, a prompt is
    read with full attention, layer by layer, and the verdict acts on what it leaves behind.

    Class attributes:
      rejects_all: nothing outlives the window but sinks.
      alike: a token is admitted to all KV heads of a layer or to none.
    """

    place = "admission"
    window: int | None = None
    prefill: bool = True
    rejects_all: ClassVar[bool] = False
    alike: ClassVar[bool] = False

    def admit(self, params: Params | None, observed: Observation) -> Bool[Array, "B K T"]:
        """One bit per KV head and token, broadcastable; asked on arrival, acts at the door."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, repr=False)
class AdmitAll(Admission):
    """Every token may outlive the window."""

    name = "admit_all"
    idle = True
    alike = True

    def admit(self, params: Params | None, observed: Observation) -> Bool[Array, "B K T"]:
        """All ones."""
        return jnp.ones((observed.pos.shape[0], 1, observed.pos.shape[1]), bool)
