"""Attention over partial sets of tokens, for JAX: arrays in, arrays out.

Every read returns a *partial* ``(out, lse)``: the softmax-weighted mean of the values of its own
tokens and the natural log-sum-exp of their scaled scores, both float32. ``merge`` joins partials
into the attention over the union of their tokens. The empty partial is ``(0, -inf)``.

Heads are major everywhere. Letters: B rows, N query heads, K KV heads, G = N / K, T queries,
S slots of a page or key positions, H head dim, P pages of a pool, M pages of a list. Query head n
reads KV head n // G.

Each operation is a folder: ``ref.py`` (the definition), ``xla.py``, ``api.py`` (what is exported
here), ``shapes.py`` (named shapes), ``bench.py``.
"""

from __future__ import annotations

from pallas_kernels.blockwise.api import blockwise, column_mass
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.merge.api import merge
from pallas_kernels.ragged_decode.api import ragged_decode
from pallas_kernels.softmax import EMPTY

__all__ = ["EMPTY", "Unsupported", "blockwise", "column_mass", "merge", "ragged_decode"]
