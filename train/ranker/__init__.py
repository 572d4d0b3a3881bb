"""Rankers for KVP (``kvjax.policies.kvp``): agents of all layers and KV heads, trained at once on traces."""
