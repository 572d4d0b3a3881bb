"""What fits and how long it takes at least, from shapes alone: nothing is compiled, no device is needed.

``python -m kvjax.plan`` compiles and knows better. This is for a choice before that: how many rows an
evaluation may read at once, and which model a device can hold. Its temporaries are rules of thumb, which the
compiled plans of ``results/plan`` bear out within a factor of four, and they are small beside the rest.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax import catalogue
from kvjax.algebra import Policy
from kvjax.models.spec import ModelSpec
from kvjax.plan import _estimate as estimate
from kvjax.plan import _shapes as shapes
from kvjax.plan._deployment import Deployment, needs_share
from kvjax.sharding.specs import DATA, TENSOR

MOST_ROWS = 1 << 10
"""The search for the most rows ends here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes of one device.

    Attributes:
      weights: of the model, and of the policy's learned parts.
      reading, answering: caches and temporaries while prompts are read, and while answers are written.
    """

    weights: int
    reading: int
    answering: int

    @property
    def total(self) -> int:
        """All that has to fit."""
        return self.weights + max(self.reading, self.answering)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What has to be done at least.

    Attributes:
      read_flops: products and sums of reading the prompts of all rows.
      step_bytes, step_flops: loaded and done by one step of all rows.
    """

    read_flops: float
    step_bytes: float
    step_flops: float

    def seconds(self, steps: int, flops: float, bandwidth: float) -> tuple[float, float]:
        """(of reading, of so many steps) at these many operations and bytes a second."""
        step = max(self.step_bytes / bandwidth, self.step_flops / flops)
        return self.read_flops / flops, steps * step


def deployment(
    spec: ModelSpec,
    policy: Policy | str,
    *,
    rows: int,
    context: int,
    dtype: str,
    weight_dtype: str | None = None,
    devices: int = 1,
    share: float = 1.0,
) -> Deployment | None:
    """A model on devices of one kind, on the mesh with the fewest bytes a device; None if none divides it.

    Args:
      spec, policy, rows, context, dtype, weight_dtype: as in a plan.
      devices: how many.
      share: what stays of the tokens where only the text can tell; all of them by default.
    """
    if isinstance(policy, str):
        policy = catalogue.policy(policy)
    case = Deployment(
        spec=spec,
        policy=policy,
        mesh=estimate.abstract(1, 1, 1),
        rows=rows,
        context=min(context, spec.max_positions),
        dtype=dtype,
        weight_dtype=weight_dtype,
        share=share if needs_share(policy) else None,
    )
    mesh = estimate.best_mesh(case, devices)
    return None if mesh is None else dataclasses.replace(case, mesh=mesh)


def need(case: Deployment, copies: int = 1) -> Need:
    """Bytes of one device; ``copies`` of the cache exist while answers are written."""
    reading, held = estimate.resident(case, reading=True), estimate.resident(case)
    spec, tokens = case.spec, case.device_rows * case.read_at_once
    tensor = case.mesh.size(TENSOR)
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    # A layer's input, its norm, sums and output; queries, keys and values; two of the MLP's inner width.
    width = 5 * spec.model_dim + (heads + 2 * spec.mlp_dim) // tensor
    replay = shapes.full_cache(case) if case.policy.holds_prompt else 0
    logits = 4 * case.device_rows * spec.vocab_size
    layer = held.allocated // spec.num_layers
    return Need(
        weights=held.weights + held.learned,
        reading=reading.allocated + tokens * width * case.itemsize + replay + logits,
        answering=copies * held.allocated + 2 * layer + 2 * logits,
    )


def work(case: Deployment) -> Work:
    """What reading the prompts of all rows and one step of them take at least, on one device."""
    layers = shapes.layer_sizes(case)
    whole = dataclasses.replace(case, weight_dtype=None)
    matrices = shapes.device_bytes(shapes.read_every_step(whole)) / case.itemsize
    spec, rows, context = case.spec, case.device_rows, case.context
    tensor = case.mesh.size(TENSOR)
    # Scores and mixtures of a causal read: of each pair of tokens two products of head_dim channels.
    windows = [min(context, window or context) for window in spec.windows]
    pairs = sum(window * context - window**2 / 2 for window in windows)
    head = spec.vocab_size * spec.model_dim / tensor  # the last token alone goes through it
    read = 2.0 * rows * context * (matrices - head)
    read += 4.0 * rows * pairs * spec.num_heads / tensor * spec.head_dim
    cache = sum(layer.read for layer in layers)
    slot = 2 * spec.head_dim * jnp.dtype(case.dtype).itemsize
    return Work(
        read_flops=read,
        step_bytes=shapes.device_bytes(shapes.read_every_step(case)) + cache,
        step_flops=2.0 * rows * matrices + 4.0 * cache / slot * spec.groups * spec.head_dim,
    )


def most_rows(case: Deployment, memory: int, copies: int = 1) -> int:
    """Rows a device can have at this context; 0 if not one fits."""
    data = case.mesh.size(DATA)
    need_of = lambda rows: need(dataclasses.replace(case, rows=rows * data), copies)  # noqa: E731
    return data * estimate.largest(lambda rows: need_of(rows).total <= memory, MOST_ROWS)


def longest(case: Deployment, memory: int, copies: int = 1) -> int:
    """Tokens that its rows can have, in steps of 1,024, up to the model's positions; 0 if not even those."""
    most = case.spec.max_positions
    need_of = lambda n: need(dataclasses.replace(case, context=min(n * estimate.STEP, most)), copies)  # noqa: E731
    steps = estimate.largest(lambda n: need_of(n).total <= memory, -(-most // estimate.STEP))
    return min(steps * estimate.STEP, most)
