"""Policies as values that are named, described and compared."""

from kvjax.catalogue._family import describe, family, opened

__all__ = ["describe", "family", "opened"]
