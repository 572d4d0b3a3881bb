"""Budgets: rules that yield targets, the live slots each stream may keep (numbers only)."""
