"""Sparse prefill: a window of latest keys for everybody and, beyond it, the keys each KV head admitted."""
