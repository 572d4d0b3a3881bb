"""Benchmarks: tokens a second, bytes, and where a decode step's time goes, beside our peers.

``python -m benchmarks --help`` lists the commands. Each side of a comparison is a process of its own,
pinned to the same CPUs; one command alternates them, so that a busy machine slows all equally.
"""
