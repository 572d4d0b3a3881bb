"""Causal attention of T queries over S dense keys, with a window and admitted keys."""
