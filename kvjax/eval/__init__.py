"""Quality against measured bytes, for any policy and model: ``python -m kvjax.eval run --help``.

tasks    samples from seeds, and how an answer is scored
measure  prefill, compress, ask; one row of results a cell
report   tables, figures, one HTML page, the front

A **cell** is one task at one length under one policy and protocol with one seed. The same samples are
given to every policy, and the full cache is always measured first: a method cannot lose what the model
never had.
"""
