"""Budgets: rules for targets, the number of live slots that each KV head may keep."""
