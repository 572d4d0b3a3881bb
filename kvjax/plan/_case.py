"""What is planned: a model, a policy, devices, rows and a context; and the slots that its streams hold."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode, layer
from kvjax.algebra import Frame, Policy
from kvjax.cli import InputError
from kvjax.models.decoder import Decoder
from kvjax.models.spec import ModelSpec
from kvjax.sharding.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class Case:
    """One question.

    Attributes:
      spec: the model's sizes.
      policy: what the KV cache keeps.
      mesh: the devices, which need not be here.
      rows: B.
      context: tokens that every row has seen.
      dtype: of weights and cache.
      share: of the tokens that learned admission may admit, or that a vote may keep, those that stay; None
        where the policy itself says.
      imbalance: slots on the fullest device over the mean of all devices, where heads are filled unevenly.
      chunk: tokens of a row that are read at a time.
      depth: layers of the model; ``spec`` may hold fewer.
    """

    spec: ModelSpec
    policy: Policy
    mesh: Mesh
    rows: int
    context: int
    dtype: str = "bfloat16"
    share: float | None = None
    imbalance: float = 1.0
    chunk: int = 256
    depth: int | None = None

    @property
    def network(self) -> Decoder:
        """The mathematics."""
        return Decoder(self.spec)

    def shallow(self, layers: int) -> Case:
        """The same with the first layers alone, which hold what they hold in the whole model."""
        first = dataclasses.replace(self.spec, num_layers=layers, windows=self.spec.windows[:layers])
        return dataclasses.replace(self, spec=first, depth=self.depth or self.spec.num_layers)

    @property
    def itemsize(self) -> int:
        """Bytes of a number of weights and cache."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def read_at_once(self) -> int:
        """Tokens of a row that go through a layer together while prompts are read."""
        return decode.bucket(self.context) if self.policy.whole_prompt else self.chunk

    @property
    def fullest(self) -> float:
        """``imbalance``, or 1 where a policy fills all streams alike."""
        return self.imbalance if uneven(self.policy) else 1.0


def learned_admission(policy: Policy) -> bool:
    """Do the tokens alone tell which of them outlive the window?"""
    return not policy.admission.idle and not policy.admission.rejects_all


def needs_share(policy: Policy) -> bool:
    """Is it unknown before a prompt is seen how much of it stays?"""
    return policy.budget.voted or learned_admission(policy)


def uneven(policy: Policy) -> bool:
    """May heads hold different numbers of slots?"""
    return needs_share(policy) or policy.budget.from_scores


def check(case: Case) -> None:
    """Refuses a case that cannot be planned.

    Raises:
      InputError: a share that is missing or in vain, a context beyond the model's positions.
      MeshError: a mesh that does not divide rows or heads.
    """
    spec = case.spec
    if case.share is None and needs_share(case.policy):
        raise InputError(
            f"--policy '{case.policy!r}' decides by the text how much stays, which no plan can know. Say it: "
            "--share 0.25 plans for a quarter of the tokens."
        )
    if case.share is not None and not needs_share(case.policy):
        raise InputError(
            f"--share {case.share:g}: '{case.policy!r}' says itself how much stays. Leave --share out."
        )
    if case.context > spec.max_positions:
        raise InputError(
            f"--context {case.context} is more than the model's {spec.max_positions} positions. Give at most "
            f"{spec.max_positions}."
        )
    case.mesh.check("plan", rows=case.rows, heads=spec.num_heads, kv_heads=spec.num_kv_heads)


def slots(case: Case) -> tuple[int, ...]:
    """Paged slots of a stream of each layer once a row has seen the whole context, mean over the heads.

    The prompt is taken as long as the context, so that what is generated later is not counted twice.
    """
    return tuple(_slots(case, index) for index in range(case.spec.num_layers))


def _slots(case: Case, index: int) -> int:
    policy, context = case.policy, case.context
    window = policy.window(context)
    if case.spec.windows[index] is not None or not policy.paged(context):
        return 0
    left = context - window
    found = [left]
    if policy.admission.rejects_all:
        found.append(policy.sinks)
    elif learned_admission(policy):
        found.append(math.ceil((case.share or 0) * left))
    if policy.budget.limited:
        target = max(_target(case, index), policy.protected)
        found.append(math.ceil(target) - window)  # a target counts the ring
    return max(min(found), 0)


def _target(case: Case, index: int) -> float:
    """Slots of a stream that the budget leaves, at most; mean over the heads."""
    budget = case.policy.budget
    if budget.voted:
        return (case.share or 0) * case.context
    frame, length = frame_of(case, index), jnp.full((1,), case.context, jnp.int32)
    if budget.from_scores:
        mean = budget.layer_mean(frame, length)
        assert mean is not None  # noqa: S101  (what such budgets have)
        return float(np.asarray(mean)[0])
    return float(np.asarray(budget.targets(frame, length, None)).max())


def frame_of(case: Case, index: int) -> Frame:
    """Where the target of a layer is asked for."""
    spec = case.spec
    total: Any = None
    k: Any = jax.ShapeDtypeStruct((1, spec.num_kv_heads, 1, spec.head_dim), jnp.dtype(case.dtype))
    layers = case.depth or spec.num_layers
    return layer.LayerInfo(case.policy, {}, index, layers, None, total).frame(k)
