"""Measurements behind the papers' claims, a package a paper; results go to ``results/<paper>``."""
