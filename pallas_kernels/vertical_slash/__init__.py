"""Sparse prefill: a window of latest keys for every query and, beyond it, the keys each KV head admitted."""
