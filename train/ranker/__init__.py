"""Rankers for KVP (``kvjax.policies.kvp``): an agent for each layer and KV head, trained on traces."""
