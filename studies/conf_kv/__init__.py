"""CONF-KV: what its confidence buys. ``python -m studies.conf_kv --help``; results in ``results/conf_kv``.

Li, Miao: CONF-KV: Confidence-Aware KV Cache Eviction with Mixed-Precision Storage for Long-Horizon LLM
"""
