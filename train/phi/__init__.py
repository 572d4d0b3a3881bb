"""Trains φ maps on traces: distillation of attention scores, all heads at once."""
