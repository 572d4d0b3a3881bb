"""Quality against measured bytes, for any policy and model: ``python -m kvjax.eval run --help``.

tasks (samples from seeds)  ->  batch (prefill, compress, ask)  ->  store (one JSON line a cell)
store  ->  tables, figures, page, claims

A **cell** is one task at one length under one policy and protocol with one seed. The same samples are
given to every policy, and the full cache is always measured first: a method cannot lose what the
model never had.
"""
