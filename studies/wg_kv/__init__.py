"""WG-KV: thresholds of its gates (``python -m studies.wg_kv --help``).

Write-Gated KV, https://arxiv.org/abs/2512.17452; results in ``results/wg_kv``.
"""
