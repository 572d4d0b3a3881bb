"""Attention over pages of a pool, one list of pages and one length per KV head."""
