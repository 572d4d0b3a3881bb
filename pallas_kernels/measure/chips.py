"""What chips have, as their makers publish it: memory, and how fast bytes move.

Per device as JAX counts them: a TPU7x chip is two devices, each with half of it.
"""

from __future__ import annotations

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One device.

    Attributes:
      name: as libtpu and ``aot`` call it.
      memory: bytes that one program may have.
      bandwidth: bytes a second between memory and the chip.
      links: bytes a second that it sends to other chips, over all its links at once.
      flops: products and sums of bfloat16 a second.
      remark: what should be known of ``memory``, or "".
    """

    name: str
    memory: int
    bandwidth: float
    links: float
    flops: float
    remark: str = ""


THREE_QUARTERS = "three quarters, which JAX takes by default (XLA_PYTHON_CLIENT_MEM_FRACTION)"

# Memory of TPUs: what libtpu lets one program have, less than the chip's. Bandwidths: the pages of Cloud TPU
# (docs.cloud.google.com/tpu/docs: v5e, v5p, v6e, tpu7x) and NVIDIA's data sheets (A100: SXM, 40 GB;
# H100: SXM; T4: operations of float16, for it has no units for bfloat16). The links' are published for both
# directions together; here is one.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(name="v5e", memory=int(15.75 * GIB), bandwidth=819e9, links=200e9, flops=197e12),
        Chip(name="v6e", memory=int(31.25 * GIB), bandwidth=1638e9, links=400e9, flops=918e12),
        Chip(name="v5p", memory=int(95.74 * GIB), bandwidth=2765e9, links=600e9, flops=459e12),
        Chip(name="tpu7x", memory=int(94.75 * GIB), bandwidth=3690e9, links=300e9, flops=1153.5e12),
        Chip(
            name="t4",
            memory=int(0.75 * 15e9),
            bandwidth=300e9,
            links=16e9,
            flops=65e12,
            remark=f"of 15 GB that are free {THREE_QUARTERS}",
        ),
        Chip(
            name="l4",
            memory=int(0.75 * 23e9),
            bandwidth=300e9,
            links=32e9,
            flops=121e12,
            remark=f"of 23 GB that are free {THREE_QUARTERS}",
        ),
        Chip(
            name="a100",
            memory=int(0.75 * 42e9),
            bandwidth=1555e9,
            links=300e9,
            flops=312e12,
            remark=f"of 42 GB {THREE_QUARTERS}",
        ),
        Chip(
            name="h100",
            memory=int(0.75 * 85e9),
            bandwidth=3350e9,
            links=450e9,
            flops=989e12,
            remark=f"of 85 GB {THREE_QUARTERS}",
        ),
        Chip(
            name="h200",
            memory=int(0.75 * 150e9),
            bandwidth=4800e9,
            links=450e9,
            flops=989e12,
            remark="three quarters of 150 GB, which JAX takes by default (XLA_PYTHON_CLIENT_MEM_FRACTION)",
        ),
    )
}
"""By name."""
