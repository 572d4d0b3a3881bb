"""Attention over partial sets of tokens, for JAX: arrays in, arrays out.

Every read returns a *partial* ``(out, lse)``: the softmax-weighted mean of the values of its own
tokens and the natural log-sum-exp of their scaled scores, both float32. ``merge`` joins partials
into the attention over the union of their tokens. The empty partial is ``(0, -inf)``.

Heads are major everywhere. Letters: B rows, N query heads, K KV heads, G = N / K, T queries,
S slots of a page or key positions, H head dim, P pages of a pool, M pages of a list. Query head n
reads KV head n // G.

Each operation is a folder: ``ref.py`` (the definition), ``xla.py``, ``mosaic_tpu.py`` and ``triton.py``
(data movement only; the mathematics of tiles is in ``tiles.py``), ``api.py`` (exported here) and ``work.py``
(checks on a device, and calls that choose blocks; ``measure`` runs them). Benchmarks, and cases that are
compiled for chips, are in ``benchmarks/kernels``. README.md has the table of what was checked.
"""

from __future__ import annotations

from pallas_kernels.blockwise.api import blockwise, column_mass
from pallas_kernels.decode_step.api import decode_step
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.gated.api import gated
from pallas_kernels.merge.api import merge
from pallas_kernels.phi.api import phi_build, phi_evaluate, phi_subtract
from pallas_kernels.ragged_decode.api import ragged_decode
from pallas_kernels.softmax import EMPTY
from pallas_kernels.vertical_slash.api import vertical_slash

__all__ = [
    "EMPTY",
    "Unsupported",
    "blockwise",
    "column_mass",
    "decode_step",
    "gated",
    "merge",
    "phi_build",
    "phi_evaluate",
    "phi_subtract",
    "ragged_decode",
    "vertical_slash",
]
