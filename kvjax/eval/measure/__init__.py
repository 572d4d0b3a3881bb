"""Cells measured: a grid of them, batches through a policy, one row of results a cell."""
