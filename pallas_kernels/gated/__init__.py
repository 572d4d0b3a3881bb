"""Causal self-attention with a log-gate bias outside the window: what WG-KV trains through."""
