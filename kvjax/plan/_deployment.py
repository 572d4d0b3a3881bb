"""What is planned: a model, a policy, devices, rows and a context."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.cli import InputError
from kvjax.models.decoder import Decoder
from kvjax.models.spec import ModelSpec
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.specs import DATA, TENSOR


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model under a policy on devices that need not be here.

    Attributes:
      spec: the model's sizes.
      policy: what the KV cache keeps.
      mesh: the devices.
      rows: B.
      context: tokens that every row has seen.
      dtype: of weights and cache.
      weight_dtype: what matrices are quantised to, or None.
      share: of the tokens that learned admission may admit, or that a vote may keep, those that stay; None if
        the policy itself decides.
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
    weight_dtype: str | None = None
    share: float | None = None
    imbalance: float = 1.0
    chunk: int = 256
    depth: int | None = None

    @property
    def network(self) -> Decoder:
        return Decoder(self.spec).on(self.mesh)

    def shallow(self, layers: int) -> Deployment:
        """The same with the first layers only, which hold what they hold in the whole model."""
        first = dataclasses.replace(self.spec, num_layers=layers, windows=self.spec.windows[:layers])
        return dataclasses.replace(self, spec=first, depth=self.depth or self.spec.num_layers)

    @property
    def itemsize(self) -> int:
        """Bytes of one number of weights and cache."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def device_rows(self) -> int:
        """Rows of one device."""
        return self.rows // self.mesh.size(DATA)

    @property
    def device_heads(self) -> int:
        """Per-head caches of one device: its rows times its KV heads."""
        return self.device_rows * (self.spec.num_kv_heads // self.mesh.size(TENSOR))

    @property
    def read_at_once(self) -> int:
        """Tokens of a row that go through a layer together while prompts are read."""
        return decode.bucket(self.context) if self.policy.whole_prompt else self.chunk

    @property
    def fullest(self) -> float:
        """``imbalance``, or 1 where a policy fills all heads equally."""
        return self.imbalance if uneven(self.policy) else 1.0

    def check_mesh(self) -> None:
        """Raises MeshError: the mesh does not divide rows or heads."""
        heads, kv_heads, experts = self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_experts
        self.mesh.check("plan", rows=self.rows, heads=heads, kv_heads=kv_heads, experts=experts)


def learned_admission(policy: Policy) -> bool:
    """Whether the tokens alone decide which of them outlive the window."""
    return not policy.admission.idle and not policy.admission.rejects_all


def needs_share(policy: Policy) -> bool:
    """Whether nobody knows before a prompt is read how much of it stays."""
    return policy.budget.voted or learned_admission(policy)


def uneven(policy: Policy) -> bool:
    """Whether heads may hold different numbers of slots."""
    return needs_share(policy) or policy.budget.from_scores or bool(policy.budget.learns)


def check(case: Deployment) -> None:
    """Refuses what cannot be planned.

    Raises:
      InputError: a share that is missing or useless, a context beyond the model's positions.
      MeshError: a mesh that does not divide rows or heads.
    """
    if case.share is None and needs_share(case.policy):
        raise InputError(
            f"--policy '{case.policy!r}' keeps a share that depends on the text, which no plan can know. Say "
            "it: --share 0.25 plans for a quarter of the tokens."
        )
    if case.share is not None and not needs_share(case.policy):
        raise InputError(
            f"--share {case.share:g}: '{case.policy!r}' decides itself how much stays. Leave --share out."
        )
    most = case.spec.max_positions
    if case.context > most:
        raise InputError(
            f"--context {case.context} is more than the model's {most} positions. Give at most {most}."
        )
    case.check_mesh()
